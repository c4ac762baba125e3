// The table: one row per rank. Only cells that changed are written, and rows are
// boxes of a fixed size, so that the browser lays out and paints only the visible ones
// that changed (a <table> is laid out as a whole: ten times the work).

import { arrange, foldedCells, plainView } from "./arrange.js";
import {
  cellText, concerns, foldLabel, isInCell, nameOf, standing, stayText,
} from "./cells.js";
import { make, makeShape, setAttribute, setText } from "./elements.js";
import { isPlace } from "./links.js";
import { differences } from "./overview.js";
import { elapsedText, moodClass, nameRanks } from "./text.js";
import { BAR, RUNNING, Widths } from "./widths.js";

const STALL = 5; // s after which a bar changes its colour

export class Table {
  /** `goTo(place)` is called where the line of a row is pressed. */
  constructor(store, goTo) {
    this.store = store;
    this.goTo = goTo;
    this.group = null;
    this.entries = new Map(); // key of an item → {row, cells, shown}
    this.items = []; // the rows in order, see arrange.js
    this.view = plainView();
    this.dirty = new Map(); // rank → names of cells, or null: all
    this.columns = store.columns;
    this.build();
    this.widths = new Widths(this.columns, this.table);
  }

  build() {
    this.element = make("div", "rows", null, {
      tabindex: "0",
      role: "region",
      "aria-label": "ranks, Enter for their lines",
    });
    this.element.addEventListener("keydown", (event) => this.key(event));
    this.table = make("div", "table", null, { role: "table" });
    const head = make("div", "row titles", null, { role: "row" });
    for (const column of this.columns) {
      const title = make("div", nameOf(column), column.title, {
        role: "columnheader",
        title: `${column.about} (press to sort)`,
      });
      title.addEventListener("click", () => this.sort(column.key));
      head.append(title);
    }
    this.titles = [...head.children];
    const top = make("div", "top", null, { role: "rowgroup" });
    top.append(head);
    this.top = top;
    this.body = make("div", "", null, { role: "rowgroup" });
    this.table.append(top, this.body);
    this.element.append(this.table);
  }

  /** Show a group. */
  show(id) {
    if (id !== this.group) this.widths.forget();
    this.group = id;
    this.entries.clear();
    this.items = [];
    this.view.opened.clear();
    this.dirty.clear();
    this.body.replaceChildren();
    for (const rank of this.ranks()) this.dirty.set(rank, null);
    this.widths.stale = true;
  }

  rowsOf() {
    return this.store.rows.get(this.group) ?? new Map();
  }

  ranks() {
    return [...this.rowsOf().keys()].sort((a, b) => a - b);
  }

  /** Record changes; the next `flush` writes them. */
  mark(changed) {
    for (const [rank, names] of changed) {
      const known = this.dirty.get(rank);
      if (names === null || known === null) this.dirty.set(rank, null);
      else if (known === undefined) this.dirty.set(rank, new Set(names));
      else for (const name of names) known.add(name);
    }
  }

  flush(now) {
    if (this.dirty.size > 0 || this.disordered) this.place(now);
    if (this.widths.stale) this.widths.fit(this.rowsOf());
  }

  /** Change what the user wants to see; the next `flush` shows it. */
  look(view) {
    Object.assign(this.view, view);
    this.disordered = true;
    this.columns.forEach(({ key }, place) => {
      const order = this.view.descending ? "descending" : "ascending";
      if (this.view.sort === key) setAttribute(this.titles[place], "aria-sort", order);
      else this.titles[place].removeAttribute("aria-sort");
    });
    this.onLook?.();
  }

  /** Sort by a column: the lowest first, then the highest, then as before. */
  sort(key) {
    const { sort, descending } = this.view;
    if (sort !== key) this.look({ sort: key, descending: false });
    else if (!descending) this.look({ descending: true });
    else this.look({ sort: null, descending: false });
  }

  toggle(key) {
    if (!this.view.opened.delete(key)) this.view.opened.add(key);
    this.look({});
  }

  /** Write what has changed, and bring the rows into their order. */
  place(now) {
    const rows = this.rowsOf();
    this.settle(rows);
    this.items = arrange(rows, this.view);
    const kept = new Set(this.items.map(({ key }) => key));
    for (const [key, { row }] of this.entries) {
      if (kept.has(key)) continue;
      row.remove();
      this.entries.delete(key);
    }
    let next = this.body.firstChild;
    for (const item of this.items) {
      const entry = this.entries.get(item.key) ?? this.add(item);
      if (entry.row === next) next = next.nextSibling;
      else this.body.insertBefore(entry.row, next);
      if (item.fold) this.writeFold(entry, item, rows, now);
      else this.writeRank(entry, item.ranks[0], rows, now);
    }
    this.dirty.clear();
    this.disordered = false;
  }

  writeRank(entry, rank, rows, now) {
    const names = entry.shown ? this.dirty.get(rank) : null;
    entry.shown = rows.get(rank);
    if (names !== undefined) this.write(entry, rank, entry.shown, names, now);
  }

  writeFold(entry, { ranks, open }, rows, now) {
    const cells = foldedCells(ranks.map((rank) => rows.get(rank)));
    const label = foldLabel(ranks, cells);
    const { shown } = entry;
    const names = shown && entry.label === label ? new Set(differences(shown, cells)) : null;
    Object.assign(entry, { shown: cells, label });
    if (names === null || names.size > 0) this.write(entry, label, cells, names, now);
    const toggle = entry.row.firstChild.firstChild;
    setAttribute(toggle, "aria-expanded", String(open));
    setAttribute(toggle, "title", nameRanks(ranks));
  }

  write(entry, label, cells, names, now) {
    setAttribute(entry.row, "class", `row ${standing(cells)}`);
    this.columns.forEach((column, place) => {
      if (names !== null && !concerns(column.key, names)) return;
      this.fill(entry.cells[place], column, place, label, cells, now);
    });
    if (cells.reason) setAttribute(entry.row, "title", cells.reason);
    else entry.row.removeAttribute("title");
  }

  add({ key, fold }) {
    const row = make("div", "row", null, { role: "row" });
    const cells = this.columns.map((column) => {
      const role = column.key === "rank" ? "rowheader" : "cell";
      const cell = make("div", nameOf(column), null, { role });
      if (column.key === "state") cell.append(makeShape("calm"));
      const node = document.createTextNode("");
      if (column.key === "elapsed") {
        const bar = make("span", "bar", null, { "aria-hidden": "true" });
        bar.append(make("i"));
        cell.append(bar, node, make("span", "extra", ""));
      } else {
        cell.append(node);
        if (column.key === "line") cell.replaceChildren(this.makeLink(node), make("span", "extra", ""));
        if (column.key === "rank" && fold) cell.replaceChildren(this.makeToggle(node, key));
      }
      row.append(cell);
      return { cell, node };
    });
    const entry = { row, cells };
    this.entries.set(key, entry);
    return entry;
  }

  makeToggle(node, key) {
    const toggle = make("button", "place fold", null, { type: "button", tabindex: "-1" });
    toggle.append(node);
    toggle.addEventListener("click", () => this.toggle(key));
    return toggle;
  }

  makeLink(node) {
    // No stop of the Tab key of its own: there may be hundreds.
    const link = make("button", "place", null, { type: "button", tabindex: "-1" });
    link.append(node);
    link.addEventListener("click", () => this.goTo(node.data));
    return link;
  }

  /** Enter goes to the first line, arrows to the next one, Escape back. */
  key(event) {
    const links = [...this.body.querySelectorAll(".place:enabled")];
    const place = links.indexOf(event.target);
    let next = { ArrowDown: links[place + 1], ArrowUp: links[place - 1], Escape: this.element }[event.key];
    if (place < 0) next = event.key === "Enter" ? links[0] : undefined;
    if (next === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    next.focus();
  }

  fill(target, column, place, rank, cells, now) {
    if (column.key === "elapsed") {
      this.fillElapsed(target, place, cells, now);
      return;
    }
    const text = cellText(column.key, rank, cells, now);
    const stay = column.key === "line" ? stayText(cells, now) : "";
    if (target.node.data !== text) target.node.data = text;
    // In front of "62 ranks" is a triangle; who waits has waited after an abort.
    const fold = column.key === "rank" && typeof rank === "string";
    this.widths.measure(place, fold ? `▸ ${text}` : text.replace(/^waits /, "waited ") + stay);
    if (column.key === "line") {
      target.cell.firstChild.disabled = !isPlace(text);
      // A screen reader would read a button without a name.
      target.cell.firstChild.hidden = !text;
      setText(target.cell.lastChild, stay);
    } else if (column.key === "state") {
      setAttribute(target.cell.firstChild, "class", `shape ${moodClass(cells.mood)}`);
    } else if (column.key === "size" && cells.shape) {
      setAttribute(target.cell, "title", `${cells.shape} ${cells.dtype ?? ""}`);
    }
  }

  fillElapsed(target, place, cells, now) {
    const bar = target.cell.firstChild;
    let text = "";
    let usual = "";
    let part = -1;
    if (cells.since !== undefined) {
      const elapsed = now - cells.since;
      text = elapsedText(elapsed);
      if (cells.usual !== undefined) {
        usual = ` / ${cells.usual}`;
        // Full when it has taken as long as the others did.
        part = Math.min(1, Math.max(0, elapsed / cells.median));
        const late = elapsed > Math.max(STALL, cells.median);
        setAttribute(bar, "class", `bar${late ? " late" : ""}`);
      }
    }
    if (target.node.data !== text || !this.widths.isFilled(place)) {
      target.node.data = text;
      this.widths.measure(place, text + usual);
    }
    setText(target.cell.lastChild, usual);
    // Whole pixels: a bar that moves by less need not be painted.
    const width = part < 0 ? "" : `${Math.max(1, Math.round(part * BAR))}px`;
    bar.hidden = part < 0;
    if (bar.firstChild.style.width !== width) bar.firstChild.style.width = width;
  }

  /**
   * At the first op of a cell, forget columns that are empty by now: they last until the
   * next one. Of a short cell nothing is seen but the op. A rebuild leaves no op. After an
   * abort no op comes before a rebuild: then at once, with those that wait for one.
   */
  settle(rows) {
    const all = [...rows.values()];
    const ran = this.runs;
    this.runs = all.some(isInCell);
    this.begins ||= !ran;
    const over = !this.runs && all.some(({ state }) => state === "aborted");
    const ends = over && !this.widths.over;
    this.widths.end(over);
    const isOther = [...this.dirty.values()].some((names) => names === null || names.has("seq"));
    const hasOp = all.some(({ seq }) => seq !== undefined);
    if (!ends && (!isOther || (hasOp && !this.begins))) return;
    this.begins = !this.runs;
    const empty = ({ key }, place) =>
      this.widths.isFilled(place) && (over || !(key in RUNNING)) &&
      ![...rows].some(([rank, cells]) => cellText(key, rank, cells, 0));
    if (!this.columns.some(empty)) return;
    this.widths.forget();
    for (const entry of this.entries.values()) entry.shown = undefined;
  }

  /** Update the times; no other cell changes without a message. */
  tick(now) {
    const elapsed = this.columns.findIndex((column) => column.key === "elapsed");
    const beat = this.columns.findIndex((column) => column.key === "beat");
    const line = this.columns.findIndex((column) => column.key === "line");
    for (const entry of this.entries.values()) {
      const cells = entry.shown;
      if (cells === undefined) continue;
      if (cells.since !== undefined) {
        this.fillElapsed(entry.cells[elapsed], elapsed, cells, now);
      }
      if (cells.silent) {
        this.fill(entry.cells[beat], this.columns[beat], beat, null, cells, now);
      }
      if (cells.at !== undefined) {
        this.fill(entry.cells[line], this.columns[line], line, null, cells, now);
      }
    }
  }

  /**
   * Scroll a row into the visible part of the table; the page does not scroll. With the
   * time `now` the fold that the row is in is opened, if it is in one.
   */
  reveal(rank, now = null) {
    const find = () => this.items.findLast(({ ranks }) => ranks.includes(rank));
    let item = find();
    if (item?.fold && now !== null) {
      this.toggle(item.key);
      this.flush(now);
      item = find();
    }
    if (item === undefined) return;
    const entry = this.entries.get(item.key);
    const top = entry.row.offsetTop - this.top.offsetHeight;
    const bottom = entry.row.offsetTop + entry.row.offsetHeight;
    const box = this.element;
    if (top < box.scrollTop) box.scrollTop = top;
    else if (bottom > box.scrollTop + box.clientHeight) {
      box.scrollTop = bottom - box.clientHeight;
    }
  }
}
