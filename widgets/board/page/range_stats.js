// Statistics of the ops in a range of the timeline. Nothing here draws.

import { W, isRunning } from "./works.js";

/**
 * Statistics of each op that began in a window, the one that took longest in all first:
 * {op, count, median, longest, waits, last: {rank, times}}, with times in ns.
 *
 * `count` is of ops, whatever number of ranks is in them, `median` and `longest` are of
 * the time in which they ran on a rank, `waits` is the part of the ranks' time in them
 * in which they waited for the last one, and `last` the rank that was the last one most
 * often. What is not known is null.
 */
export function statisticsOf(lanes, [from, to], words) {
  const found = new Map();
  for (const lane of lanes) {
    for (const work of lane.works) {
      if (work[W.created] < from || work[W.created] > to) continue;
      // Not whom a send is for.
      const op = words[work[W.op]].replace(work[W.isP2p] ? / .*/ : /$/, "");
      if (!found.has(op)) found.set(op, { ops: new Map(), times: [], waited: 0, entered: 0, lasts: new Map() });
      add(found.get(op), lane, work);
    }
  }
  return [...found]
    .map(([op, one]) => summary(op, one))
    .sort((one, other) => other.total - one.total);
}

function add(found, { rank, group }, work) {
  if (!found.ops.has(group)) found.ops.set(group, new Set());
  // A send's number is its rank's own.
  found.ops.get(group).add(`${work[W.isP2p] ? rank : ""} ${work[W.generation]} ${work[W.seq]}`);
  const [created, started, ended, gathered] = work;
  if (isRunning(work)) return;
  found.times.push(ended - Math.max(created, started));
  if (gathered < 0) return;
  found.entered += ended - created;
  found.waited += Math.max(0, gathered - created);
  if (gathered === created && group.ranks.length > 1) found.lasts.set(rank, (found.lasts.get(rank) ?? 0) + 1);
}

function summary(op, { ops, times, waited, entered, lasts }) {
  times.sort((one, other) => one - other);
  const [last] = [...lasts].sort(([, one], [, other]) => other - one);
  return {
    op,
    count: [...ops.values()].reduce((sum, numbers) => sum + numbers.size, 0),
    median: times[Math.floor((times.length - 1) / 2)] ?? null,
    longest: times.at(-1) ?? null,
    waits: entered > 0 ? waited / entered : null,
    last: last ? { rank: last[0], times: last[1] } : null,
    total: times.reduce((sum, time) => sum + time, 0),
  };
}
