import {
  W, describeMessages, describeWork, endOf, extentOf, isCulprit, lanesOf, lasting, messagesOf,
  nearest, recentOf, tellMissing, twinOf, unpack, workNear,
} from "/widgets/board/page/works.js";
import { equal, test } from "./harness.js";

const WORDS = ["all_reduce", "completed", "cell 3 line 2", "4 MiB float32", "started"];
const [SEND, RECV] = [WORDS.push("send → 1 tag 0") - 1, WORDS.push("recv ← 0 tag 0") - 1];
const MS = 1e6;

/** A work of all_reduce, from one time to another; -1: it is in flight. */
function work(created, ended, { seq = 1, gathered = -1, generation = 0, error = null, op = 0 } = {}) {
  const state = ended < 0 ? 4 : 1;
  const isP2p = Number(op > 0);
  return [created, created, ended, gathered, op, seq, generation, state, 2, 1, 3, null, error, isP2p];
}

const [DEFAULT, OTHER, TP] = [["default", [0, 1]], ["default", [1, 2]], ["tp", [0, 1]]].map(
  ([name, ranks]) => ({ name, ranks }),
);

function lane(rank, works, group = DEFAULT) {
  return { rank, group, works };
}

test("what is in flight ends now", () => {
  equal([endOf(work(5, 9), 20), endOf(work(5, -1), 20), endOf(work(25, -1), 20)], [9, 20, 25]);
});

test("the extent has all works and a margin", () => {
  equal(extentOf([lane(0, [work(0, 50)]), lane(1, [work(20, 100)])], 0), [0, 100]);
  equal(extentOf([], 7), [0, 1e9]);
});

test("what was last begins behind the last longer pause", () => {
  const works = [work(0, 10 * MS), work(3000 * MS, 3010 * MS), work(3020 * MS, 3100 * MS)];
  equal(recentOf([lane(0, works)], 0), [3000 * MS, 3100 * MS]);
  equal(recentOf([lane(0, [])], 0), [0, 1e9]);
});

test("a twin is the same op of the same group", () => {
  const [mine, other] = [work(0, 9, { seq: 2 }), work(3, 9, { seq: 2 })];
  const here = lane(0, [mine]);
  const there = lane(1, [work(0, 1), other]);
  const lanes = [here, lane(1, [work(7, 8, { seq: 2 })], OTHER), there];
  equal(twinOf(lanes, there, mine).work === other, true);
  equal(twinOf(lanes, there, work(0, 9, { seq: 2, generation: 1 })), null);
});

test("the nearest work is found from both sides", () => {
  const works = [work(0, 10), work(20, 30)];
  equal([workNear(works, 5, 0, 99), workNear(works, 13, 4, 99)].map((one) => one[W.created]), [0, 0]);
  equal(workNear(works, 17, 4, 99)[W.created], 20);
  equal(workNear(works, 15, 4, 99), null);
  equal(workNear([work(40, -1)], 60, 0, 99)[W.created], 40);
  equal([nearest(works, 8), nearest(works, 14)], [0, 1]);
});

test("the last one to enter is told how late it was", () => {
  const early = lane(0, [work(0, 12 * MS, { gathered: 10 * MS })]);
  const late = lane(1, [work(10 * MS, 12 * MS, { gathered: 10 * MS })]);
  const facts = (one) => describeWork({ lane: one, work: one.works[0] }, [early, late], WORDS, 0, false);
  equal(facts(early), {
    title: "all_reduce #1",
    facts: ["rank 0", "completed in 12.0 ms", "waited 10.0 ms for the last rank", "4 MiB float32", "cell 3 line 2"],
  });
  equal(facts(late).facts[2], "entered last, 10.0 ms after the first");
});

test("a work in flight says for how long, and an error why", () => {
  const one = lane(0, [work(0, -1, { error: "by hand" })], TP);
  const { facts } = describeWork({ lane: one, work: one.works[0] }, [one], WORDS, 3 * MS, true);
  equal(facts, ["rank 0", "group tp", "started, for 3.00 ms", "4 MiB float32", "cell 3 line 2", "by hand"]);
});

test("a send is no twin of the collective with its number", () => {
  const [sent, reduced, gave] = [work(0, 9, { op: SEND }), work(0, 9), work(0, 9, { op: SEND })];
  const [here, there] = [lane(0, [sent]), lane(1, [reduced, gave])];
  equal(twinOf([here, there], there, sent).work === gave, true);
  equal(twinOf([here, lane(1, [reduced])], lane(1, []), sent), null);
});

test("both sides of a message tell of each other", () => {
  const [sent, got, lost] = [work(0, 9, { op: SEND }), work(3, 9, { op: RECV, seq: 2 }), work(9, -1, { op: SEND })];
  const data = {
    lanes: [lane(0, [sent, lost]), lane(1, [got]), lane(2, [])],
    messages: [[0, 0, 1, 0], [0, 1, 2, -1]],
  };
  const [here, there] = data.lanes;
  const messages = messagesOf(data, data.lanes);
  const said = (lane, work) => describeMessages(messages, { lane, work }, WORDS);
  equal(said(here, sent), ["its receive is recv ← 0 tag 0 #2 on rank 1, cell 3 line 2"]);
  equal(said(there, got), ["its send is send → 1 tag 0 #1 on rank 0, cell 3 line 2"]);
  equal(said(here, lost), ["rank 2 has not issued its receive"]);
  equal(messagesOf(data, [here, there]).length, 1);
});

test("all groups have lanes where they were used, or where a rank is missing", () => {
  const [here, unused, absent] = [lane(0, [work(0, 9)]), lane(0, [], TP), lane(1, [], TP)];
  const lanes = [here, unused, absent, lane(2, [], OTHER), lane(2, [], { name: "dp", ranks: [2] })];
  const data = { groups: [DEFAULT, OTHER, TP], lanes, missing: [{ group: TP, ranks: [1] }] };
  equal(lanesOf(data, null).map((one) => lanes.indexOf(one)), [0, 2, 3]);
  equal(lanesOf(data, { name: "tp", ranks: [0, 1] }).map((one) => lanes.indexOf(one)), [1, 2]);
  // Rebuilt since: its own tab has them still.
  const before = unpack({ ...data, groups: [TP], lanes: [], missing: [], late: [] }, null);
  const [over] = unpack({ groups: [{ ...TP, over: true }], lanes: [], missing: [], late: [] }, before).groups;
  const old = [lane(0, [work(0, 9)], over), lane(0, [work(0, 9)])];
  equal(lanesOf({ ...data, lanes: old }, null), [old[1]]);
  equal(lanesOf({ groups: [over], lanes: old, missing: [] }, TP), [old[0]]);
});

test("a group of two messages is one", () => {
  const message = () => ({
    groups: [{ name: "tp", ranks: [0, 1] }], lanes: [{ rank: 0, group: 0, works: [] }],
    missing: [{ group: 0, ranks: [1] }], late: [{ group: 0, rank: 1 }],
  });
  const first = unpack(message(), null);
  const second = unpack(message(), first);
  equal([first.lanes[0], first.missing[0], first.late[0]].map(({ group }) => group).every((one) => one === first.groups[0]), true);
  equal(second.lanes[0].group === first.lanes[0].group, true);
});

test("who is missing for a moment, as the records were read, is not shown", () => {
  const [long, short, over] = [[1e9, -1], [2e9, -1], [1e9, 1.2e9]].map(([since, until]) => ({ since, until }));
  equal(lasting({ missing: [long, short, over], clock: 2.1e9 }), [long]);
});

test("a culprit is missing and waits for nobody", () => {
  const one = { group: TP, ranks: [1, 2], held: [2] };
  const found = [0, 1, 2].map((rank) => isCulprit([one], lane(rank, [], TP)));
  equal([...found, isCulprit([one], lane(1, []))], [false, true, false, false]);
});

test("who is missing is told with what holds it up", () => {
  const one = { group: TP, ranks: [2], op: "all_reduce", seq: 3, held: [], why: "" };
  equal(tellMissing(one, false), "rank 2 has not entered all_reduce #3");
  equal(tellMissing(one, true), "rank 2 has not entered all_reduce #3 of group 'tp'");
  const held = { ...one, ranks: [1, 2], held: [1, 2], why: "send #1 of group 'dp'" };
  equal(tellMissing(held, false), "ranks 1–2 have not entered all_reduce #3: they are in send #1 of group 'dp'");
});
