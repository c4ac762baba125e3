// The list of groups beside the ranks of all: members, state, op and verdict of each.

import { make, makeShape, setAttribute, setText } from "./elements.js";
import { lineOf } from "./overview.js";
import { moodClass } from "./text.js";

const COLUMNS = [
  ["name", "group"], ["members", "ranks"], ["state", "state"], ["op", "op"], ["verdict", "verdict"],
];

export class GroupList {
  /** `choose(id)` opens the tab of a group. */
  constructor(choose) {
    this.choose = choose;
    this.element = make("div", "group-list", null, {
      role: "region", tabindex: "0", "aria-label": "groups, those that hang first",
    });
    const table = make("table");
    const head = make("tr");
    head.append(...COLUMNS.map(([key, title]) => make("th", `of-${key}`, title, { scope: "col" })));
    const top = make("thead");
    top.append(head);
    this.body = make("tbody");
    table.append(top, this.body);
    this.element.append(table);
    this.lines = new Map(); // id → {row, shape, cells}
  }

  /** Show some groups in this order; `rows` maps their ids to the rows of their ranks. */
  update(groups, rows) {
    const there = new Set(groups.map(({ id }) => id));
    for (const [id, { row }] of this.lines) {
      if (there.has(id)) continue;
      row.remove();
      this.lines.delete(id);
    }
    const lines = groups.map((group) => lineOf(group, rows.get(group.id) ?? new Map()));
    groups.forEach((group, place) => {
      const line = this.lines.get(group.id) ?? this.add(group.id);
      if (this.body.children[place] !== line.row) {
        this.body.insertBefore(line.row, this.body.children[place] ?? null);
      }
      setAttribute(line.row, "class", group.state === "hung" ? "blamed" : "");
      setAttribute(line.shape, "class", `shape ${moodClass(group.mood)}`);
      for (const [key, target] of Object.entries(line.cells)) {
        setText(target, lines[place][key]);
        setAttribute(target, "title", key === "name" ? group.name : lines[place][key]);
      }
    });
    setAttribute(this.element, "data-plain", String(lines.every(({ verdict }) => !verdict)));
  }

  add(id) {
    const row = make("tr");
    const line = { row, shape: makeShape("calm"), cells: {} };
    for (const [key] of COLUMNS) {
      const cell = make(key === "name" ? "th" : "td", `of-${key}`);
      const target = key === "name" ? make("button", "place", "", { type: "button" }) : make("span");
      if (key === "name") cell.setAttribute("scope", "row");
      if (key === "state") cell.append(line.shape);
      cell.append(target);
      line.cells[key] = target;
      row.append(cell);
    }
    row.addEventListener("click", () => this.choose(id));
    this.lines.set(id, line);
    return line;
  }
}
