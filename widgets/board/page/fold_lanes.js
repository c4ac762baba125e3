// Many lanes of a group as three: when the first rank entered each collective, the
// median one and the last. Nothing here draws.

import { MANY } from "./arrange.js";
import { shortRanks } from "./text.js";
import { W } from "./works.js";

const LEAST = 4; // lanes of a group from which on they are folded
const MOST = 8; // lanes of conspicuous ranks below the three

/**
 * Fold lanes where they are many. `opened` has the groups of which all lanes are shown,
 * below the three too, and `stays(lane)` is whether the lane of a rank is shown anyway.
 *
 * A lane of the three has `part`, `count` (of the lanes that are folded), `open`, no
 * rank, and `sources`, which maps its works to the lanes that they are of.
 */
export function foldLanes(lanes, opened, stays) {
  if (lanes.length < MANY) return lanes;
  const groups = new Map();
  for (const lane of lanes) {
    if (!groups.has(lane.group)) groups.set(lane.group, []);
    groups.get(lane.group).push(lane);
  }
  return [...groups].flatMap(([group, all]) => {
    const ops = all.length < LEAST ? [] : opsOf(all);
    // Sends and receives alone: each rank has others.
    if (ops.length === 0) return all;
    const open = opened.has(group);
    const below = open ? all : all.filter(stays).slice(0, MOST);
    return [...threeOf(group, ops, all.length, open), ...below];
  });
}

/** The collectives of some lanes, each as [lane, work] in the order of the entries. */
function opsOf(lanes) {
  const ops = new Map();
  for (const lane of lanes) {
    for (const work of lane.works) {
      if (work[W.isP2p]) continue;
      const key = `${work[W.generation]} ${work[W.seq]}`;
      if (!ops.has(key)) ops.set(key, []);
      ops.get(key).push([lane, work]);
    }
  }
  const entered = ([, one], [, other]) => one[W.created] - other[W.created];
  for (const works of ops.values()) works.sort(entered);
  return [...ops.values()].sort(([one], [other]) => entered(one, other));
}

function threeOf(group, ops, count, open) {
  return [["first", 0], ["median", 0.5], ["last", 1]].map(([part, at]) => {
    const chosen = ops.map((works) => works[Math.floor((works.length - 1) * at)]);
    chosen.sort(([, one], [, other]) => one[W.created] - other[W.created]);
    const sources = new Map(chosen.map(([lane, work]) => [work, lane]));
    return { rank: null, group, part, count, open, sources, works: [...sources.keys()] };
  });
}

/** What stands before a lane; `wide`: there are lanes of several groups. */
export function nameOf({ rank, group, part, count, open }, wide) {
  if (!part) return wide ? `${rank} ${group.name}` : `rank ${rank}`;
  if (part === "median") return `  median of ${count}`;
  if (part === "last") return "  last";
  return `${open ? "▾" : "▸"} ${wide ? `${group.name} ${shortRanks(group.ranks)}` : "first"}`;
}

/** A work with the lane of its rank. */
export function sourceOf({ lane, work }) {
  return { lane: lane.sources?.get(work) ?? lane, work };
}
