// The works of the timeline: when they ran, which of two ranks belong together, and
// their descriptions. Nothing here draws.

import { NEAREST } from "./scale.js";
import { durationText, nameRanks } from "./text.js";

// The places in a work's list; see timeline.py.
export const W = {
  created: 0, started: 1, ended: 2, gathered: 3, op: 4, seq: 5, generation: 6,
  state: 7, line: 8, count: 9, size: 10, root: 11, error: 12, isP2p: 13,
};

const NOTABLE = 5e8; // ns from which on a rank is shown to be missing

export function isRunning(work) {
  return work[W.ended] < 0;
}

export function endOf(work, now) {
  return isRunning(work) ? Math.max(now, work[W.created]) : work[W.ended];
}

/**
 * Put the groups themselves into a message's lanes, in place of their numbers: those of
 * the message before, where they are the same.
 */
export function unpack(message, before) {
  const nameOf = ({ name, ranks }) => `${name} ${ranks.join()}`;
  const known = new Map((before?.groups ?? []).map((group) => [nameOf(group), group]));
  const groups = message.groups.map((group) => Object.assign(known.get(nameOf(group)) ?? {}, group));
  const within = (one) => ({ ...one, group: groups[one.group] });
  const [lanes, missing, late] = [message.lanes, message.missing, message.late].map((all) => all.map(within));
  return { ...message, groups, lanes, missing, late };
}

/**
 * The lanes of a group; of all groups without one, where a rank has a lane for each group
 * that it has used or is missing in, or one if it has used none. Not of one that is over.
 */
export function lanesOf({ groups, lanes, missing }, group) {
  if (group) {
    const ranks = group.ranks.join();
    const shown = groups.find((one) => one.name === group.name && one.ranks.join() === ranks);
    return lanes.filter((lane) => lane.group === shown);
  }
  const used = new Set(
    lanes.filter((lane) => !lane.group.over && (lane.works.length > 0 || isMissing(missing, lane))),
  );
  const seen = new Set([...used].map(({ rank }) => rank));
  return lanes.filter((lane) => {
    if (used.has(lane)) return true;
    if (seen.has(lane.rank)) return false;
    seen.add(lane.rank);
    return true;
  });
}

/** Whether the rank of a lane has not entered a collective that others wait in. */
export function isMissing(missing, lane) {
  return missing.some(({ group, ranks }) => group === lane.group && ranks.includes(lane.rank));
}

/**
 * The collectives that ranks were missing in for a while as the records were read: of a
 * loop that runs on, others come later each time, and the records are of a moment ago.
 */
export function lasting({ missing, clock }) {
  return missing.filter(({ since, until }) => (until < 0 ? clock : until) - since >= NOTABLE);
}

/** Whether the rank of a lane is missing, and waits for no other rank meanwhile. */
export function isCulprit(missing, { group, rank }) {
  return missing.some(
    (one) => one.group === group && one.ranks.includes(rank) && !one.held.includes(rank),
  );
}

/**
 * A sentence on a collective that some ranks have not entered, with the name of the group
 * where it is `wide`, and with what holds them up.
 */
export function tellMissing({ group, ranks, op, seq, why }, wide) {
  const [have, are] = ranks.length > 1 ? ["have", "they are"] : ["has", "it is"];
  const where = wide ? ` of group '${group.name}'` : "";
  const reason = why ? `: ${are} in ${why}` : "";
  return `${nameRanks(ranks)} ${have} not entered ${op} #${seq}${where}${reason}`;
}

/** The time from the first work to the last. */
export function extentOf(lanes, now) {
  const works = lanes.flatMap((lane) => lane.works);
  let from = Infinity;
  let to = -Infinity;
  for (const work of works) {
    from = Math.min(from, work[W.created]);
    to = Math.max(to, endOf(work, now));
  }
  return from < to ? [from, to] : [0, 1e9];
}

/** The time of the works since the last longer pause. */
export function recentOf(lanes, now) {
  const spans = lanes.flatMap((lane) =>
    lane.works.map((work) => [work[W.created], endOf(work, now)]),
  );
  if (spans.length === 0) return [0, 1e9];
  spans.sort((a, b) => b[1] - a[1]);
  const to = spans[0][1];
  let from = spans[0][0];
  for (const [begun, ended] of spans) {
    if (from - ended > Math.max(0.5e9, 3 * (to - from))) break;
    from = Math.min(from, begun);
  }
  return [from, Math.max(to, from + NEAREST)];
}

/** Whether two works are of one op of a group. */
export function sameOp(one, other) {
  return (
    one[W.seq] === other[W.seq] && one[W.generation] === other[W.generation] &&
    one[W.isP2p] === other[W.isP2p] && (!one[W.isP2p] || one[W.op] === other[W.op])
  );
}

/** The same op in the lane of `lanes` that is like `lane`, as {lane, work}, or null. */
export function twinOf(lanes, lane, work) {
  const twin = lanes.find(
    ({ rank, group, part }) => rank === lane.rank && group === lane.group && part === lane.part,
  );
  const found = twin?.works.find((other) => sameOp(other, work));
  return found ? { lane: twin, work: found } : null;
}

/** When the first rank of the group entered the op. */
function firstOf(lanes, lane, work) {
  let first = work[W.created];
  for (const { group, works } of lanes) {
    const twin = group === lane.group && works.find((other) => sameOp(other, work));
    if (twin) first = Math.min(first, twin[W.created]);
  }
  return first;
}

/** A title and facts; with the name of the group where it is `wide`. */
export function describeWork({ lane, work }, lanes, words, now, wide) {
  const count = work[W.count] > 1 ? `${work[W.count]} coalesced ` : "";
  const state = words[work[W.state]].replace("_", " ");
  const facts = [`rank ${lane.rank}`];
  if (wide) facts.push(`group ${lane.group.name}`);
  const begun = work[W.started] >= 0 ? work[W.started] : work[W.created];
  if (isRunning(work)) {
    facts.push(`${state}, for ${durationText(now - work[W.created])}`);
  } else {
    facts.push(`${state} in ${durationText(Math.max(0, work[W.ended] - begun))}`);
  }
  const gathered = work[W.gathered];
  if (gathered === work[W.created] && lane.group.ranks.length > 1) {
    const first = firstOf(lanes, lane, work);
    if (first < gathered) {
      facts.push(`entered last, ${durationText(gathered - first)} after the first`);
    }
  } else if (gathered > work[W.created]) {
    facts.push(`waited ${durationText(gathered - work[W.created])} for the last rank`);
  }
  const size = words[work[W.size]];
  if (size) facts.push(size);
  if (work[W.root] !== null) facts.push(`rank ${work[W.root]} is the root`);
  facts.push(words[work[W.line]]);
  if (work[W.error]) facts.push(work[W.error]);
  return { title: `${count}${words[work[W.op]]} #${work[W.seq]}`, facts };
}

/**
 * The messages of some lanes, as {from: {lane, work}, to: {lane, work}}: sends with their
 * receives. A work is null where its rank has not issued it.
 */
export function messagesOf(data, lanes) {
  const shown = new Set(lanes);
  const side = (lane, work) => ({ lane: data.lanes[lane], work: data.lanes[lane].works[work] ?? null });
  return data.messages
    .map(([sender, send, receiver, receive]) => ({ from: side(sender, send), to: side(receiver, receive) }))
    .filter(({ from, to }) => shown.has(from.lane) && shown.has(to.lane));
}

/** What a send or receive tells of its other side: a sentence for each message of it. */
export function describeMessages(messages, { lane, work }, words) {
  return messages.flatMap(({ from, to }) => {
    const mine = from.lane === lane && from.work === work;
    if (!mine && !(to.lane === lane && to.work === work)) return [];
    const other = mine ? to : from;
    const what = mine ? "receive" : "send";
    const who = `rank ${other.lane.rank}`;
    if (other.work === null) return [`${who} has not issued its ${what}`];
    return [`its ${what} is ${words[other.work[W.op]]} #${other.work[W.seq]} on ${who}, ${words[other.work[W.line]]}`];
  });
}

/** The place of the work that began nearest to a time. */
export function nearest(works, time) {
  let best = 0;
  works.forEach((work, place) => {
    const known = works[best];
    if (Math.abs(work[W.created] - time) < Math.abs(known[W.created] - time)) best = place;
  });
  return best;
}

/** The work that runs at a time, or nearest to it within `reach`; null if none is. */
export function workNear(works, time, reach, now) {
  let best = null;
  let least = reach;
  for (const work of works) {
    const miss = Math.max(work[W.created] - time, time - endOf(work, now), 0);
    if (miss < least || (best === null && miss === least)) [best, least] = [work, miss];
  }
  return best;
}
