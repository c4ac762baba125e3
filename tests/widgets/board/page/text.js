import { durationText, elapsedText, moodClass, nameRanks, plural, shortName } from "/widgets/board/page/text.js";
import { equal, test } from "./harness.js";

test("elapsed times lose digits as they grow", () => {
  equal([-1, 0, 9.99, 10, 119.4, 120, 7199, 7200].map(elapsedText), [
    "0.0 s", "0.0 s", "9.9 s", "10 s", "119 s", "2 min", "120 min", "2.0 h",
  ]);
});

test("durations have three digits at most", () => {
  equal([0, 999, 1_000, 99_940, 99_950, 2_100_000, 999_400_000, 3.5e9, 1.2e12].map(durationText), [
    "0 ns", "999 ns", "1.00 µs", "99.9 µs", "100 µs", "2.10 ms", "999 ms", "3.50 s", "1200 s",
  ]);
});

test("ranks in a row are a range", () => {
  equal(nameRanks([3]), "rank 3");
  equal(nameRanks([10, 2, 0, 1]), "ranks 0–2, 10");
  equal(nameRanks([4, 6]), "ranks 4, 6");
});

test("a mood that is not known is calm", () => {
  equal(["error", "surprised"].map(moodClass), ["error", "calm"]);
  equal([plural(1, "rank"), plural(0, "rank")], ["1 rank", "0 ranks"]);
});

test("of a long name the end is there, in which names differ", () => {
  equal(["dp_1", "the_data_parallel_group_of_the_model_dp_12"].map(shortName), [
    "dp_1", "the_data_par…the_model_dp_12",
  ]);
});
