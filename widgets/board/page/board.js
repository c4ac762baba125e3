// The board: head, banner, tabs, table and timeline, and their layout.

import { OUTCOME_SHOWN, makeActions } from "./actions.js";
import { makeBanner } from "./banner.js";
import { make, setAttribute, setText } from "./elements.js";
import { GroupList } from "./group_list.js";
import { makeHost, noteFocus } from "./host.js";
import { RankMap } from "./map.js";
import { ALL, inOrder } from "./overview.js";
import { goToLine } from "./places.js";
import { Stacks } from "./stacks.js";
import { Table } from "./table.js";
import { TableTools } from "./table_tools.js";
import { Tabs } from "./tabs.js";
import { Timeline } from "./timeline.js";

const TICK = 200; // ms between two updates of the elapsed times
// Of the page's body, by which front ends change their theme.
const THEMES = ["data-jp-theme-name", "data-vscode-theme-id", "class", "style"];
const REFRESH = 1_000; // ms between two requests for the rings, at least

export class Board {
  constructor(store) {
    this.store = store;
    this.group = store.shown.group; // the id of the tab that is shown
    this.change = { all: true, rows: new Map() };
    this.build();
    if (store.shown.timeline) this.unfold(true);
    this.timer = setInterval(() => this.tick(), TICK);
    this.sizes = new ResizeObserver(() => this.resize());
    this.sizes.observe(this.body);
    this.sizes.observe(this.table.element);
    this.sight = new IntersectionObserver((entries) => {
      this.visible = entries[entries.length - 1].isIntersecting;
      if (this.visible) this.request();
    });
    this.sight.observe(this.body);
    this.visible = true;
    // Canvases do not follow a theme by themselves.
    this.themes = new MutationObserver(() => this.paint());
    this.themes.observe(document.body, { attributeFilter: THEMES });
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.painted = () => this.paint();
    this.scheme.addEventListener("change", this.painted);
    store.open(this);
    this.request();
  }

  build() {
    const { element, body } = makeHost(
      "rankscope-live",
      "Rankscope board",
      this.store.model.get("styles"),
    );
    this.element = element;
    this.body = body;
    this.title = make("b", "title");
    this.facts = make("span", "grow quiet facts");
    this.actions = make("span", "actions");
    const head = make("header", "head");
    this.done = make("span", "grow facts", null, { role: "status" });
    this.done.hidden = true;
    head.append(this.title, this.facts, this.done, this.actions);
    const goTo = (line) => this.goTo(line);
    this.banner = makeBanner(() => this.store.request("dismiss", {}, () => {}), goTo);
    this.news = make("div", "news", null, { role: "alert" });
    this.news.hidden = true;
    this.tabs = new Tabs((id) => this.open(id));
    this.map = new RankMap((rank) => this.table.reveal(rank, this.store.now()));
    this.table = new Table(this.store, goTo);
    this.tools = new TableTools(this.table);
    this.table.onLook = () => this.request();
    this.groups = new GroupList((id) => this.open(id));
    this.split = make("div", "split", null, { role: "tabpanel" });
    this.split.append(this.table.element, this.groups.element);
    this.timeline = new Timeline(this.store, goTo);
    this.fold = make("button", "fold", "Timeline", {
      type: "button",
      "aria-expanded": "false",
    });
    this.fold.addEventListener("click", () => this.unfold(!this.timeline.open));
    this.stacks = new Stacks(this);
    this.buttons = makeActions(this);
    this.body.append(
      head, this.banner.element, this.news, this.stacks.element, this.tabs.element, this.map.element,
      this.tools.element, this.split, this.fold, this.timeline.element,
    );
    this.scrolled = 0;
    const rows = this.table.element;
    rows.addEventListener("scroll", () => (this.scrolled = rows.scrollTop));
    this.focus = noteFocus(this);
  }

  // -- changes ------------------------------------------------------------------

  /** Record a change; the next frame draws it. */
  onChange(change) {
    const known = this.change;
    for (const key of ["head", "banner", "groups", "all", "timeline"]) {
      known[key] ||= change[key];
    }
    if (change.trouble) this.showOutcome(change.trouble, false);
    if (change.banner) {
      const rests = !["busy", "working"].includes(this.store.headline.mood);
      // "Rebuilt." is of the past once a cell runs.
      if (this.rested && !rests && this.done.textContent) this.showOutcome("", true);
      this.rested = rests;
    }
    const changed = change.rows.get(this.group);
    if (changed) this.table.mark(changed);
    // Out of sight the rest is not drawn; this is what a screen reader tells.
    if (!this.visible && (change.head || change.banner || change.groups)) {
      this.banner.show(this.store.headline);
      this.buttons.update();
    }
    // A hang begins or ends: that is not to wait for the next request.
    if (change.banner && this.store.headline.mood === "error") this.asked = undefined;
    this.request();
  }

  request() {
    if (this.frame || !this.visible) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  draw() {
    const began = performance.now();
    const { head, banner, groups, all, timeline } = this.change;
    this.change = { rows: new Map() };
    const now = this.store.now();
    if (all || groups) {
      this.tabs.update(this.store.tabs);
      this.choose();
    }
    if (all) {
      this.groups.element.hidden = this.group !== ALL;
      this.table.show(this.group);
    }
    if (all || head) this.drawHead();
    if (all || banner) this.drawBanner();
    const marked = all || this.table.dirty.size > 0;
    this.table.flush(now);
    this.tools.update();
    if (marked) this.drawMap();
    if (this.group === ALL && (marked || groups || banner)) {
      const causes = this.store.headline.groups ?? [];
      this.groups.update(inOrder(this.store.tabs.slice(1), causes), this.store.rows);
    }
    if (all || groups || head || banner) {
      this.buttons.update();
      this.stacks.update();
    }
    if (this.timeline.open && (all || groups || timeline)) this.timeline.group = this.tab();
    // Of 1,024 ranks that takes a while: not for each state of a group.
    if (this.timeline.open && (all || head || timeline)) this.timeline.sort();
    this.spent = performance.now() - began;
  }

  drawHead() {
    setAttribute(this.body, "class", this.store.live ? "board" : "board over");
    this.timeline.buttons.export.disabled = !this.store.live;
    const { title = "", facts = [], state = "" } = this.store.head;
    setText(this.title, title);
    setText(this.facts, [...facts, ...(state === "running" ? [] : [state])].join(" · "));
    setAttribute(this.facts, "title", this.facts.textContent);
  }

  drawBanner() {
    this.banner.show(this.store.headline);
    this.follow(this.store.headline.groups ?? []);
    // The blamed rows may be out of sight among many.
    const rows = this.store.rows.get(this.group) ?? new Map();
    const blamed = [...rows].filter(([, cells]) => cells.blame).map(([rank]) => rank);
    const who = blamed.join();
    if (who && who !== this.blamed) {
      requestAnimationFrame(() => this.table.reveal(Math.min(...blamed)));
    }
    this.blamed = who;
  }

  drawMap() {
    this.map.update(this.table.rowsOf(), this.store.groups);
  }

  /** Draw the canvases in the colours of the theme. */
  paint() {
    this.map.draw();
    this.timeline.request();
  }

  // -- groups ----------------------------------------------------------------

  tab() {
    return this.store.tabs.find((group) => group.id === this.group);
  }

  /** Keep the tab that the user has opened, if its group is there; else show the first. */
  choose() {
    const [first] = this.store.tabs;
    const kept = this.store.shown.chosen || first?.id !== ALL || this.followed;
    if (this.tab() === undefined || (!kept && this.group !== ALL)) this.show(first?.id ?? null);
    this.select();
  }

  select() {
    this.tabs.select(this.group);
    setAttribute(this.split, "aria-label", this.tab()?.label ?? "");
  }

  /** Open a tab for the user. */
  open(id) {
    this.store.shown.chosen = true;
    this.show(id);
  }

  /**
   * Open the tab of the group with an error, once; the user may choose another. The
   * tab of all ranks shows an error of several groups at once.
   */
  follow([id, ...others]) {
    if (!id) this.followed = null;
    if (!id || id === this.followed || this.buttons.asking()) return;
    this.followed = id;
    if (others.length > 0 && this.group === ALL) return;
    if (id !== this.group && this.store.groups.some((group) => group.id === id)) this.show(id);
  }

  show(id) {
    this.group = id;
    this.groups.element.hidden = id !== ALL;
    this.select();
    this.table.show(id);
    this.buttons.update();
    this.store.shown.group = id;
    if (this.timeline.open) this.timeline.show(this.tab());
    this.drawMap();
    this.resize();
  }

  // -- time ------------------------------------------------------------------

  tick() {
    if (!this.visible || document.hidden || !this.store.live) return;
    this.table.tick(this.store.now());
    if (this.timeline.moving) this.timeline.request();
    if (this.timeline.open) this.refresh();
  }

  /** Request the records while the timeline is open and the state changes. */
  refresh() {
    const now = performance.now();
    if (this.loading || !this.store.live || now - (this.asked ?? -Infinity) < this.every()) return;
    const version = this.store.version;
    if (this.asked && version === this.seen) return;
    this.seen = version;
    this.asked = now;
    this.loading = true;
    this.store.request("records", {}, (answer) => {
      this.loading = false;
      if (!answer.ok && this.store.live) this.showOutcome(answer.text, false);
    });
  }

  /** The period of these requests, in ms: longer for more ranks. */
  every() {
    return REFRESH * Math.max(1, this.table.rowsOf().size / 16);
  }

  unfold(open) {
    this.store.shown.timeline = open;
    this.timeline.open = open;
    this.timeline.element.hidden = !open;
    setAttribute(this.fold, "aria-expanded", String(open));
    this.asked = undefined;
    if (open) {
      this.timeline.group = this.tab();
      this.timeline.sort();
      this.refresh();
      this.resize();
    }
  }

  resize() {
    const room = this.table.element.clientWidth;
    this.table.widths.resize(room);
    this.map.resize(this.body.clientWidth - 10);
    if (this.timeline.open) this.timeline.resize(this.timeline.scroll.clientWidth);
    this.request();
  }

  goTo(line) {
    const [cell] = /^cell \d+/.exec(line) ?? [];
    if (goToLine(this.element, line, this.store) || !cell) return;
    const why = "it has run again since, or is gone";
    const said = `No ${cell} is on this page: ${why}.`;
    const other = `This ${cell} is another notebook's, or of an earlier kernel.`;
    this.showOutcome(this.store.hasSent(line) ? said : other, true);
  }

  // -- outcomes -----------------------------------------------------------------

  /** Show the outcome of a click: beside the title for a while; an error until the next. */
  showOutcome(text, ok) {
    clearTimeout(this.outcomeTimer);
    setText(this.done, ok ? text : "");
    this.facts.hidden = Boolean(ok && text);
    this.done.hidden = !this.facts.hidden;
    setText(this.news, ok ? "" : text);
    this.news.hidden = !this.news.textContent;
    if (ok && text) this.outcomeTimer = setTimeout(() => this.showOutcome("", true), OUTCOME_SHOWN);
  }

  /** Move to another element of the page; keep the scroll position and the focus. */
  moveTo(home) {
    const { target } = this.focus;
    home.append(this.element);
    this.table.element.scrollTop = this.scrolled;
    target?.focus({ preventScroll: true });
  }

  destroy() {
    clearInterval(this.timer);
    clearTimeout(this.outcomeTimer);
    this.sizes.disconnect();
    this.sight.disconnect();
    this.themes.disconnect();
    this.scheme.removeEventListener("change", this.painted);
    this.store.close(this);
    this.element.remove();
  }
}
