import { BAR, placeColumns } from "/widgets/board/page/widths.js";
import { equal, test } from "./harness.js";

const COLUMNS = [
  { key: "rank", title: "rank", drop: 0 },
  { key: "host", title: "host", drop: 6 },
  { key: "state", title: "state", drop: 0 },
  { key: "line", title: "line", drop: 1 },
  { key: "elapsed", title: "elapsed", drop: 2 },
  { key: "memory", title: "memory", drop: 9 },
  { key: "verdict", title: "verdict", drop: 0 },
];
const LONGEST = ["rank", "node-1", "in flight", "cell 7 line 4 for 12 s", "6.2 s / 410 µs", "312 MiB", "verdict"];

/** Place them, with letters of 10 px; return what is shown, and the whole. */
function place(room, { single = false, empty = [], longest = LONGEST } = {}) {
  const filled = COLUMNS.map(({ key }) => !empty.includes(key));
  const measure = (text) => text.length * 10;
  const found = placeColumns(COLUMNS, longest, filled, { room, single, measure });
  const shown = COLUMNS.filter((_, number) => found.places[number]).map(({ key }) => key);
  return { ...found, shown };
}

test("all columns stand side by side where there is room", () => {
  const { places, width, level, shown } = place(2000);
  equal(shown, COLUMNS.map(({ key }) => key));
  equal(level, 11);
  let left = 0;
  for (const one of places) {
    equal(one.left, left);
    left += one.width;
  }
  equal(left, width);
});

test("the least important columns go first", () => {
  const all = place(2000).width;
  equal(place(all).level, 11);
  equal(place(all - 2).shown, ["rank", "host", "state", "line", "elapsed", "verdict"]);
  equal(place(0).shown, ["rank", "state", "verdict"]);
});

test("a verdict stands below the rest of its row where it has no room beside it", () => {
  const tight = { longest: LONGEST.with(6, "waits for rank 17") };
  const { below, shown, places } = place(230, tight);
  equal([below, shown], [true, ["rank", "state", "line", "verdict"]]);
  equal(places[6], { left: places[0].width, width: 230 - places[0].width });
  equal(place(2000, tight).below, undefined);
  equal(place(230, { empty: ["verdict"] }).below, undefined);
});

test("a bar takes room where there is one", () => {
  const elapsed = (text) => {
    const longest = LONGEST.with(4, text);
    return place(2000, { longest }).places[4].width - text.length * 10;
  };
  equal(elapsed("6.2 s / 410 µs") - elapsed("6.2 s"), BAR + 8);
});

test("times and medians go before a column that matters goes", () => {
  const bare = place(620);
  equal(bare.shown.includes("line"), true);
  equal(bare.level <= 4, true);
  equal(bare.places[3].width, "cell 7 line 4".length * 10 + 12);
  equal(bare.places[4].width, "elapsed".length * 10 + 12);
});

test("empty columns and the only host take no room", () => {
  equal(place(2000, { single: true, empty: ["memory", "verdict"] }).shown, [
    "rank", "state", "line", "elapsed",
  ]);
});

test("an op is cut off before it goes", () => {
  const columns = [
    { key: "rank", title: "rank", drop: 0 }, { key: "op", title: "op", drop: 1 },
    { key: "verdict", title: "verdict", drop: 0 },
  ];
  const placed = (room) =>
    placeColumns(columns, ["rank", "default recv ← 4 tag 2", "verdict"], [true, true, true], {
      room, single: true, measure: (text) => text.length * 10,
    });
  const { width, places } = placed(1000);
  const { places: cut, width: fitting } = placed(width - 60);
  equal(cut.map((one) => one.width), [places[0].width - 6, places[1].width - 48, places[2].width - 6]);
  equal([cut[2].left, fitting], [cut[1].left + cut[1].width, width - 60]);
  equal([placed(150).below, placed(150).places[1].width], [true, 92]);
  equal(placed(100).places[1], null);
});

test("the words of states go before an op goes where there is a verdict", () => {
  const columns = ["rank", "state", "op", "verdict"].map((key) => ({ key, title: key, drop: key === "op" ? 1 : 0 }));
  const longest = ["rank", "in flight", "all_reduce", "deadlock"];
  const placed = (room, filled = [true, true, true, true]) =>
    placeColumns(columns, longest, filled, { room, single: true, measure: (text) => text.length * 10 });
  const rest = placed(1000).width - placed(1000).places[2].width;
  const narrow = placed(rest);
  equal([narrow.shapes, narrow.places[2].width >= 60], [true, true]);
  equal(placed(rest + 100).shapes, false);
  equal(placed(0).places[2], null);
  equal(placed(rest - 100, [true, true, true, false]).shapes, false);
});
