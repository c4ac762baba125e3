// The widths of the table's columns: which have room, and where each one stands.

import { isHidden } from "./cells.js";

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

/**
 * Place columns in `room` px.
 *
 * `longest` has the longest text of each column, `filled` whether it has a text at all,
 * `single` is whether all ranks are on one host, and `measure(text)` the width of a text.
 * Return the level of what is left out, the whole width, and {left, width} for each
 * column, null for one that is not shown.
 */
export function placeColumns(columns, longest, filled, { room, single, measure }) {
  const widthOf = ({ key, title }, text, level) => {
    const padding = level <= BARE ? CLOSE : PADDING;
    if (key === "elapsed" && level <= BARE) return Math.ceil(measure(title) + padding);
    const shown = key === "line" && level <= BARE ? text.replace(STAY, "") : text;
    // The bar is for what ops usually take, which stands behind the elapsed time.
    const bar = text.includes(" / ") ? BAR + 8 : 0;
    const more = { rank: EDGE, state: SHAPE, elapsed: bar }[key] ?? 0;
    return Math.ceil(measure(shown) + padding + more);
  };
  const at = (level) => {
    let width = 0;
    const places = columns.map((column, place) => {
      if (!filled[place] || isHidden(column, level, single)) return null;
      const found = { left: width, width: widthOf(column, longest[place], level) };
      width += found.width;
      return found;
    });
    return { level, width, places };
  };
  for (const level of LEVELS.slice(0, -1)) {
    const found = at(level);
    if (found.width <= room + FIT) return found;
  }
  return cutOp(at(LEVELS.at(-2)), columns, room) ?? at(LEVELS.at(-1));
}

/** Take what is over from the op, whose longest text may be one of long ago, or null. */
function cutOp(found, columns, room) {
  const over = Math.ceil(found.width - room);
  const number = columns.findIndex(({ key }) => key === "op");
  const op = found.places[number];
  if (!op || op.width - over < OP) return null;
  op.width -= over;
  for (const place of found.places.slice(number + 1)) if (place) place.left -= over;
  return { ...found, width: found.width - over };
}
