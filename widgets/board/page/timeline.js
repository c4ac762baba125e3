// The timeline: what each rank did, on one clock. A bar is light while its rank
// waits for the last one to enter, and dark from then on: the straggler's bar has no
// light part.

import { AXIS, drawTimeline } from "./draw.js";
import { make, setAttribute, setText } from "./elements.js";
import { GUTTER, panned, timeAt, xOf, zoomed } from "./scale.js";
import { ALL } from "./overview.js";
import { Tip } from "./tip.js";
import {
  W, describeMessages, describeWork, extentOf, isRunning, lanesOf, messagesOf, nearest,
  recentOf, twinOf, workNear,
} from "./works.js";

const TALLEST = 360; // px of lanes before they scroll
const STEP = 1.4; // the factor of one zoom step

export class Timeline {
  constructor(store, goTo) {
    this.store = store;
    this.goTo = goTo; // shows a source line
    this.group = null;
    this.every = false; // whether the user wants the lanes of all groups
    this.lanes = [];
    this.messages = []; // sends with their receives
    this.window = null; // [from, to] in ns, or null: the last works
    this.span = null;
    this.chosen = null; // {lane, work}
    this.pointed = null;
    this.open = false;
    this.looked = false;
    this.build();
  }

  build() {
    this.element = make("div", "timeline");
    this.element.hidden = true;
    const tools = make("div", "tools");
    this.summary = make("span", "grow quiet");
    tools.append(this.summary);
    this.buttons = {};
    for (const [key, label, about, act] of [
      ["every", "All groups", "show the lanes of every group", () => this.toggle()],
      ["out", "−", "zoom out (−)", () => this.zoom(STEP)],
      ["in", "+", "zoom in (+)", () => this.zoom(1 / STEP)],
      ["last", "Last", "show what was last (0)", () => this.look(null)],
      ["all", "All", "show everything there is (a)", () => this.lookAtAll()],
      ["export", "Export", "save as a Perfetto trace (JSON)", () => this.export()],
    ]) {
      const button = make("button", "small", label, { type: "button", title: about });
      if (label.length === 1) setAttribute(button, "aria-label", about);
      button.addEventListener("click", act);
      tools.append(button);
      this.buttons[key] = button;
    }
    setAttribute(this.buttons.every, "aria-pressed", "false");
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
    const legend = make("div", "legend quiet");
    for (const [name, about] of [
      ["waits", "waits for the last rank"],
      ["runs", "all ranks are in"],
      ["flight", "in flight, waits"],
      ["stuck", "in flight, all ranks are in"],
      ["missing", "not entered"],
      ["failed", "failed or aborted"],
      ["message", "from a send to its receive; dashed: not issued"],
    ]) {
      const item = make("span");
      item.append(make("i", name, null, { "aria-hidden": "true" }), about);
      if (name === "message") this.messageKey = item;
      legend.append(item);
    }
    this.element.append(tools, this.scroll, legend, this.detail, this.tip.element);
    this.listen();
  }

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    this.scroll.addEventListener("scroll", () => this.request());
  }

  // -- data ------------------------------------------------------------------

  show(group) {
    this.group = group;
    this.choose(null);
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
    this.buttons.every.hidden = this.group?.id === ALL;
    const chosen = this.chosen && { ...this.chosen };
    this.lanes = [];
    if (data) {
      this.lanes = lanesOf(data, this.wide ? null : this.group);
      this.words = data.words;
      this.messages = messagesOf(data, this.lanes);
      setText(this.summary, data.summary);
    }
    // The same work in the new data, if it is still there.
    this.chosen = chosen && twinOf(this.lanes, chosen.lane, chosen.work);
    this.messageKey.hidden = this.messages.length === 0;
    this.layOut();
    this.request();
    if (data && !this.looked) this.reveal(data.straggler ?? data.missing[0]?.ranks[0]);
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

  look(window) {
    this.window = window;
    this.span = null;
    this.request();
  }

  lookAtAll() {
    this.look(extentOf(this.lanes, this.clock()));
  }

  /** The visible part; computed once per frame, not for each bar. */
  get shown() {
    this.span ??= this.window ?? recentOf(this.lanes, this.clock());
    return this.span;
  }

  zoom(factor, at = 0.5) {
    this.look(zoomed(this.shown, factor, at));
  }

  pan(part) {
    this.look(panned(this.shown, part));
  }

  layOut() {
    const count = this.lanes.length;
    this.pitch = count <= 16 ? 22 : count <= 64 ? 14 : 9;
    this.scroll.style.maxHeight = `${TALLEST + AXIS}px`;
    this.canvas.style.height = `${Math.max(1, count) * this.pitch}px`;
  }

  resize(width) {
    this.width = width;
    this.request();
  }

  request() {
    if (this.frame || !this.open) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.span = null;
      if (this.open && this.store.timeline) drawTimeline(this);
    });
  }

  // -- pointing --------------------------------------------------------------

  xOf(time) {
    return xOf(this.shown, this.width, time);
  }

  workAt(x, y) {
    const lane = this.lanes[Math.floor(y / this.pitch)];
    if (lane === undefined || x < GUTTER) return null;
    // A bar of less than a pixel can be selected as well.
    const [time, beside] = [x, x + 2].map((one) => timeAt(this.shown, this.width, one));
    const work = workNear(lane.works, time, beside - time, this.clock());
    return work && { lane, work };
  }

  press(event) {
    if (event.button !== 0) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.drag = { x: event.offsetX, window: this.shown, moved: false };
  }

  point(event) {
    if (this.drag) {
      const by = event.offsetX - this.drag.x;
      if (Math.abs(by) > 3) this.drag.moved = true;
      if (this.drag.moved) {
        this.look(panned(this.drag.window, -by / (this.width - GUTTER)));
        this.leave();
        return;
      }
    }
    const found = this.workAt(event.offsetX, event.offsetY);
    if (found?.work !== this.pointed?.work) {
      this.pointed = found;
      this.request();
    }
    this.showTip(found, event);
  }

  release(event) {
    const drag = this.drag;
    this.drag = null;
    if (!drag || drag.moved) return;
    const found = this.workAt(event.offsetX, event.offsetY);
    this.choose(found);
    if (found) this.goTo(this.words[found.work[W.line]]);
  }

  leave() {
    this.tip.hide();
    if (this.pointed) {
      this.pointed = null;
      this.request();
    }
  }

  /** Zoom with Ctrl or ⌘, pan sideways; else the page scrolls. */
  wheel(event) {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      const at = (event.offsetX - GUTTER) / (this.width - GUTTER);
      this.zoom(event.deltaY > 0 ? STEP : 1 / STEP, Math.min(1, Math.max(0, at)));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.pan((event.deltaX || event.deltaY) / this.width);
    }
  }

  key(event) {
    const steps = {
      ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0],
    };
    if (event.shiftKey && (event.key === "ArrowLeft" || event.key === "ArrowRight")) {
      this.pan(event.key === "ArrowLeft" ? -0.2 : 0.2);
    } else if (event.key in steps) this.walk(...steps[event.key]);
    else if (event.key === "+" || event.key === "=") this.zoom(1 / STEP);
    else if (event.key === "-") this.zoom(STEP);
    else if (event.key === "0") this.look(null);
    else if (event.key === "a") this.lookAtAll();
    else if (event.key === "Enter" && this.chosen) {
      this.goTo(this.words[this.chosen.work[W.line]]);
    } else if (event.key === "Escape") this.choose(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Go to the neighbouring lane, or the neighbouring work in this one. */
  walk(lanes, works) {
    if (this.lanes.length === 0) return;
    let place = this.chosen ? this.lanes.indexOf(this.chosen.lane) : 0;
    place = Math.min(this.lanes.length - 1, Math.max(0, place + lanes));
    const lane = this.lanes[place];
    if (lane.works.length === 0) return;
    let index = lane.works.length - 1;
    if (this.chosen && lanes !== 0) {
      // The same collective there, or the work nearest to it.
      const time = this.chosen.work[W.created];
      const twin = twinOf(this.lanes, lane, this.chosen.work);
      index = twin ? lane.works.indexOf(twin.work) : nearest(lane.works, time);
    } else if (this.chosen) {
      index = lane.works.indexOf(this.chosen.work) + works;
    }
    index = Math.min(lane.works.length - 1, Math.max(0, index));
    this.choose({ lane, work: lane.works[index] });
    this.bringIn();
  }

  bringIn() {
    const { lane, work } = this.chosen;
    const [from, to] = this.shown;
    const begun = work[W.created];
    if (begun < from || begun > to) {
      const span = to - from;
      this.look([begun - span / 3, begun + (span * 2) / 3]);
    }
    const top = this.lanes.indexOf(lane) * this.pitch;
    const box = this.scroll;
    const room = box.clientHeight - AXIS - this.pitch;
    box.scrollTop = Math.min(top, Math.max(top - room, box.scrollTop));
  }

  // -- texts -----------------------------------------------------------------

  choose(found) {
    this.chosen = found;
    this.detail.replaceChildren();
    if (found) {
      const { title, facts } = this.describe(found);
      this.detail.append(make("b", "", title), ` · ${facts.join(" · ")} `);
      const line = this.words[found.work[W.line]];
      const button = make("button", "small", "Show line", { type: "button" });
      button.addEventListener("click", () => this.goTo(line));
      this.detail.append(button);
      this.quote = make("code", "quote");
      this.detail.append(this.quote);
      this.store.request("source", { line }, (answer) => {
        if (this.chosen?.work === found.work) setText(this.quote, answer.text ?? "");
      });
    }
    this.request();
  }

  describe(found) {
    const group = this.wide ? found.lane.group : null;
    const { title, facts } = describeWork(found, this.lanes, this.words, this.clock(), group);
    return { title, facts: [...facts, ...describeMessages(this.messages, found, this.words)] };
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

function saveFile(name, text, type) {
  const link = make("a", "", null, { download: name });
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
