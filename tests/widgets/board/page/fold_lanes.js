import { foldLanes, nameOf, sourceOf } from "/widgets/board/page/fold_lanes.js";
import { W } from "/widgets/board/page/works.js";
import { equal, test } from "./harness.js";

const DEFAULT = { name: "default", ranks: [...Array(32).keys()] };

/** A work that was entered at a time. */
function work(created, { seq = 1, isP2p = 0 } = {}) {
  return [created, created, created + 9, -1, 0, seq, 0, 1, 2, 1, 3, null, null, isP2p];
}

/** Lanes of as many ranks; `works(rank)` are those of each. */
function lanes(count, works, group = DEFAULT) {
  return [...Array(count).keys()].map((rank) => ({ rank, group, works: works(rank) }));
}

const nobody = () => false;

test("few lanes are shown as they are", () => {
  const few = lanes(8, (rank) => [work(rank)]);
  equal(foldLanes(few, new Set(), nobody) === few, true);
});

test("many are the first, the median and the last entry of each op", () => {
  // Rank 31 is the first in op 1, rank 0 in op 2.
  const all = lanes(32, (rank) => [work(100 - rank), work(200 + rank, { seq: 2 })]);
  const folded = foldLanes(all, new Set(), nobody);
  equal(folded.map(({ part, rank, count }) => [part, rank, count]), [
    ["first", null, 32], ["median", null, 32], ["last", null, 32],
  ]);
  equal(folded.map(({ works }) => works.map((one) => one[W.created])), [
    [69, 200], [84, 215], [100, 231],
  ]);
  const [first, , last] = folded;
  equal(first.works.map((one) => sourceOf({ lane: first, work: one }).lane.rank), [31, 0]);
  equal(last.works.map((one) => sourceOf({ lane: last, work: one }).lane.rank), [0, 31]);
  equal(sourceOf({ lane: all[3], work: all[3].works[0] }).lane === all[3], true);
});

test("conspicuous ranks stand below, and all of a group that is open", () => {
  const all = lanes(32, (rank) => [work(rank)]);
  const ranks = (opened, stays) => foldLanes(all, opened, stays).slice(3).map(({ rank }) => rank);
  equal(ranks(new Set(), ({ rank }) => rank === 17), [17]);
  equal(ranks(new Set(), () => true), [0, 1, 2, 3, 4, 5, 6, 7]);
  equal(ranks(new Set([DEFAULT]), nobody).length, 32);
});

test("small groups, and those with sends alone, keep their lanes", () => {
  const [pair, pipe] = [{ name: "pair", ranks: [0, 1] }, { name: "pp", ranks: DEFAULT.ranks }];
  const all = [
    ...lanes(2, () => [work(1)], pair),
    ...lanes(32, () => [work(1, { isP2p: 1 })], pipe),
  ];
  equal(foldLanes(all, new Set(), nobody), all);
  const mixed = lanes(32, (rank) => [work(rank), work(50, { isP2p: 1, seq: 1 })]);
  equal(foldLanes(mixed, new Set(), nobody).map(({ works }) => works.length), [1, 1, 1]);
});

test("lanes have names", () => {
  const [first, median, last] = foldLanes(lanes(32, () => [work(1)]), new Set(), nobody);
  equal([first, median, last].map((one) => nameOf(one, false)), ["▸ first", "  median of 32", "  last"]);
  equal(nameOf({ ...first, open: true }, true), "▾ default 0–31");
  equal([nameOf({ rank: 3, group: DEFAULT }, false), nameOf({ rank: 3, group: DEFAULT }, true)], ["rank 3", "3 default"]);
});
