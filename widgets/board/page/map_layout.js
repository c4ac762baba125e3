// Where each rank stands on the map: in a matrix, where the groups are those of a mesh,
// else on the line of its host; and its colour. Nothing here draws.

import { valueOf } from "./arrange.js";
import { shortName, shortRanks } from "./text.js";

const LARGE = { pitch: 24, height: 18 }; // px of a square with the number of its rank
const SMALL = { pitch: 12, height: 12 };
const NUMBERED = 128; // ranks up to which squares have numbers
const BETWEEN = 16; // px between two lines of ranks beside each other

/** What it means that a cell is empty, where it is known: such a rank is never late. */
const NEVER = { late: ({ waits }) => waits && "0%" };

/** By what the squares are coloured, as [key of a cell, title]; "state" is of all ranks. */
export const SCALES = [
  ["lag", "lag"], ["memory", "memory"], ["gpu_memory", "GPU memory"], ["cpu", "CPU"],
  ["waits", "waits"], ["late", "late"],
];

/**
 * The mesh that groups make: `{names, sizes, at}`, the first dimension first, where `at`
 * maps ranks to coordinates; null if there is none.
 *
 * The groups along a dimension share a name, but for a number at its end, a size and the
 * distance of their ranks. Such groups are a dimension where that distance is the product
 * of the dimensions behind it.
 */
export function meshOf(groups) {
  const found = new Map();
  for (const { name, ranks } of groups) {
    const step = ranks[1] - ranks[0];
    if (!ranks.every((rank, place) => rank === ranks[0] + place * step)) continue;
    const title = name.replace(/ \(\d+\)$| *\branks? [\d,-]+$/g, "").replace(/[\s_:-]*\d+$/, "");
    const key = JSON.stringify([title, ranks.length, step]);
    if (!found.has(key)) found.set(key, { title, size: ranks.length, step, at: new Map() });
    ranks.forEach((rank, place) => found.get(key).at.set(rank, place));
  }
  // The finest: the groups of two dimensions together may be there too.
  const families = [...found.values()].sort((one, other) => one.step - other.step || one.size - other.size);
  const chosen = [];
  let step = 1;
  for (const family of families) {
    const same = (rank) => family.at.has(rank);
    if (family.step !== step || chosen.some(({ at }) => ![...at.keys()].every(same))) continue;
    chosen.unshift(family);
    step *= family.size;
  }
  if (chosen.length < 2 || chosen.some(({ at }) => at.size !== step)) return null;
  const names = namesOf(chosen, families);
  const at = new Map([...chosen[0].at.keys()].map((rank) => [rank, chosen.map((one) => one.at.get(rank))]));
  return { names, sizes: chosen.map(({ size }) => size), at };
}

/** A name of its own for each dimension: some groups have two names, others share one. */
function namesOf(chosen, families) {
  const titles = chosen.map(({ step, size, title }) => {
    const same = families.filter((one) => one.step === step && one.size === size).map((one) => one.title);
    return [title, ...same].filter(Boolean);
  });
  const names = chosen.map(() => null);
  // Those with fewest names choose first.
  const order = chosen.map((_, dim) => dim).sort((one, other) => titles[one].length - titles[other].length);
  for (const dim of order) {
    const free = titles[dim].find((title) => !names.includes(title));
    const ranks = [...chosen[dim].at.keys()].slice(0, chosen[dim].size);
    names[dim] = free ?? (titles[dim].length ? `${titles[dim][0]} (${shortRanks(ranks)})` : `dimension ${dim}`);
  }
  return names;
}

/** The lines of the map, as {label, ranks}: of a mesh its rows, else the hosts. */
export function linesOf(ranks, rows, mesh) {
  const lines = new Map();
  for (const rank of ranks) {
    const label = mesh ? rowOf(mesh, rank) : (rows.get(rank).host ?? "");
    if (!lines.has(label)) lines.set(label, { label, ranks: [] });
    lines.get(label).ranks.push(rank);
  }
  if (lines.size === 1) return [{ label: "", ranks }];
  return [...lines.values()];
}

/** The coordinates of a rank but the last, as "dp 3 · pp 0". */
function rowOf({ names, at }, rank) {
  return at.get(rank).slice(0, -1).map((place, dim) => `${shortName(names[dim])} ${place}`).join(" · ");
}

/** What stands behind the legend: what lines and columns are. */
export function aboutLines(lines, mesh) {
  if (mesh) {
    const names = mesh.names.map(shortName);
    return `rows: ${names.slice(0, -1).join(" × ")}, columns: ${names.at(-1)}`;
  }
  return lines.length > 1 ? "by host" : "";
}

/** Where a rank is: its coordinates in a mesh, or its host. */
export function placeOf(rank, cells, mesh) {
  if (!mesh) return cells.host ?? "";
  return mesh.names.map((name, dim) => `${name} ${mesh.at.get(rank)[dim]}`).join(", ");
}

/**
 * Lay lines out in `width` px; `measure(text)` is the width of a text. Return squares
 * {rank, x, y} in the order of the lines, labels {text, x, y}, the size of a square, and
 * of all. Where lines have room beside each other, those of hosts take it,
 * and those of a matrix only if it is higher than `tallest` px.
 */
export function layOut(lines, width, measure, matrix, tallest) {
  const count = lines.reduce((sum, { ranks }) => sum + ranks.length, 0);
  const { pitch, height } = count <= NUMBERED ? LARGE : SMALL;
  const label = Math.ceil(Math.max(...lines.map(({ label: text }) => (text ? measure(text) + 8 : 0)), 0));
  const longest = Math.max(...lines.map(({ ranks }) => ranks.length), 1);
  const fits = Math.max(1, Math.floor((width - label) / pitch));
  // Where a line breaks, rows of 32 or 64 ranks are easier to count in than those of 48.
  const breaks = fits < longest && fits >= 16 && !matrix;
  const columns = breaks ? 2 ** Math.floor(Math.log2(fits)) : Math.min(longest, fits);
  const block = label + columns * pitch + BETWEEN;
  const room = columns < longest ? 1 : Math.max(1, Math.floor((width + BETWEEN) / block));
  const needed = matrix ? Math.ceil((lines.length * height) / tallest) : lines.length;
  const below = Math.ceil(lines.length / Math.min(room, needed)); // lines below each other
  const squares = [];
  const labels = [];
  let [y, bottom] = [0, 0];
  lines.forEach(({ label: text, ranks }, place) => {
    if (place % below === 0) y = 0;
    const x = Math.floor(place / below) * block;
    if (text) labels.push({ text, x, y });
    ranks.forEach((rank, number) => {
      const [row, column] = [Math.floor(number / columns), number % columns];
      squares.push({ rank, x: x + label + column * pitch, y: y + row * height });
    });
    y += Math.ceil(ranks.length / columns) * height;
    bottom = Math.max(bottom, y);
  });
  return {
    squares, labels, size: [pitch - 2, height - 2], numbered: pitch === LARGE.pitch,
    width: Math.max(...squares.map(({ x }) => x + pitch)), height: bottom,
  };
}

/** The square that an arrow key leads to from another, which stands at `place`. */
export function neighbour(squares, place, key) {
  if (key === "ArrowRight") return Math.min(place + 1, squares.length - 1);
  if (key === "ArrowLeft") return Math.max(place - 1, 0);
  if (key === "Home") return 0;
  if (key === "End") return squares.length - 1;
  const { x, y } = squares[place];
  const below = key === "ArrowDown";
  let best = place;
  squares.forEach((one, number) => {
    if (below ? one.y <= y : one.y >= y) return;
    const far = (square) => [Math.abs(square.y - y), Math.abs(square.x - x)];
    const [mine, known] = [far(one), far(squares[best])];
    if (best === place || mine[0] < known[0] || (mine[0] === known[0] && mine[1] < known[1])) best = number;
  });
  return best;
}

/** The scales that say something of some rows: those with two values at least. */
export function scalesOf(rows) {
  const values = new Map(SCALES.map(([key]) => [key, new Set()]));
  for (const cells of rows.values()) for (const [key, found] of values) found.add(cells[key]);
  return SCALES.filter(([key]) => values.get(key).size > 1);
}

/**
 * The scale of a cell over some rows: the part from 0 to 1 of each rank that has a value,
 * and the lowest and the highest as texts.
 */
export function scaleOf(rows, key) {
  const found = [];
  for (const [rank, cells] of rows) {
    const text = key === "lag" ? `${cells.lag ?? 0}` : (cells[key] ?? NEVER[key]?.(cells));
    const value = text === undefined ? undefined : valueOf(key, rank, { [key]: text });
    if (typeof value === "number") found.push({ rank, value, text });
  }
  if (found.length === 0) return { parts: new Map(), least: "", most: "" };
  const least = found.reduce((best, one) => (one.value < best.value ? one : best));
  const most = found.reduce((best, one) => (one.value > best.value ? one : best));
  const span = most.value - least.value;
  const parts = new Map(found.map(({ rank, value }) => [rank, span ? (value - least.value) / span : 0]));
  return { parts, least: least.text, most: most.text };
}
