import {
  differences, inOrder, lineOf, overviewCells, overviewOf, tellingRow,
} from "/widgets/board/page/overview.js";
import { equal, test } from "./harness.js";

const idle = { mood: "calm", op: "all_reduce", seq: "#3" };

/** Which of some rows of a rank is told, by name. */
function told(...rows) {
  return tellingRow(rows.map(([name, cells, changed = 0]) => ({ name, cells, changed }))).name;
}

test("a rank is shown in the group where it is blamed, then where it waits", () => {
  const waits = { mood: "working", since: 5 };
  equal(told(["default", idle], ["tp", waits], ["dp", { mood: "busy", blame: 1 }]), "dp");
  equal(told(["default", idle], ["tp", waits]), "tp");
  // Of two groups in which it is blamed, where it is in an op.
  equal(told(["dp", { mood: "busy", blame: 1, since: 1 }], ["tp", { ...waits, blame: 1 }]), "tp");
  equal(told(["default", waits], ["tp", { ...waits, since: 4 }]), "tp");
  equal(told(["default", { ...waits, since: 1 }], ["tp", { ...waits, verdict: "waits" }]), "tp");
});

test("an idle rank is shown where its last op was", () => {
  equal(told(["default", idle, 3], ["tp", idle, 8], ["dp", idle, 2]), "tp");
  equal(told(["default", idle], ["tp", idle]), "default");
  equal(told(["default", idle, 9], ["tp", { mood: "error", failed: 1 }]), "tp");
});

test("its op says in which group it is", () => {
  const dp = { name: "dp", label: "dp (0,4)", cells: idle, changed: 2 };
  equal(overviewCells([dp, { ...dp, name: "tp", label: "tp (0–3)", changed: 0 }]).op, "dp all_reduce");
  // It is in two groups of the name.
  equal(overviewCells([dp, { ...dp, label: "dp (0–3)", changed: 0 }]).op, "dp (0,4) all_reduce");
  equal(overviewCells([{ ...dp, name: "no group", cells: { mood: "calm" } }]), { mood: "calm" });
});

test("cells that came, went or are others differ", () => {
  equal(differences({ a: 1, b: 2, c: 3 }, { b: 2, c: 4, d: 5 }), ["a", "c", "d"]);
});

test("groups in trouble are listed first, the others in their order", () => {
  const groups = ["idle", "in flight", "hung", "running", "aborted", "hung"].map((state, id) => ({ id, state }));
  equal(inOrder(groups).map(({ id }) => id), [2, 5, 4, 1, 0, 3]);
  equal(inOrder(groups, [5, 1]).map(({ id }) => id), [5, 1, 2, 4, 0, 3]);
});

test("the tab of all has the worst mood, and no facts of its own", () => {
  const groups = [{ mood: "calm", state: "idle" }, { mood: "error", state: "hung" }];
  const found = overviewOf(groups, new Map([[0, idle], [1, idle]]));
  equal([found.size, found.mood, found.state, found.aborted], [2, "error", "hung", false]);
});

test("a group's line has the op that waits longest, else the last one", () => {
  const group = { name: "tp", ranks: [0, 1, 2], state: "hung", verdict: "missing ranks: rank 2" };
  const flies = { mood: "working", op: "barrier", seq: "#9", since: 7, issued: 9 };
  const rows = new Map([[0, { ...idle, issued: 12 }], [1, flies], [2, { ...flies, seq: "#8", since: 3 }]]);
  equal(lineOf(group, rows), {
    name: "tp", members: "0–2", state: "hung", op: "barrier #8", verdict: "missing ranks: rank 2",
  });
  const done = new Map([[0, idle], [1, { ...idle, seq: "#4", issued: 4 }], [2, { mood: "calm" }]]);
  equal(lineOf(group, done).op, "all_reduce #4");
  equal(lineOf({ ...group, ranks: [] }, new Map()).op, "");
});

test("ranks at equal distances are told by their first and last", () => {
  const members = (...ranks) => lineOf({ name: "rows", ranks }, new Map()).members;
  equal([members(0, 1, 2, 3), members(5), members(0, 4)], ["0–3", "5", "0,4"]);
  equal([members(1, 5, 9, 13), members(1, 5, 9, 14)], ["1,5…13", "1,5,9,14"]);
});
