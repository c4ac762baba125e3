// The cells of the table: their texts, and what depends on what.

import { elapsedText, moodClass, nameRanks, plural } from "./text.js";

const LINGERS = 5; // s at one line from which on they are shown; as in columns.py
const RANKS = 24; // letters of the ranks of a fold
const TOLD = 8; // states of ranks that the text for the map has
const NARROW = /[ fijlrt.,:;'|()]/g; // letters of about half the width of others

/** Whether a rank runs a cell. */
export function isInCell(cells) {
  return cells.mood === "working" || cells.mood === "busy";
}

/** The length of a text, in letters of full width: "no answer" is wider than "in flight". */
export function lengthOf(text) {
  return text.length - (text.match(NARROW)?.length ?? 0) / 2;
}

export function nameOf(column) {
  return `cell c-${column.key}${column.numeric ? " number" : ""}`;
}

/** The classes of a row. */
export function standing(cells) {
  return `${moodClass(cells.mood)}${cells.blame ? " blamed" : ""}`;
}

/** What the map of the ranks shows, as a text: those at fault first. */
export function mapText(rows) {
  const alike = new Map();
  for (const [rank, { blame, verdict, state }] of rows) {
    const key = `${blame ? 0 : 1} ${verdict ?? state}`;
    if (!alike.has(key)) alike.set(key, []);
    alike.get(key).push(rank);
  }
  const parts = [...alike].sort(([one], [other]) => Math.sign(one[0] - other[0]));
  const texts = parts.slice(0, TOLD).map(([key, ranks]) => {
    const what = ranks.length > 1 ? key.slice(2).replace(/^waits /, "wait ") : key.slice(2);
    return `${nameRanks(ranks)} ${what}`;
  });
  if (parts.length > TOLD) texts.push("and others");
  return `map of ${plural(rows.size, "rank")}: ${texts.join("; ")}`;
}

export function isHidden({ key, drop }, level, single) {
  return (drop > 0 && drop >= level) || (key === "host" && single);
}

/** Whether a column depends on a cell that changed. */
export function concerns(key, names) {
  if (names.has(key)) return true;
  if (key === "state") return names.has("mood");
  if (key === "elapsed") return names.has("since") || names.has("usual");
  if (key === "beat") return names.has("silent") || names.has("state");
  if (key === "line") return names.has("at");
  return key === "size" && (names.has("shape") || names.has("dtype"));
}

/** The text of a cell; the same as of `shown` in columns.py. */
export function cellText(key, rank, cells, now) {
  if (key === "rank") return String(rank);
  if (key === "lag") return cells.lag ? `−${cells.lag}` : "";
  if (key === "queue") return cells.queue ? String(cells.queue) : "";
  if (key === "beat") {
    if (cells.state === "dead" || !cells.silent) return "";
    return elapsedText(now - cells.silent);
  }
  const value = cells[key];
  return value === undefined ? "" : String(value);
}

/** Which ranks a fold has, if they are at fault and not too many; else how many. */
export function foldLabel(ranks, cells) {
  const text = nameRanks(ranks);
  return cells.blame && text.length <= RANKS ? text : plural(ranks.length, "rank");
}

/** How long a rank has been at its line, behind the line. */
export function stayText(cells, now) {
  const stay = now - cells.at;
  return stay >= LINGERS ? ` for ${elapsedText(stay)}` : "";
}
