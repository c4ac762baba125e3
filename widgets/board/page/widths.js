// The widths of the table's columns: which have room, and where each one stands.

import { isHidden, lengthOf } from "./cells.js";
import { make, setAttribute } from "./elements.js";

// What columns hold while a cell runs with an op in it: room that they keep, so that no
// other column goes when it comes.
export const RUNNING = { elapsed: "99.9 s / 99.9 ms", late: "99% · 99.9 ms", waits: "99%", queue: "1" };
const LINGERING = " for 99 s"; // behind a line
const PADDING = 18; // px between two columns, and reserve for wide letters
const CLOSE = 12; // px between two where there is little room; as in board.css
const SHAPE = 16; // px of the shape before a state
const EDGE = 6; // px between the red edge of a row and its ranks
export const BAR = 44; // px of the bar beside the elapsed time
const STAY = / for [\d.]+ \w+$/; // what stayText adds to a line
const LEVELS = [11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1]; // of `drop`: the highest go first
const BARE = 4; // the level from which on elapsed times and lines are shown without more
const FIT = 1; // px for rounding
const OP = 100; // px of an op at least, where its end is cut off
const OP_BESIDE_SHAPES = 80; // px of it where of states the shapes alone are shown: "recv ← 12"

/**
 * Place columns in `room` px.
 *
 * `longest` has the longest text of each column, `filled` whether it has a text at all,
 * `single` is whether all ranks are on one host, and `measure(text)` the width of a text.
 * Return the level of what is left out, whether of states the shapes alone are shown, the
 * whole width, and {left, width} for each column, null for one that is not shown; and
 * whether the verdict is `below` the rest of its row, where an op has no room beside it,
 * and `wraps` there: its end has the ranks.
 */
export function placeColumns(columns, longest, filled, { room, single, measure }) {
  const widthOf = ({ key, title }, text, level, shapes) => {
    const padding = level <= BARE ? CLOSE : PADDING;
    if (key === "state" && shapes) return SHAPE + EDGE;
    if (key === "elapsed" && level <= BARE) return Math.ceil(measure(title) + padding);
    const shown = key === "line" && level <= BARE ? text.replace(STAY, "") : text;
    // The bar is for what ops usually take, which stands behind the elapsed time.
    const bar = text.includes(" / ") ? BAR + 8 : 0;
    const more = { rank: EDGE, state: SHAPE, elapsed: bar }[key] ?? 0;
    return Math.ceil(measure(shown) + padding + more);
  };
  const at = (level, shapes = false, there = filled) => {
    let width = 0;
    const places = columns.map((column, place) => {
      if (!there[place] || isHidden(column, level, single)) return null;
      const found = { left: width, width: widthOf(column, longest[place], level, shapes) };
      width += found.width;
      return found;
    });
    return { level, shapes, width, places };
  };
  for (const level of LEVELS.slice(0, -1)) {
    const found = at(level);
    if (found.width <= room + FIT) return found;
  }
  const [last, withoutOp] = LEVELS.slice(-2);
  const found = cutOp(at(last), columns, room, OP);
  // A verdict and an op say more than the state of their rank.
  const verdict = columns.findIndex(({ key }) => key === "verdict");
  if (found || !filled[verdict]) return found ?? at(withoutOp);
  const short = cutOp(at(last, true), columns, room, OP_BESIDE_SHAPES);
  if (short) return short;
  const others = filled.with(verdict, false);
  const rest =
    LEVELS.slice(0, -1).map((level) => at(level, true, others)).find(({ width }) => width <= room + FIT) ??
    cutOp(at(last, true, others), columns, room, OP_BESIDE_SHAPES) ??
    at(withoutOp, true, others);
  const { width: left } = rest.places[0];
  const width = Math.max(room - left, 0);
  rest.places[verdict] = { left, width };
  return { ...rest, below: true, wraps: measure(longest[verdict]) + CLOSE > width };
}

/** Take what is over from the op, whose longest text may be one of long ago, or null. */
function cutOp(found, columns, room, least) {
  const over = Math.ceil(found.width - room);
  const number = columns.findIndex(({ key }) => key === "op");
  const op = found.places[number];
  if (!op || op.width - over < least) return null;
  if (over <= 0) return found;
  op.width -= over;
  for (const place of found.places.slice(number + 1)) if (place) place.left -= over;
  return { ...found, width: found.width - over };
}

/** The widths of the columns of a table; of each the longest text that it has held. */
export class Widths {
  constructor(columns, table) {
    this.columns = columns;
    this.table = table;
    this.room = 0; // px for all
    // The places of the columns: a cell at a fixed place is laid out alone.
    this.sheet = make("style");
    table.before(this.sheet);
    this.pen = document.createElement("canvas").getContext("2d");
    this.over = false;
    this.forget();
  }

  /** Note whether no op can come, as after an abort: then no room is kept for one. */
  end(over) {
    this.stale ||= over !== this.over;
    this.over = over;
  }

  /** Forget what the columns have held: an empty one is not shown. */
  forget() {
    this.lengths = this.columns.map(() => 0); // of the longest text of each, see lengthOf
    // An abort is to find room: no column may go because of it.
    this.longest = this.columns.map(({ key, title }) => (key === "state" ? "aborted" : title));
    this.stale = true; // whether the widths have to be computed again
  }

  /** Whether a column has held a text. */
  isFilled(place) {
    return this.lengths[place] > 0;
  }

  /** Take a text in. Columns never shrink while they are shown: moving text cannot be read. */
  measure(place, text) {
    if (text.length <= this.lengths[place]) return; // most texts: no need to look closer
    const length = lengthOf(text);
    if (length > this.lengths[place]) {
      this.lengths[place] = length;
      if (length >= lengthOf(this.longest[place])) this.longest[place] = text;
      this.stale = true;
    }
  }

  resize(room) {
    if (room !== this.room) {
      this.room = room;
      this.stale = true;
    }
  }

  /** Give the columns of a table with these rows their places. */
  fit(rows) {
    if (this.room === 0) return; // not on a page yet
    this.stale = false;
    const { fontSize, fontFamily } = getComputedStyle(this.table);
    this.pen.font = `600 ${fontSize} ${fontFamily}`;
    const single = new Set([...rows.values()].map((row) => row.host)).size < 2;
    const measured = new Map();
    const measure = (text) => {
      if (!measured.has(text)) measured.set(text, this.pen.measureText(text).width);
      return measured.get(text);
    };
    const { filled, longest } = this.reserve();
    const found = placeColumns(this.columns, longest, filled, {
      room: this.room, single, measure,
    });
    setAttribute(this.table, "data-drop", String(found.level));
    this.table.classList.toggle("shapes", found.shapes);
    this.table.classList.toggle("below", Boolean(found.below));
    this.table.classList.toggle("wraps", Boolean(found.wraps));
    const rules = found.places.map((place, number) => {
      const name = `.c-${this.columns[number].key}`;
      if (place === null) return `${name}{display:none}`;
      // The last column gets the rest of the width, and at least what it needs.
      const last = number === this.columns.length - 1 && !found.below;
      const size = last ? "right:0" : `width:${place.width}px`;
      return `${name}{left:${place.left}px;${size}}`;
    });
    this.sheet.textContent = rules.join("\n");
    this.table.style.minWidth = `${found.width}px`;
  }

  /** Return what has to have room: also what comes while cells run, once an op was. */
  reserve() {
    const filled = this.lengths.map((length) => length > 0);
    const hadOp = filled[this.columns.findIndex(({ key }) => key === "seq")];
    const longest = this.longest.map((text, place) => {
      const { key } = this.columns[place];
      if (key === "line" && filled[place] && !text.includes(" for ")) return text + LINGERING;
      if (this.over || !hadOp || !(key in RUNNING)) return text;
      filled[place] = true;
      return lengthOf(text) < lengthOf(RUNNING[key]) ? RUNNING[key] : text;
    });
    return { filled, longest };
  }
}
