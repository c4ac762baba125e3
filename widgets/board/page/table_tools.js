// What a user may ask of a table of many ranks: a filter, an order, folds.

import { MANY } from "./arrange.js";
import { make, setAttribute, setText } from "./elements.js";
import { plural } from "./text.js";

export class TableTools {
  constructor(table) {
    this.table = table;
    this.element = make("div", "tools table-tools");
    this.filter = make("input", "", null, {
      type: "search", "aria-label": "filter", placeholder: "filter: 17, 32-39, in flight, node-3",
    });
    this.filter.addEventListener("input", () => table.look({ filter: this.filter.value }));
    this.culprits = this.button("Culprits only", "culprits");
    this.fold = this.button("Fold equal rows", "fold");
    this.order = make("select", "", null, { "aria-label": "sort by" });
    for (const [key, title] of [["", "culprits first"], ...table.columns.map((one) => [one.key, one.title])]) {
      this.order.append(make("option", "", key ? `by ${title}` : title, { value: key }));
    }
    this.order.addEventListener("change", () =>
      table.look({ sort: this.order.value || null, descending: false }),
    );
    this.count = make("span", "grow quiet", null, { role: "status" });
    this.element.append(this.filter, this.culprits, this.fold, this.order, this.count);
    this.update();
  }

  button(label, key) {
    const button = make("button", "small", label, { type: "button" });
    button.addEventListener("click", () => this.table.look({ [key]: !this.table.view[key] }));
    return button;
  }

  update() {
    const { view, items } = this.table;
    const all = this.table.rowsOf().size;
    this.element.hidden = all < MANY;
    setAttribute(this.culprits, "aria-pressed", String(view.culprits));
    setAttribute(this.fold, "aria-pressed", String(view.fold));
    setText(this.order.options[0], view.fold ? "culprits first" : "by rank");
    if (this.order.value !== (view.sort ?? "")) this.order.value = view.sort ?? "";
    const shown = new Set(items.flatMap(({ ranks }) => ranks)).size;
    setText(this.count, shown < all ? `${shown} of ${plural(all, "rank")}` : "");
  }
}
