import { Store } from "/widgets/board/page/store.js";
import { equal, test } from "./harness.js";

/** A store, the messages that it sent, the changes that a view saw, and its kernel. */
function opened(snapshot = {}) {
  const listeners = new Map();
  const sent = [];
  const traits = { columns: [], snapshot };
  const store = new Store({
    get: (name) => traits[name],
    set: (name, value) => (traits[name] = value),
    on: (event, callback) => listeners.set(event, callback),
    off: (event) => listeners.delete(event),
    send: (message) => sent.push(message),
  });
  const seen = [];
  const view = { onChange: (change) => seen.push(change) };
  store.open(view);
  sent.length = 0;
  return { store, sent, seen, view, listeners, play: (one) => listeners.get("msg:custom")(one) };
}

const FULL = {
  type: "full", v: 4, now: 10, head: { state: "running" }, groups: [{ id: "g0" }],
  rows: { g0: { 0: { state: "idle", op: "send" }, 1: { state: "idle" } } },
};

/** Run a test's body with a store that has the whole state, and end it. */
function withStore(body) {
  const all = opened(FULL);
  try {
    body(all);
  } finally {
    all.store.close(all.view);
    all.store.end();
  }
}

test("a delta changes the cells it names", () =>
  withStore(({ store, seen, play }) => {
    play({ type: "delta", v: 5, now: 11, rows: { g0: { 0: { state: "dead", op: null }, 1: null } } });
    equal(store.rows.get("g0"), new Map([[0, { state: "dead" }]]));
    equal(seen[0].rows.get("g0"), new Map([[0, ["state", "op"]], [1, null]]));
  }));

test("a rank is in the group that has come with its op", () =>
  withStore(({ store, play }) => {
    const groups = [{ id: "g0", name: "world", label: "world" }, { id: "g1", name: "tp", label: "tp" }];
    play({ type: "delta", v: 5, now: 11, rows: { g0: { 0: { seq: "#9" } } } });
    play({ type: "delta", v: 6, now: 12, groups, rows: { g1: { 0: { state: "idle", op: "barrier" } } } });
    equal(store.rows.get("all").get(0).op, "tp barrier");
  }));

test("a message that was missed is asked for once", () =>
  withStore(({ store, sent, play }) => {
    play({ type: "delta", v: 7, now: 11, rows: { g0: { 0: { state: "dead" } } } });
    equal(store.rows.get("g0").get(0).state, "idle");
    equal(sent, [{ sync: 1 }]);
    play({ type: "delta", v: 3, now: 11 });
    equal([sent.length, store.version], [1, 4]);
    play({ ...FULL, v: 8 });
    equal(store.version, 8);
  }));

test("a group that is gone takes its rows along", () =>
  withStore(({ store, play }) => {
    play({ type: "delta", v: 5, now: 11, groups: [{ id: "g1" }], rows: { g1: { 0: { state: "idle" } } } });
    equal([...store.rows.keys()], ["g1"]);
  }));

test("an answer reaches the one who asked", () =>
  withStore(({ store, sent, play }) => {
    const answers = [];
    store.request("abort", { groups: ["g0"] }, (answer) => answers.push(answer.text));
    const [{ do: what, id, groups }] = sent;
    equal([what, groups], ["abort", ["g0"]]);
    play({ type: "did", id: "another", text: "of another page" });
    play({ type: "did", id, text: "done" });
    play({ type: "did", id, text: "twice" });
    equal(answers, ["done"]);
  }));

test("a closed channel ends what waits, and the next message heals it", () =>
  withStore(({ store, sent, play, listeners }) => {
    const answers = [];
    store.request("abort", {}, (answer) => answers.push(answer.ok));
    listeners.get("comm_live_update")();
    equal([store.live, answers, store.headline.title], [false, [false], "No kernel"]);
    sent.length = 0;
    play({ type: "beat", now: 12 });
    equal([store.live, sent], [true, [{ sync: 1 }]]);
  }));

test("the last view tells the kernel that none is left", () => {
  const { store, sent, view, listeners } = opened(FULL);
  const other = { onChange: () => {} };
  store.open(other);
  store.close(view);
  equal(sent, []);
  store.close(other);
  equal(Object.keys(sent[0]), ["unwatch"]);
  store.end();
  equal(listeners.size, 0);
});

test("several groups have a tab of all, with each rank once", () =>
  withStore(({ store, seen, play }) => {
    equal([store.tabs.map(({ id }) => id), store.rows.has("all")], [["g0"], false]);
    const tp = { id: "g1", name: "tp", label: "tp (0–1)", state: "idle", mood: "calm" };
    const dp = { id: "g2", name: "dp", label: "dp (1,3)", state: "idle", mood: "calm" };
    const both = { groups: [tp, dp], rows: { g1: { 0: { op: "send" }, 1: { op: "send" } }, g2: { 1: { op: "recv" } } } };
    play({ type: "delta", v: 5, now: 11, ...both });
    equal(store.tabs.map(({ id }) => id), ["all", "g1", "g2"]);
    equal([...store.rows.get("all")], [[0, { op: "tp send" }], [1, { op: "tp send" }]]);
    play({ type: "delta", v: 6, now: 12, rows: { g2: { 1: { op: "barrier" } } } });
    equal(store.rows.get("all").get(1), { op: "dp barrier" });
    equal(seen.at(-1).rows.get("all"), new Map([[1, ["op"]]]));
    play({ type: "delta", v: 7, now: 13, groups: [tp, { ...dp, copy: true }] });
    equal([store.tabs.map(({ id }) => id), store.rows.has("all")], [["g1"], false]);
  }));
