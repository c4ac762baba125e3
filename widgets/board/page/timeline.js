// The timeline: what each rank did, on one clock. A bar is light while its rank
// waits for the last one to enter, and dark from then on: the straggler's bar has no
// light part.

import { AXIS, drawTimeline } from "./draw.js";
import { make, setAttribute, setText } from "./elements.js";
import { foldLanes, sourceOf } from "./fold_lanes.js";
import { isPlace, withPlaces } from "./links.js";
import { ALL } from "./overview.js";
import { Pauses } from "./pauses.js";
import { RangeTable } from "./range_table.js";
import { STEP } from "./scale.js";
import { Sight } from "./sight.js";
import { TimelineInput } from "./timeline_input.js";
import { makeLegend, makeTools, saveFile } from "./timeline_parts.js";
import { Tip } from "./tip.js";
import {
  W, describeMessages, describeWork, extentOf, isCulprit, isMissing, isRunning, lanesOf, lasting,
  messagesOf, recentOf, tellMissing, twinOf,
} from "./works.js";

const TALLEST = 360; // px of lanes before they scroll

export class Timeline {
  constructor(store, goTo) {
    this.store = store;
    this.goTo = goTo; // shows a source line
    this.group = null;
    this.every = false; // whether the user wants the lanes of all groups
    this.all = []; // the lanes of ranks
    this.lanes = []; // those that are shown, see fold_lanes.js
    this.opened = new Set(); // groups of which all lanes are shown
    this.messages = []; // sends with their receives
    this.whole = false; // whether the user wants pauses as long as they are
    this.sight = new Sight(() => recentOf(this.lanes, this.clock()), () => this.request());
    this.chosen = null; // {lane, work}
    this.pointed = null;
    this.open = false;
    this.looked = false;
    this.build();
  }

  build() {
    this.element = make("div", "timeline");
    this.element.hidden = true;
    const { tools, summary, buttons } = makeTools({
      every: () => this.toggle(),
      ranks: () => this.openAll(),
      stats: () => this.count(),
      pauses: () => this.stretch(),
      out: () => this.zoom(STEP),
      in: () => this.zoom(1 / STEP),
      last: () => this.sight.look(null),
      all: () => this.lookAtAll(),
      export: () => this.export(),
    });
    Object.assign(this, { summary, buttons });
    this.axis = make("canvas", "axis", null, { "aria-hidden": "true" });
    this.canvas = make("canvas", "lanes", null, {
      tabindex: "0",
      role: "img",
      "aria-label": "timeline: arrow keys go from work to work",
    });
    this.scroll = make("div", "scroll");
    this.scroll.append(this.axis, this.canvas);
    this.detail = make("div", "detail", null, { "aria-live": "polite" });
    this.tip = new Tip({ "aria-hidden": "true" });
    const { legend, items } = makeLegend();
    this.legend = items;
    this.range = new RangeTable();
    this.element.append(
      tools, this.scroll, ...legend, this.detail, this.range.element, this.tip.element,
    );
    this.input = new TimelineInput(this);
    this.scroll.addEventListener("scroll", () => this.request());
  }

  // -- data ------------------------------------------------------------------

  show(group) {
    this.group = group;
    this.choose(null);
    this.sort();
  }

  /** Show all lanes of all groups, or none. */
  openAll() {
    const folded = this.lanes.filter(({ part, open }) => part && !open);
    this.opened = new Set(folded.map(({ group }) => group));
    this.sort();
  }

  /** Show all lanes of a group, or no more. */
  openGroup(group) {
    if (!this.opened.delete(group)) this.opened.add(group);
    this.sort();
  }

  /** Show statistics, or no more. */
  count() {
    this.range.element.hidden = !this.range.element.hidden;
    setAttribute(this.buttons.stats, "aria-pressed", String(!this.range.element.hidden));
    this.request();
  }

  /** Show pauses at their length, or no more. */
  stretch() {
    this.whole = !this.whole;
    setAttribute(this.buttons.pauses, "aria-pressed", String(this.whole));
    this.sort();
  }

  toggle() {
    this.every = !this.every;
    setAttribute(this.buttons.every, "aria-pressed", String(this.every));
    this.sort();
  }

  /** Whether lanes of all groups are shown. */
  get wide() {
    return this.every || this.group?.id === ALL;
  }

  /** Select the lanes to show from the data of the kernel. */
  sort() {
    const data = this.store.timeline;
    this.buttons.every.hidden = this.group?.id === ALL || !(data?.groups.length > 1);
    const chosen = this.chosen && { ...this.chosen };
    this.lanes = this.all = [];
    if (!data) setText(this.summary, "Asking the ranks for their last ops …");
    if (data) {
      this.all = lanesOf(data, this.wide ? null : this.group);
      // In a deadlock every rank waits itself.
      this.isAtFault = this.all.some((lane) => isCulprit(data.missing, lane)) ? isCulprit : isMissing;
      this.lanes = foldLanes(this.all, this.opened, (lane) => this.stays(lane));
      this.words = data.words;
      this.messages = messagesOf(data, this.lanes);
    }
    const pauses = data ? Pauses.of(this.lanes, this.clock()) : new Pauses();
    this.buttons.pauses.hidden = pauses.list.length === 0;
    this.sight.pauses = this.whole ? new Pauses() : pauses;
    // The same work in the new data, if it is still there.
    this.chosen = chosen && twinOf(this.lanes, chosen.lane, chosen.work);
    this.legend.message.hidden = this.messages.length === 0;
    this.legend.held.hidden = !this.lanes.some(
      (lane) => isMissing(data.missing, lane) && !isCulprit(data.missing, lane),
    );
    const folded = this.lanes.filter(({ part }) => part);
    this.buttons.ranks.hidden = folded.length === 0;
    setAttribute(this.buttons.ranks, "aria-pressed", String(folded.every(({ open }) => open)));
    this.layOut();
    this.request();
    if (data && !this.looked) this.reveal(this.lanes.find((lane) => this.stays(lane))?.rank);
  }

  /** Whether a lane is shown among many: its rank is missing, dead, or keeps others waiting. */
  stays(lane) {
    const { missing, late } = this.store.timeline;
    const { dead = [] } = this.store.head;
    return (
      dead.includes(lane.rank) || this.isAtFault(missing, lane) ||
      late.some(({ rank, group }) => rank === lane.rank && group === lane.group)
    );
  }

  /** Show what is certain about what is in sight: who is missing, or else who comes late. */
  tell() {
    const { late } = this.store.timeline;
    const [from, to] = this.sight.shown;
    const groups = new Set(this.all.map(({ group }) => group));
    const absent = lasting(this.store.timeline).find(
      ({ group, since, until }) =>
        groups.has(group) && since <= to && (until < 0 || until >= from),
    );
    const behind = late.find(
      ({ group, span: [begun, ended] }) => groups.has(group) && begun <= to && ended >= from,
    );
    setText(this.summary, absent ? tellMissing(absent, this.wide) : (behind?.text ?? ""));
  }

  /** Scroll to the conspicuous lane among many, once. */
  reveal(rank) {
    const place = this.lanes.findIndex((lane) => lane.rank === rank);
    if (place < 0) return;
    this.looked = true;
    this.scroll.scrollTop = (place + 0.5) * this.pitch - TALLEST / 2;
  }

  /** The present on the timeline's clock. */
  clock() {
    const data = this.store.timeline;
    return data.clock + (this.store.now() - data.now) * 1e9;
  }

  get moving() {
    return this.open && this.lanes.some((lane) => lane.works.some(isRunning));
  }

  // -- view ---------------------------------------------------------------

  lookAtAll() {
    this.sight.lookAround(extentOf(this.lanes, this.clock()));
  }

  /** Zoom; the selected work stays where it is, if it is in sight. */
  zoom(factor) {
    this.sight.zoom(factor, this.chosen ? this.sight.partOf(this.chosen.work[W.created]) : 0.5);
  }

  layOut() {
    const count = this.lanes.length;
    this.pitch = count <= 16 ? 22 : count <= 64 ? 14 : 9;
    this.scroll.style.maxHeight = `${TALLEST + AXIS}px`;
    this.canvas.style.height = `${Math.max(1, count) * this.pitch}px`;
  }

  resize(width) {
    this.sight.width = width;
    this.request();
  }

  request() {
    if (this.frame || !this.open) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.sight.renew();
      if (!this.open || !this.store.timeline) return;
      drawTimeline(this);
      this.tell();
      this.range.show(this.all, this.sight.shown, this.words);
    });
  }

  // -- texts -----------------------------------------------------------------

  choose(found) {
    this.chosen = found;
    this.detail.replaceChildren();
    if (found) {
      const { title, facts } = this.describe(found);
      const told = withPlaces(` · ${facts.join(" · ")} `, this.goTo);
      const line = this.words[found.work[W.line]];
      this.quote = make("code", "quote");
      this.detail.append(make("b", "", title), ...told, this.quote);
      const quote = (answer) => {
        if (this.chosen?.work === found.work) setText(this.quote, answer.text ?? "");
      };
      if (isPlace(line) && this.store.hasSent(line)) this.store.request("source", { line }, quote);
    }
    this.request();
  }

  describe(found) {
    const source = sourceOf(found);
    const { title, facts } = describeWork(source, this.all, this.words, this.clock(), this.wide);
    return { title, facts: [...facts, ...describeMessages(this.messages, source, this.words)] };
  }

  showTip(found, event) {
    if (found === null) {
      this.tip.hide();
      return;
    }
    const { title, facts } = this.describe(found);
    this.tip.show(title, facts, { x: event.clientX, y: event.clientY });
  }

  export() {
    this.store.request("trace", {}, (answer) => {
      if (answer.ok) saveFile(answer.name, answer.json, "application/json");
      else this.store.notifyViews({ trouble: answer.text, rows: new Map() });
    });
  }
}
