// Which rows the table has, and in which order: equal ranks are one row, those at fault
// come first. Nothing here draws.

export const MANY = 24; // ranks from which on equal ones are one row

/** What a user may ask of the table. */
export function plainView() {
  return {
    fold: true, // one row for equal ranks, where there are many
    culprits: false, // only ranks at fault, and what is wrong in other ways
    filter: "", // numbers of ranks, or a part of any cell
    sort: null, // the key of a column, and whether the highest comes first
    descending: false,
    opened: new Set(), // the keys of folds that are open
  };
}

/**
 * Arrange rows, a map of ranks to cells, for a view.
 *
 * Return items `{key, ranks, fold, open}` in order: a row of one rank, or of the ranks of
 * a fold. An open fold is followed by the rows of its ranks.
 */
export function arrange(rows, view) {
  const fits = filterOf(view.filter);
  const kept = [...rows].filter(
    ([rank, cells]) => fits(rank, cells) && (!view.culprits || isConspicuous(cells)),
  );
  kept.sort(([one], [other]) => one - other);
  const folds = view.fold && rows.size >= MANY;
  const items = folds ? foldsOf(kept) : kept.map(([rank]) => single(rank));
  if (view.sort) sortBy(items, rows, view);
  else if (folds) items.sort((one, other) => one.place - other.place);
  return items.flatMap((item) => {
    if (!item.fold) return [item];
    const open = view.opened.has(item.key);
    return [{ ...item, open }, ...(open ? item.ranks.map(single) : [])];
  });
}

function single(rank) {
  return { key: `rank ${rank}`, ranks: [rank], fold: false, open: false };
}

function foldsOf(kept) {
  const alike = new Map();
  for (const [rank, cells] of kept) {
    const [place, ...parts] = likeness(cells);
    const key = `${place} ${parts.join("|")}`;
    if (!alike.has(key)) alike.set(key, { key, place, ranks: [], fold: true });
    alike.get(key).ranks.push(rank);
  }
  return [...alike.values()].map((item) =>
    item.ranks.length > 1 ? item : { ...single(item.ranks[0]), place: item.place },
  );
}

/**
 * What makes ranks equal: at fault, waiting for one, or strange in the same way. Ranks
 * that go on are equal whatever op they are in: else rows would come and go with each.
 */
function likeness({ blame, verdict, state, mood, op, seq, line, lag, awaited, cell, failed }) {
  if (blame) return [0, verdict, state, op, seq, line];
  if (mood === "error" && state !== "aborted") return [1, state];
  if (verdict) return [2, verdict, op, seq, line];
  if (awaited) return [1, "late"];
  if (mood === "warning" || lag) return [1, state, op, seq, lag];
  if (mood === "working" || mood === "busy") return [3, cell];
  return [4, state, failed];
}

/** Whether a rank is at fault, or strange: not one that waits or goes on. */
export function isConspicuous(cells) {
  return likeness(cells)[0] < 2;
}

/** A test of ranks and cells for a text: "3, 8-11" means ranks, others a part of a cell. */
export function filterOf(text) {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return () => true;
  const parts = wanted.split(",").map((part) => /^(\d+)(?:\s*[-–]\s*(\d+))?$/.exec(part.trim()));
  if (parts.every(Boolean)) {
    const spans = parts.map(([, from, to = from]) => [Number(from), Number(to)]);
    return (rank) => spans.some(([from, to]) => from <= rank && rank <= to);
  }
  return (rank, cells) =>
    Object.entries(cells).some(
      ([key, value]) => key !== "mood" && String(value).toLowerCase().includes(wanted),
    );
}

const SIZES = { B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40 };
const TIMES = { ns: 1, "µs": 1e3, ms: 1e6, s: 1e9 };
const RATES = { "kB/s": 1e-3, "MB/s": 1, "GB/s": 1e3, "TB/s": 1e6 };
const UNITS = new Map(Object.entries({ ...SIZES, ...TIMES, ...RATES }));

// Cells of which a fold shows the lowest and the highest.
const RANGES = ["last", "algbw", "busbw", "memory", "cpu", "gpu_memory", "waits"];

/** A cell for comparison: the number in "#14", "2.1 ms" and "9% · 2 ms", else the text. */
export function valueOf(key, rank, cells) {
  if (key === "rank") return rank;
  // What began first has lasted longest.
  if (key === "elapsed" || key === "beat") {
    const since = cells[key === "beat" ? "silent" : "since"];
    return since ? -since : undefined;
  }
  const value = cells[key];
  const found = /^#?(-?[\d.]+)(?:% · .*|%| (\S+))?$/.exec(value ?? "");
  return found ? Number(found[1]) * (UNITS.get(found[2]) ?? 1) : value;
}

function sortBy(items, rows, { sort, descending }) {
  const of = ({ ranks }) => valueOf(sort, ranks[0], rows.get(ranks[0]));
  const values = new Map(items.map((item) => [item, of(item)]));
  items.sort((one, other) => {
    const [mine, others] = [values.get(one), values.get(other)];
    // Empty cells come last in both directions.
    if (mine === undefined || others === undefined) {
      return Number(mine === undefined) - Number(others === undefined);
    }
    const less = typeof mine === typeof others ? mine < others : typeof mine === "number";
    const order = mine === others ? 0 : less ? -1 : 1;
    return (descending ? -order : order) || one.ranks[0] - other.ranks[0];
  });
}

/** The cells of a fold: those in which its ranks are equal, and the extremes of some. */
export function foldedCells(all) {
  const [first] = all;
  const same = (key) => all.every((cells) => cells[key] === first[key]);
  const cells = {};
  for (const [key, value] of Object.entries(first)) if (same(key)) cells[key] = value;
  if (!("mood" in cells)) cells.mood = "busy";
  if (!("state" in cells)) cells.state = "running";
  if (!("seq" in cells) && "op" in cells) {
    const numbers = all.map(({ seq }) => valueOf("seq", 0, { seq })).filter(Number.isFinite);
    if (numbers.length > 0) cells.seq = `#${Math.min(...numbers)}–${Math.max(...numbers)}`;
  }
  for (const key of RANGES) {
    const there = all.filter((one) => one[key] !== undefined && !(key in cells));
    const found = there.map((one) => [valueOf(key, 0, one), one[key]]);
    const numbers = found.filter(([value]) => typeof value === "number").sort(([a], [b]) => a - b);
    if (numbers.length > 0) cells[key] = `${numbers[0][1]} – ${numbers.at(-1)[1]}`;
  }
  for (const key of ["since", "at"]) {
    const times = all.map((one) => one[key]).filter((time) => time !== undefined);
    if (times.length === all.length) cells[key] = Math.min(...times);
  }
  return cells;
}
