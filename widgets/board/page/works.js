// The works of the timeline: when they ran, which of two ranks belong together, and
// their descriptions. Nothing here draws.

import { NEAREST } from "./scale.js";
import { durationText } from "./text.js";

// The places in a work's list; see timeline.py.
export const W = {
  created: 0, started: 1, ended: 2, gathered: 3, op: 4, seq: 5, generation: 6,
  state: 7, line: 8, count: 9, size: 10, root: 11, error: 12, isP2p: 13,
};

export function isRunning(work) {
  return work[W.ended] < 0;
}

export function endOf(work, now) {
  return isRunning(work) ? Math.max(now, work[W.created]) : work[W.ended];
}

/**
 * The lanes of a group; of all groups without one, where a rank has a lane for each group
 * that it has used or is missing in, or one if it has used none.
 */
export function lanesOf({ lanes, missing }, group) {
  if (group) return lanes.filter((lane) => isOf(lane, group.name, group.ranks));
  const isMissing = (lane) =>
    missing.some((one) => one.ranks.includes(lane.rank) && isOf(lane, one.group, one.members));
  const used = new Set(lanes.filter((lane) => lane.works.length > 0 || isMissing(lane)));
  const seen = new Set([...used].map(({ rank }) => rank));
  return lanes.filter((lane) => {
    if (used.has(lane)) return true;
    if (seen.has(lane.rank)) return false;
    seen.add(lane.rank);
    return true;
  });
}

function isOf(lane, name, ranks) {
  return lane.group === name && lane.ranks.join() === ranks.join();
}

/** The time from the first work to the last, with a margin. */
export function extentOf(lanes, now) {
  const works = lanes.flatMap((lane) => lane.works);
  let from = Infinity;
  let to = -Infinity;
  for (const work of works) {
    from = Math.min(from, work[W.created]);
    to = Math.max(to, endOf(work, now));
  }
  return from < to ? pad(from, to) : [0, 1e9];
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
  return pad(from, Math.max(to, from + NEAREST));
}

/** Whether two lanes are of one group: groups may share a name. */
function sameGroup(one, other) {
  return one.group === other.group && one.ranks.join() === other.ranks.join();
}

/** The same op on the rank of `lane`, as {lane, work}; null if it is not there. */
export function twinOf(lanes, lane, work) {
  const twin = lanes.find((other) => other.rank === lane.rank && sameGroup(other, lane));
  const same = (other) =>
    other[W.seq] === work[W.seq] && other[W.generation] === work[W.generation] &&
    other[W.isP2p] === work[W.isP2p] && (!work[W.isP2p] || other[W.op] === work[W.op]);
  const found = twin?.works.find(same);
  return found ? { lane: twin, work: found } : null;
}

/** When the first rank of the group entered the op. */
function firstOf(lanes, lane, work) {
  let first = work[W.created];
  for (const other of lanes) {
    if (!sameGroup(other, lane)) continue;
    const twin = twinOf(lanes, other, work);
    if (twin) first = Math.min(first, twin.work[W.created]);
  }
  return first;
}

/** A title and facts; with the name of the group, if it is given. */
export function describeWork({ lane, work }, lanes, words, now, group) {
  const count = work[W.count] > 1 ? `${work[W.count]} coalesced ` : "";
  const state = words[work[W.state]].replace("_", " ");
  const facts = [`rank ${lane.rank}`];
  if (group !== null) facts.push(`group ${group}`);
  const begun = work[W.started] >= 0 ? work[W.started] : work[W.created];
  if (isRunning(work)) {
    facts.push(`${state}, for ${durationText(now - work[W.created])}`);
  } else {
    facts.push(`${state} in ${durationText(Math.max(0, work[W.ended] - begun))}`);
  }
  const gathered = work[W.gathered];
  if (gathered === work[W.created] && lane.ranks.length > 1) {
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

function pad(from, to) {
  const by = (to - from) * 0.02;
  return [from - by, to + by];
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
