import { RankMap } from "/widgets/board/page/map.js";
import { aboutLines, layOut, linesOf, meshOf, neighbour, placeOf, scaleOf, scalesOf } from "/widgets/board/page/map_layout.js";
import { equal, test } from "./harness.js";

const range = (count) => [...Array(count).keys()];

/** The groups of a mesh of dp × tp ranks, and the group of all. */
function groupsOf(dp, tp, names = ["dp", "tp"]) {
  const all = range(dp * tp);
  return [
    { name: "default", ranks: all },
    ...range(tp).map((at) => ({ name: names[0], ranks: range(dp).map((row) => row * tp + at) })),
    ...range(dp).map((row) => ({ name: names[1], ranks: range(tp).map((at) => row * tp + at) })),
  ];
}

const at = (host) => ({ host });
const measure = (text) => text.length * 5;
const laid = (lines, width, matrix = false, tallest = 240) => layOut(lines, width, measure, matrix, tallest);

test("groups along two dimensions are a mesh", () => {
  const mesh = meshOf(groupsOf(3, 4));
  equal([mesh.names, mesh.sizes], [["dp", "tp"], [3, 4]]);
  equal([mesh.at.get(0), mesh.at.get(7), mesh.at.get(8)], [[0, 0], [1, 3], [2, 0]]);
  equal(placeOf(7, at("a"), mesh), "dp 1, tp 3");
});

test("groups of three dimensions, and of two of them together, are one mesh", () => {
  const groups = [];
  for (const a of range(2)) for (const b of range(3)) groups.push({ name: "tp", ranks: range(2).map((c) => a * 6 + b * 2 + c) });
  for (const a of range(2)) for (const c of range(2)) groups.push({ name: "pp", ranks: range(3).map((b) => a * 6 + b * 2 + c) });
  for (const b of range(3)) for (const c of range(2)) groups.push({ name: "dp", ranks: range(2).map((a) => a * 6 + b * 2 + c) });
  for (const a of range(2)) groups.push({ name: "pp_tp", ranks: range(6).map((n) => a * 6 + n) });
  const mesh = meshOf(groups);
  equal([mesh.names, mesh.sizes], [["dp", "pp", "tp"], [2, 3, 2]]);
  equal(linesOf([0, 1, 2, 11], new Map(), mesh), [
    { label: "dp 0 · pp 0", ranks: [0, 1] }, { label: "dp 0 · pp 1", ranks: [2] },
    { label: "dp 1 · pp 2", ranks: [11] },
  ]);
  equal(aboutLines([], mesh), "rows: dp × pp, columns: tp");
});

test("numbers at the end of names, and names that are ranks, are left out", () => {
  const numbered = groupsOf(2, 2).map(({ name, ranks }, place) => ({ name: `${name}_${place}`, ranks }));
  equal(meshOf(numbered).names, ["dp", "tp"]);
  const unnamed = groupsOf(2, 2).map(({ ranks }) => ({ name: `ranks ${ranks.join()}`, ranks }));
  equal(meshOf(unnamed).names, ["dimension 0", "dimension 1"]);
  const again = groupsOf(2, 2).map(({ name, ranks }) => ({ name: `${name} (2)`, ranks }));
  equal(meshOf(again).names, ["dp", "tp"]);
});

test("a name is that of one dimension", () => {
  const mesh = groupsOf(2, 3);
  const again = mesh.filter(({ name }) => name === "tp").map(({ ranks }) => ({ name: "dp", ranks }));
  equal(meshOf([...again, ...mesh]).names, ["dp", "tp"]); // the rows are "dp", too
  equal(meshOf(groupsOf(2, 3, ["g", "g"])).names, ["g", "g (0–2)"]);
  equal(meshOf(groupsOf(4, 4, ["g 0", "g 1"])).names, ["g", "g (0–3)"]);
});

test("other groups are no mesh", () => {
  equal(meshOf([]), null);
  equal(meshOf([{ name: "default", ranks: range(4) }]), null);
  equal(meshOf(groupsOf(2, 2).slice(0, 4)), null); // a row is not there
  const uneven = [{ name: "a", ranks: [0, 1] }, { name: "a", ranks: [2, 3] }, { name: "b", ranks: [0, 3] }, { name: "b", ranks: [1, 2] }];
  equal(meshOf(uneven), null);
  equal(meshOf([{ name: "one", ranks: [0] }, { name: "none", ranks: [] }]), null);
});

test("without a mesh each host has a line", () => {
  const rows = new Map(range(6).map((rank) => [rank, at(rank < 4 ? "a" : "b")]));
  const lines = linesOf(range(6), rows, null);
  equal(lines, [{ label: "a", ranks: [0, 1, 2, 3] }, { label: "b", ranks: [4, 5] }]);
  equal([aboutLines(lines, null), placeOf(5, rows.get(5), null)], ["by host", "b"]);
  equal(linesOf([0, 1], rows, null), [{ label: "", ranks: [0, 1] }]);
});

test("a line goes on below where it is too long", () => {
  const { squares, labels, width, height } = laid([{ label: "", ranks: range(5) }], 72);
  equal(squares.map(({ x, y }) => [x, y]), [[0, 0], [24, 0], [48, 0], [0, 18], [24, 18]]);
  equal([labels, width, height], [[], 72, 36]);
});

test("lines stand beside each other, those of a matrix if it is too high", () => {
  const lines = range(4).map((row) => ({ label: `r${row}`, ranks: [row * 2, row * 2 + 1] }));
  const places = (found) => found.labels.map(({ x, y }) => [x, y]);
  equal(places(laid(lines, 200)), [[0, 0], [0, 18], [82, 0], [82, 18]]);
  equal(places(laid(lines, 200, true)), [[0, 0], [0, 18], [0, 36], [0, 54]]);
  equal(places(laid(lines, 200, true, 40)), [[0, 0], [0, 18], [82, 0], [82, 18]]);
  equal(laid(lines, 90, true, 20).height, 72); // no room beside
  equal(laid(lines, 200).numbered, true);
  equal(laid([{ label: "", ranks: range(1024) }], 1200).numbered, false);
});

test("arrow keys go to the neighbours", () => {
  const { squares } = laid([{ label: "", ranks: range(5) }], 72);
  const from = (place, key) => neighbour(squares, place, key);
  equal([from(0, "ArrowRight"), from(4, "ArrowRight"), from(0, "ArrowLeft")], [1, 4, 0]);
  equal([from(1, "ArrowDown"), from(2, "ArrowDown"), from(4, "ArrowUp"), from(1, "ArrowUp")], [4, 4, 1, 1]);
  equal([from(3, "Home"), from(3, "End")], [0, 4]);
});

test("a scale goes from the lowest value to the highest", () => {
  const memory = ["2 GiB", "1 GiB", "512 MiB", undefined];
  const rows = new Map(memory.map((text, rank) => [rank, text ? { memory: text } : {}]));
  const { parts, least, most } = scaleOf(rows, "memory");
  equal([...parts].map(([rank, part]) => [rank, Math.round(part * 100)]), [[0, 100], [1, 33], [2, 0]]);
  equal([least, most], ["512 MiB", "2 GiB"]);
  equal(scalesOf(rows), [["memory", "memory"]]);
  equal(scaleOf(new Map([[0, {}], [1, { lag: 3 }]]), "lag").parts, new Map([[0, 0], [1, 1]]));
  equal(scaleOf(new Map([[0, {}]]), "memory").parts, new Map());
  const late = new Map([[0, { waits: "76%" }], [1, { waits: "0%", late: "90% · 8 ms" }], [2, {}]]);
  equal(scaleOf(late, "late"), { parts: new Map([[0, 0], [1, 1]]), least: "0%", most: "90% · 8 ms" });
});

test("a map that is not drawn yet has no rank below the pointer", () => {
  const map = new RankMap(() => { throw new Error("no rank"); });
  for (const type of ["pointermove", "click"]) map.canvas.dispatchEvent(new MouseEvent(type));
  equal(map.placeAt({ offsetX: 0, offsetY: 0 }), -1);
  map.keydown({ key: "End", preventDefault() { throw new Error("a key"); } });
});

test("a line that breaks has a power of two of ranks", () => {
  const line = { label: "", ranks: [...Array(64).keys()] };
  const columns = (width) => new Set(laid([line], width).squares.map(({ x }) => x)).size;
  equal([1200, 800, 60].map(columns), [32, 32, 2]);
  equal(columns(64 * 24), 64);
});
