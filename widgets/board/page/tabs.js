// The tabs: one for each group.

import { make, makeShape, setAttribute, setText } from "./elements.js";
import { moodClass, plural, shortName } from "./text.js";

const TOLD = new Set(["hung", "aborted", "rank dead"]); // states that a tab tells
const IN_LINE = 6; // tabs that leave room for facts beside them

export class Tabs {
  constructor(choose) {
    this.choose = choose;
    this.element = make("div", "groups");
    this.list = make("div", "tabs", null, { role: "tablist", "aria-label": "groups" });
    this.facts = make("span", "quiet facts");
    this.element.append(this.list, this.facts);
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.tabs = new Map();
  }

  update(groups) {
    this.groups = groups;
    setAttribute(this.element, "class", groups.length > IN_LINE ? "groups many" : "groups");
    const there = new Set(groups.map((group) => group.id));
    for (const [id, tab] of this.tabs) {
      if (there.has(id)) continue;
      tab.element.remove();
      this.tabs.delete(id);
    }
    groups.forEach((group, place) => {
      let tab = this.tabs.get(group.id);
      if (tab === undefined) {
        tab = this.make(group);
        this.tabs.set(group.id, tab);
      }
      if (this.list.children[place] !== tab.element) {
        this.list.insertBefore(tab.element, this.list.children[place] ?? null);
      }
      setAttribute(tab.shape, "class", `shape ${moodClass(group.mood)}`);
      setText(tab.label, shortName(group.label));
      setText(tab.size, String(group.size));
      setText(tab.state, TOLD.has(group.state) ? group.state : "");
      const title = [plural(group.size, "rank"), group.state].filter(Boolean).join(", ");
      setAttribute(tab.element, "title", `${group.label}: ${title}`);
      // What its shape says, in words.
      setAttribute(tab.element, "aria-label", `${group.label}, ${title}`);
    });
  }

  make(group) {
    const element = make("button", "tab", null, { type: "button", role: "tab" });
    const shape = makeShape("calm");
    const label = make("span", "label");
    const size = make("span", "quiet count");
    const state = make("span", "trouble");
    element.append(shape, label, size, state);
    element.addEventListener("click", () => this.choose(group.id));
    return { element, shape, label, size, state };
  }

  select(id) {
    this.chosen = id;
    for (const [other, tab] of this.tabs) {
      const mine = other === id;
      setAttribute(tab.element, "aria-selected", String(mine));
      setAttribute(tab.element, "tabindex", mine ? "0" : "-1");
    }
    // Of many tabs some are out of sight: the list scrolls, and the page does not.
    const { offsetTop = 0, offsetHeight = 0 } = this.tabs.get(id)?.element ?? {};
    const top = offsetTop - this.list.offsetTop;
    if (top < this.list.scrollTop) this.list.scrollTop = top;
    const bottom = top + offsetHeight - this.list.clientHeight;
    if (bottom > this.list.scrollTop) this.list.scrollTop = bottom;
    const group = this.groups?.find((one) => one.id === id);
    const facts = group ? [...group.facts, group.last] : [];
    setText(this.facts, facts.filter(Boolean).join(" · "));
    // Whole, where the line has no room for it.
    setAttribute(this.facts, "title", this.facts.textContent);
  }

  key(event) {
    const ids = [...(this.groups ?? [])].map((group) => group.id);
    const place = ids.indexOf(this.chosen);
    const next = {
      ArrowRight: (place + 1) % ids.length,
      ArrowLeft: (place + ids.length - 1) % ids.length,
      Home: 0,
      End: ids.length - 1,
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    this.choose(ids[next]);
    this.tabs.get(ids[next])?.element.focus();
  }
}
