// The table of statistics below the timeline: of the ops in sight.

import { make, setText } from "./elements.js";
import { statisticsOf } from "./range_stats.js";
import { durationText, plural } from "./text.js";

const MOST = 8; // ops
const TITLES = ["op", "ops", "median", "longest", "waits", "last to enter"];

export class RangeTable {
  constructor() {
    this.element = make("div", "range");
    this.element.hidden = true;
    this.caption = make("caption", "quiet");
    this.body = make("tbody");
    const head = make("tr");
    head.append(...TITLES.map((title) => make("th", "", title, { scope: "col" })));
    const top = make("thead");
    top.append(head);
    const table = make("table");
    table.append(this.caption, top, this.body);
    this.element.append(table);
  }

  /** Show the ops of some lanes that began in a window, if the table is open. */
  show(lanes, [from, to], words) {
    if (this.element.hidden) return;
    const found = statisticsOf(lanes, [from, to], words);
    const rows = found.slice(0, MOST).map((one) => [
      one.op, String(one.count),
      ...[one.median, one.longest].map((time) => (time === null ? "" : durationText(time))),
      one.waits === null ? "" : `${Math.round(one.waits * 100)}%`,
      one.last ? `rank ${one.last.rank}, ${plural(one.last.times, "time")}` : "",
    ]);
    const left = found.length > MOST ? `, ${found.length - MOST} more kinds of ops` : "";
    setText(this.caption, `${durationText(to - from)} in sight${left}`);
    const known = JSON.stringify(rows);
    if (known === this.known) return;
    this.known = known;
    this.body.replaceChildren(
      ...rows.map(([op, ...others]) => {
        const row = make("tr");
        row.append(make("th", "", op, { scope: "row" }), ...others.map((text) => make("td", "", text)));
        return row;
      }),
    );
  }
}
