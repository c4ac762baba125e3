import {
  cellText, concerns, foldLabel, isInCell, lengthOf, mapText, standing, stayText,
} from "/widgets/board/page/cells.js";
import { equal, test } from "./harness.js";

test("a cell without a value is empty", () => {
  for (const key of ["op", "lag", "queue", "beat"]) equal(cellText(key, 3, {}, 10), "");
  equal(cellText("queue", 3, { queue: 0 }, 10), "");
  equal(cellText("rank", 3, {}, 10), "3");
  equal(cellText("lag", 3, { lag: 2 }, 10), "−2");
});

test("the silence of a dead rank is not counted", () => {
  equal(cellText("beat", 0, { silent: 4, state: "silent" }, 10), "6.0 s");
  equal(cellText("beat", 0, { silent: 4, state: "dead" }, 10), "");
});

test("the time at a line is shown from 5 s on", () => {
  equal([stayText({ at: 5.1 }, 10), stayText({ at: 5 }, 10), stayText({}, 10)], [
    "", " for 5.0 s", "",
  ]);
});

test("a cell is written where what it shows has changed", () => {
  const shown = (...names) =>
    ["op", "state", "elapsed", "beat", "line", "size"].filter((key) => concerns(key, new Set(names)));
  equal(shown("op"), ["op"]);
  equal(shown("mood"), ["state"]);
  equal(shown("since"), ["elapsed"]);
  equal(shown("state"), ["state", "beat"]);
  equal(shown("at", "dtype"), ["line", "size"]);
});

test("a blamed row says so beside its mood", () => {
  equal(standing({ mood: "error", blame: 1 }), "error blamed");
  equal(standing({ mood: "?" }), "calm");
  equal([{ mood: "busy" }, { mood: "working" }, { mood: "calm" }].map(isInCell), [true, true, false]);
});

test("narrow letters count half", () => {
  equal([lengthOf(""), lengthOf("no answer"), lengthOf("in flight")], [0, 8, 6]);
});

test("the map has a text, with those at fault first", () => {
  const waits = { state: "in flight", verdict: "waits for rank 2" };
  const late = { state: "idle", verdict: "not entered", blame: 1 };
  const rows = new Map([0, 1, 2, 3, 4].map((rank) => [rank, rank === 2 ? late : waits]));
  equal(mapText(rows), "map of 5 ranks: rank 2 not entered; ranks 0–1, 3–4 wait for rank 2");
  for (let rank = 5; rank < 20; rank++) rows.set(rank, { state: `in cell ${rank}` });
  equal(mapText(rows).endsWith("; rank 10 in cell 10; and others"), true);
});

test("a fold says which ranks are at fault, and how many others it has", () => {
  const absent = { mood: "calm", state: "idle", verdict: "not entered", blame: 1 };
  const waits = { mood: "working", state: "in flight", verdict: "waits for rank 3" };
  const many = [...Array(64).keys()].filter((rank) => rank % 9);
  equal(foldLabel([3, 17], absent), "ranks 3, 17");
  const behind = { mood: "busy", state: "in cell 7", lag: 2 };
  equal([waits, behind].map((cells) => foldLabel([3, 17], cells)), ["2 ranks", "2 ranks"]);
  equal(foldLabel(many, absent), "56 ranks");
});
