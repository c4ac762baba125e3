// The tab "all": every rank once, in the op of whatever group it is in. Nothing here
// draws.

import { shortName, shortRanks } from "./text.js";

export const ALL = "all";

const WORST = ["error", "warning", "working", "busy", "calm"];
const FIRST = ["hung", "aborted", "rank dead", "no answer", "in flight"]; // of the groups

/**
 * The groups in the order in which they are listed: those in trouble first, of them the
 * ones in `causes`, which are ids, in that order.
 */
export function inOrder(groups, causes = []) {
  const place = ({ id, state }) => {
    const cause = causes.indexOf(id);
    const trouble = FIRST.indexOf(state);
    if (cause >= 0) return cause - causes.length;
    return trouble < 0 ? FIRST.length : trouble;
  };
  return [...groups].sort((one, other) => place(one) - place(other));
}

/** The tab of all ranks, in the form of a group's; `rows` has its rows. */
export function overviewOf(groups, rows) {
  const moods = new Set(groups.map(({ mood }) => mood));
  const [{ state }] = inOrder(groups);
  return {
    id: ALL, name: ALL, label: ALL, ranks: [...rows.keys()], size: rows.size,
    mood: WORST.find((mood) => moods.has(mood)) ?? "calm",
    state, facts: [], last: "", dead: [], aborted: false, flight: 0,
  };
}

/**
 * The row of a rank that tells most about it, as `{name, label, cells}`.
 *
 * `found` has its row of each group with the group's names, and when its op has changed
 * last: the row with a blame, then those in flight, the oldest first, then those that
 * failed, then the newest.
 */
export function tellingRow(found) {
  return found.reduce((best, one) => (isMore(one, best) ? one : best));
}

function isMore(one, other) {
  const [mine, others] = [weight(one.cells), weight(other.cells)];
  if (mine !== others) return mine > others;
  if (one.cells.mood === "working" && one.cells.since !== other.cells.since) {
    return (one.cells.since ?? Infinity) < (other.cells.since ?? Infinity);
  }
  return one.changed > other.changed;
}

function weight({ blame, mood, verdict, failed }) {
  if (blame) return mood === "working" ? 5 : 4;
  if (mood === "working") return verdict ? 3 : 2;
  return failed ? 1 : 0;
}

/** The cells of that row in the tab "all": its op says in which of its groups the rank is. */
export function overviewCells(found) {
  const { name, label, cells } = tellingRow(found);
  const group = found.some((one) => one.name === name && one.label !== label) ? label : name;
  return cells.op === undefined ? { ...cells } : { ...cells, op: `${shortName(group)} ${cells.op}` };
}

/** The names of the cells in which two rows differ. */
export function differences(old, cells) {
  const names = new Set([...Object.keys(old), ...Object.keys(cells)]);
  return [...names].filter((name) => old[name] !== cells[name]);
}

/** The cells of a group's line in that tab: who is in it, what it does, what is wrong. */
export function lineOf({ name, ranks, state, verdict }, rows) {
  return { name: shortName(name), members: shortRanks(ranks), state, op: opOf(rows), verdict };
}

/** The op that is in flight for longest on any rank, else the last one. */
function opOf(rows) {
  let best = null;
  const older = ({ since = Infinity }) => since < (best.since ?? Infinity);
  const newer = ({ issued = 0 }) => issued > (best.issued ?? 0);
  for (const cells of rows.values()) {
    if (cells.op === undefined) continue;
    const [flies, flew] = [cells, best].map((one) => one?.mood === "working");
    if (!best || (flies !== flew ? flies : flies ? older(cells) : newer(cells))) best = cells;
  }
  return best ? `${best.op} ${best.seq ?? ""}`.trim() : "";
}
