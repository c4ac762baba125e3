// The state that the kernel has sent: one store per board, for all of its views.

import { Connection } from "./connection.js";
import { ALL, differences, overviewCells, overviewOf } from "./overview.js";
import { lettersIn } from "./places.js";
import { unpack } from "./works.js";

export class Store {
  constructor(model) {
    this.model = model;
    this.version = 0;
    this.head = {};
    this.banner = { mood: "calm", title: "", text: "", more: [] };
    this.groups = [];
    this.rows = new Map(); // group → rank → cells; `ALL` has those of the tab "all"
    this.changed = new WeakMap(); // cells → the version in which their op was new
    this.columns = model.get("columns");
    const state = model.get("snapshot");
    this.timeline = null;
    this.offset = -Infinity; // the kernel's clock, less the page's
    this.connection = new Connection(
      model,
      () => this.head.state === "running",
      () => this.onConnection(),
    );
    this.views = new Set();
    this.shown = { group: null, timeline: false, chosen: false }; // what the next view opens with
    this.serial = 0;
    this.waiting = new Map(); // the number of a request → the callback of its answer
    this.late = new Map(); // the same of those that were given up
    this.name = Math.random().toString(36).slice(2);
    this.receive = (message) => {
      this.connection.heard();
      this.apply(message);
    };
    model.on("msg:custom", this.receive);
    if (state && state.type === "full") this.apply(state);
  }

  /** The time on the kernel's clock, in seconds; it stands still without a kernel. */
  now() {
    const at = this.connection.lost ? this.connection.heardAt : performance.now();
    return at / 1000 + this.offset;
  }

  /** Whether the kernel answers and the ranks are there, so that buttons work. */
  get live() {
    return !this.connection.lost && this.head.state === "running";
  }

  /** Whether the kernel has sent a cell of the number in a place to the ranks. */
  hasSent(place) {
    const { cells } = this.head;
    if (typeof cells !== "string") return true;
    const [cell] = /\d+/.exec(place).map(Number);
    const runs = cells.split(",").map((run) => run.split("-").map(Number));
    return runs.some(([first, last = first]) => first <= cell && cell <= last);
  }

  /** The groups that have a tab, behind that of all where there are several. */
  get tabs() {
    const groups = this.groups.filter(({ copy }) => !copy);
    if (groups.length < 2) return groups;
    return [overviewOf(groups, this.rows.get(ALL) ?? new Map()), ...groups];
  }

  /** The banner to show: that of the kernel, unless there is no kernel any more. */
  get headline() {
    return this.connection.lost ? this.connection.banner() : this.banner;
  }

  /** The connection was lost or is back. */
  onConnection() {
    const { lost } = this.connection;
    if (lost) {
      const text = "No answer came: the connection to the kernel was lost meanwhile.";
      const given = [...this.waiting];
      for (const [id] of given) this.answer({ id, ok: false, text });
      // A kernel that is busy only answers all the same.
      this.late = new Map(given);
    } else {
      this.send({ sync: 1 });
    }
    this.notifyViews({ head: true, banner: true, rows: new Map() });
  }

  adjustClock(now) {
    const offset = now - performance.now() / 1000;
    // The fastest message is the most exact. After the machine slept, start again.
    if (offset > this.offset || offset < this.offset - 5) this.offset = offset;
  }

  apply(message) {
    if (message.type === "full" || message.type === "delta") this.applyState(message);
    else if (message.type === "beat") this.adjustClock(message.now);
    else if (message.type === "timeline") this.applyTimeline(message);
    else if (message.type === "did") this.answer(message);
  }

  applyState(message) {
    const full = message.type === "full";
    if (!full && message.v !== this.version + 1) {
      // A message was missed: request the whole state, once.
      if (message.v > this.version) this.send({ sync: 1 });
      return;
    }
    this.version = message.v;
    this.adjustClock(message.now);
    const change = { head: false, banner: false, groups: false, rows: new Map() };
    for (const key of ["head", "banner", "groups"]) {
      if (key in message) {
        this[key] = message[key];
        change[key] = true;
      }
    }
    if (full) {
      this.rows = new Map();
      change.all = true;
    }
    if (change.groups) {
      const there = new Set(this.groups.map((group) => group.id));
      for (const id of this.rows.keys()) if (!there.has(id) && id !== ALL) this.rows.delete(id);
    }
    for (const [id, ranks] of Object.entries(message.rows ?? {})) {
      change.rows.set(id, this.applyRows(id, ranks));
    }
    this.applyToAll(change);
    this.notifyViews(change);
  }

  /** Bring the rows of the tab "all" up to date with a change of the groups' rows. */
  applyToAll(change) {
    if (this.tabs.length < 2) {
      this.rows.delete(ALL);
      return;
    }
    const groups = this.groups.map(({ id, name, label }) => ({ name, label, rows: this.rows.get(id) }));
    const known = this.rows.get(ALL);
    const named = this.groups.map(({ id, label }) => `${id} ${label}`).join();
    const anew = known === undefined || change.all || named !== this.named;
    this.named = named;
    const sources = anew ? [...this.rows].filter(([id]) => id !== ALL) : [...change.rows];
    const ranks = new Set(sources.flatMap(([, rows]) => [...rows.keys()]));
    if (anew) for (const rank of known?.keys() ?? []) ranks.add(rank);
    const table = known ?? new Map();
    const changed = new Map();
    for (const rank of ranks) {
      const found = [];
      for (const { name, label, rows } of groups) {
        const cells = rows?.get(rank);
        if (cells) found.push({ name, label, cells, changed: this.changed.get(cells) ?? 0 });
      }
      if (found.length === 0) {
        table.delete(rank);
        changed.set(rank, null);
        continue;
      }
      const cells = overviewCells(found);
      const old = table.get(rank);
      const names = old && differences(old, cells);
      if (names?.length === 0) continue;
      table.set(rank, cells);
      changed.set(rank, names ?? null);
    }
    this.rows.set(ALL, table);
    change.rows.set(ALL, changed);
  }

  /** Merge cells into a group's rows; return rank → names of changed cells. */
  applyRows(id, ranks) {
    if (!this.rows.has(id)) this.rows.set(id, new Map());
    const table = this.rows.get(id);
    const changed = new Map();
    for (const [key, cells] of Object.entries(ranks)) {
      const rank = Number(key);
      if (cells === null) {
        table.delete(rank);
        changed.set(rank, null);
        continue;
      }
      const isNew = !table.has(rank);
      if (isNew) table.set(rank, {});
      const row = table.get(rank);
      for (const [name, value] of Object.entries(cells)) {
        if (value === null) delete row[name];
        else row[name] = value;
      }
      if ("op" in cells || "seq" in cells) this.changed.set(row, this.version);
      changed.set(rank, isNew ? null : Object.keys(cells));
    }
    return changed;
  }

  applyTimeline(message) {
    this.timeline = unpack(message, this.timeline);
    this.adjustClock(message.now);
    this.notifyViews({ timeline: true, rows: new Map() });
  }

  notifyViews(change) {
    for (const view of this.views) view.onChange(change);
  }

  // -- to the kernel -------------------------------------------------------

  send(message) {
    this.connection.send(message);
  }

  /** Request an action; `done` gets the answer: {ok, text, ...}. */
  request(what, parameters, done) {
    const id = `${this.name}-${++this.serial}`;
    this.waiting.set(id, done);
    this.send({ do: what, id, ...parameters });
  }

  answer(message) {
    const done = this.waiting.get(message.id) ?? this.late.get(message.id);
    // The answers to other pages arrive here too.
    if (done === undefined) return;
    this.waiting.delete(message.id);
    this.late.delete(message.id);
    done(message);
  }

  /** Have the kernel send changes from now on. */
  open(view) {
    this.views.add(view);
    if (this.views.size > 1) return;
    // How JupyterLab is laid out; other front ends have no such shell.
    const shell = document.querySelector(".jp-LabShell")?.dataset.shellMode;
    this.connection.open(() => {
      const letters = lettersIn(this.model.get("name"));
      return { watch: this.name, ...(shell && { shell }), ...(letters && { letters }) };
    });
  }

  close(view) {
    this.views.delete(view);
    if (this.views.size > 0) return;
    this.connection.close();
    this.send({ unwatch: this.name });
  }

  /** Handle the end of the kernel's side. */
  end() {
    this.connection.end();
    this.model.off("msg:custom", this.receive);
  }
}
