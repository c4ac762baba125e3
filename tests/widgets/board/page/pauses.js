import { Pauses } from "/widgets/board/page/pauses.js";
import { equal, test } from "./harness.js";

const S = 1e9;

/** A lane with a work from each time to another, in seconds. */
function lane(...spans) {
  const works = spans.map(([from, to]) => [from * S, from * S, to * S, -1, 0, 1, 0, 1]);
  return { rank: 0, works };
}

test("a pause is where no lane has an op, for longer than they take", () => {
  const found = Pauses.of([lane([0, 1], [101, 102]), lane([0.5, 2], [101, 102])], 0);
  equal(found.list.map(({ from, to }) => [from, to]), [[2 * S, 101 * S]]);
  equal(Pauses.of([lane([0, 4], [4.6, 9])], 0).list, []);
  equal(Pauses.of([lane([0, 0.01], [0.4, 0.41])], 0).list, []);
  equal(Pauses.of([], 0).list, []);
});

test("what runs is no pause", () => {
  const running = lane([0, 1], [101, 102]);
  running.works[0][2] = -1;
  equal(Pauses.of([running], 103 * S).list, []);
});

test("a pause takes a small part of the picture, and many take no more than a third", () => {
  const one = Pauses.of([lane([0, 1], [101, 102])], 0);
  equal(Math.round((one.place(101 * S) - one.place(1 * S)) / 1e6), 80);
  const spans = [...Array(41).keys()].map((number) => [number * 100, number * 100 + 1]);
  const many = Pauses.of([lane(...spans)], 0);
  equal(many.list.length, 40);
  equal(Math.round((many.place(4001 * S) - many.place(0)) / 1e6), 41_000 + 12_300);
});

test("times before, in, between and after pauses come back from their places", () => {
  const pauses = Pauses.of([lane([0, 1], [101, 102], [400, 401])], 0);
  const times = [-5, 0, 0.5, 1, 51, 101, 101.5, 102, 300, 400, 401, 500].map((time) => time * S);
  const places = times.map((time) => pauses.place(time));
  equal(places.every((place, at) => at === 0 || place > places[at - 1]), true);
  equal(places.map((place) => Math.round(pauses.timeAt(place) / 1e3)), times.map((time) => time / 1e3));
  equal(new Pauses().place(7), 7);
  equal(new Pauses().timeAt(7), 7);
});

test("between the pauses in sight are the parts of a window", () => {
  const pauses = Pauses.of([lane([0, 1], [101, 102], [400, 401])], 0);
  const parts = (from, to) => pauses.between([from * S, to * S]).map((part) => part.map((time) => time / S));
  equal(parts(-1, 500), [[-1, 1], [101, 102], [400, 500]]);
  equal(parts(50, 101.5), [[101, 101.5]]);
  equal(parts(10, 20), []);
  equal(pauses.within([10 * S, 20 * S]).length, 1);
});
