import { statisticsOf } from "/widgets/board/page/range_stats.js";
import { equal, test } from "./harness.js";

const GROUP = { name: "default", ranks: [0, 1] };
const WORDS = ["all_reduce", "send → 1 tag 0", "send → 2"];

function work(created, ended, { op = 0, seq = 1, gathered = -1 } = {}) {
  return [created, created, ended, gathered, op, seq, 0, 1, 2, 1, 3, null, null, Number(op > 0)];
}

const lane = (rank, ...works) => ({ rank, group: GROUP, works });
const of = (lanes, window = [0, 1000]) =>
  statisticsOf(lanes, window, WORDS).map(({ total, ...one }) => one);

test("each op has its times, and who was last", () => {
  const lanes = [
    lane(0, work(0, 100, { gathered: 50 }), work(200, 220, { seq: 2, gathered: 210 })),
    lane(1, work(50, 100, { gathered: 50 }), work(210, 220, { seq: 2, gathered: 210 })),
  ];
  equal(of(lanes), [
    { op: "all_reduce", count: 2, median: 20, longest: 100, waits: 60 / 180, last: { rank: 1, times: 2 } },
  ]);
  equal(of(lanes, [150, 1000])[0].count, 1);
  equal(of(lanes, [500, 1000]), []);
});

test("what is not known is null", () => {
  equal(of([lane(0, work(0, -1))]), [
    { op: "all_reduce", count: 1, median: null, longest: null, waits: null, last: null },
  ]);
});

test("sends are one kind, each of its rank, and the longest in all come first", () => {
  const lanes = [
    lane(0, work(0, 10), work(20, 90, { op: 1 }), work(100, 170, { op: 2, seq: 2 })),
    lane(1, work(20, 90, { op: 2 })),
  ];
  equal(of(lanes).map(({ op, count, longest }) => [op, count, longest]), [["send", 3, 70], ["all_reduce", 1, 10]]);
});
