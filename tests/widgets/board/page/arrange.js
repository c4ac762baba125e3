import { MANY, arrange, filterOf, foldedCells, isConspicuous, plainView, valueOf } from "/widgets/board/page/arrange.js";
import { equal, test } from "./harness.js";

const waits = { state: "in flight", mood: "working", op: "all_reduce", seq: "#21", verdict: "waits for ranks 17, 41" };
const absent = { state: "idle", mood: "calm", op: "all_reduce", seq: "#20", lag: 1, verdict: "not entered", blame: 1 };

/** Rows of many ranks, of which some are others. */
function rowsOf(count, cells, others = {}) {
  return new Map(Array.from({ length: count }, (_, rank) => [rank, others[rank] ?? cells]));
}

/** What is shown, a text for each row: ranks, and whether it is a fold. */
function shown(rows, view = {}) {
  return arrange(rows, { ...plainView(), ...view }).map(
    ({ ranks, fold, open }) => `${fold ? (open ? "▾" : "▸") : ""}${ranks.length > 3 ? ranks.length : ranks}`,
  );
}

test("equal ranks are one row behind those at fault", () => {
  const rows = rowsOf(64, waits, { 17: absent, 41: { ...absent, line: "cell 3 line 2" } });
  equal(shown(rows), ["17", "41", "▸62"]);
  equal(shown(rows, { fold: false }).slice(0, 3), ["0", "1", "2"]);
});

test("few ranks have a row each, in their order", () => {
  equal(shown(rowsOf(4, waits, { 2: absent })), ["0", "1", "2", "3"]);
  equal(arrange(rowsOf(MANY - 1, waits), plainView()).length, MANY - 1);
});

test("ranks that go on stay in one row whatever they are in", () => {
  const moving = { state: "in flight", mood: "working", op: "all_reduce", cell: "7" };
  const others = { 3: { ...moving, seq: "#9" }, 4: { ...moving, state: "in cell 7", mood: "busy" } };
  equal(shown(rowsOf(64, { ...moving, seq: "#8" }, others)), ["▸64"]);
  equal(shown(rowsOf(64, moving, { 9: { ...moving, awaited: 1 } })), ["9", "▸63"]);
  const behind = { ...moving, lag: 2 };
  equal(shown(rowsOf(64, behind, { 9: { ...behind, awaited: 1 } })), ["▸63", "9"]);
  equal(shown(rowsOf(64, moving, { 5: { ...moving, lag: 3 }, 6: { state: "dead", mood: "error" } })), ["5", "6", "▸62"]);
});

test("an open fold is followed by its ranks", () => {
  const rows = rowsOf(MANY, waits, { 0: absent });
  const [, { key }] = arrange(rows, plainView());
  equal(shown(rows, { opened: new Set([key]) }).slice(0, 4), ["0", `▾${MANY - 1}`, "1", "2"]);
});

test("only those at fault are left on request", () => {
  const rows = rowsOf(64, waits, { 17: absent, 5: { state: "no answer", mood: "error" } });
  equal(shown(rows, { culprits: true }), ["17", "5"]);
  equal([waits, absent, { mood: "busy" }, { mood: "calm", lag: 2 }].map(isConspicuous), [false, true, false, true]);
});

test("a filter takes numbers of ranks or a part of a cell", () => {
  const ranks = (text) => [0, 3, 8, 10, 12].filter((rank) => filterOf(text)(rank, {}));
  equal([ranks("3, 8-10"), ranks("8–12"), ranks(" ")], [[3, 8, 10], [8, 10, 12], [0, 3, 8, 10, 12]]);
  equal(["ALL_red", "#21", "node", "work"].map((text) => filterOf(text)(0, waits)), [true, true, false, false]);
});

test("columns sort by what they mean, empty cells last", () => {
  const values = (key, ...cells) => cells.map((value) => valueOf(key, 0, { [key]: value }));
  equal(values("seq", "#9", "#10"), [9, 10]);
  equal(values("size", "4 MiB", "512 KiB"), [4 * 2 ** 20, 512 * 2 ** 10]);
  equal(values("last", "2.10 ms", "999 µs"), [2.1e6, 999e3]);
  equal(values("late", "9% · 41.0 ms", "100% · 2.00 ms"), [9, 100]);
  equal(values("waits", "31%"), [31]);
  equal(values("host", "node-1"), ["node-1"]);
  const rows = new Map([[0, { last: "2 ms" }], [1, {}], [2, { last: "1 s" }], [3, { last: "2 ms" }]]);
  equal(shown(rows, { sort: "last" }), ["0", "3", "2", "1"]);
  equal(shown(rows, { sort: "last", descending: true }), ["2", "0", "3", "1"]);
  equal(shown(rows, { sort: "rank", descending: true }), ["3", "2", "1", "0"]);
});

test("a fold shows in what its ranks are equal, and the extremes of others", () => {
  const one = { state: "in flight", mood: "working", op: "all_reduce", seq: "#9", since: 5, host: "a", memory: "1 GiB" };
  const two = { ...one, state: "in cell 7", mood: "busy", seq: "#11", since: 3, host: "b" };
  equal(foldedCells([one, two]), {
    mood: "busy", state: "running", op: "all_reduce", seq: "#9–11", since: 3, memory: "1 GiB",
  });
  equal(foldedCells([waits, waits]), waits);
  const slow = { ...one, last: "1.20 ms", memory: "900 MiB" };
  const { last, memory } = foldedCells([one, slow, { ...one, last: "900 µs" }]);
  equal([last, memory], ["900 µs – 1.20 ms", "900 MiB – 1 GiB"]);
});
