import { GUTTER, NEAREST, panned, partAt, tickStep, tickText, ticks, timeAt, xOf, zoomed } from "/widgets/board/page/scale.js";
import { equal, test } from "./harness.js";

const WIDTH = GUTTER + 1000;

test("times and pixels lead to each other", () => {
  const shown = [5e6, 15e6];
  equal([5e6, 10e6, 15e6].map((time) => xOf(shown, WIDTH, time)), [GUTTER, GUTTER + 500, WIDTH]);
  equal([GUTTER, GUTTER + 500, WIDTH].map((x) => timeAt(shown, WIDTH, x)), [5e6, 10e6, 15e6]);
});

test("what is below the pointer stays there in a zoom", () => {
  equal(zoomed([0, 10e6], 0.5, 0.2), [1e6, 6e6]);
  equal(zoomed([1e6, 6e6], 2, 0.2), [0, 10e6]);
});

test("a zoom ends at the highest", () => {
  const [from, to] = zoomed([0, NEAREST], 0.01);
  equal(to - from, NEAREST);
});

test("a pan keeps the length", () => {
  equal(panned([0, 10], 0.2), [2, 12]);
  equal(panned([0, 10], -0.5), [-5, 5]);
});

test("ticks are round and 90 px apart or more", () => {
  for (const span of [3e3, 7.7e5, 1e9, 4.2e10]) {
    const step = tickStep(span, 1000);
    equal((step / span) * 1000 >= 90, true);
    equal((step / span) * 1000 < 230, true);
    equal(/^[125]0*$/.test(String(Math.round(step))), true);
  }
  equal(ticks([-1e6, 9e6], 4e6), [-0, 4e6, 8e6]);
});

test("a tick has the digits that tell it from the next", () => {
  equal(tickText(1_500_000, 500_000, 5e6), "1.5 ms");
  equal(tickText(2_000, 1_000, 1e4), "2 µs");
  equal(tickText(181_954e6, 1e6, 182e9), "181.954 s");
});

test("a time has a part of a window", () => {
  equal([partAt([10, 20], 15), partAt([10, 20], 5)], [0.5, -0.5]);
});
