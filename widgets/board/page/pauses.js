// Pauses between the ops of all lanes, which the timeline draws short: between two cells
// of a notebook nothing happens for longer than everything else. Nothing here draws.

import { W, endOf } from "./works.js";

const LEAST = 0.5e9; // ns; what is not longer is drawn as it is
const LONG = 0.2; // of the time with ops
const SHORT = 0.04; // of the time with ops: what is left of a pause,
const TOGETHER = 0.3; // and of all pauses at most

/**
 * The pauses of a picture: from a time of the clock to its place, where each pause takes
 * `left` of its length, and back.
 */
export class Pauses {
  constructor(list = []) {
    this.list = list; // {from, to, left}, one after the other
  }

  /** The pauses in which no rank of some lanes is in an op. */
  static of(lanes, now) {
    const spans = lanes
      .flatMap(({ works }) => works.map((work) => [work[W.created], endOf(work, now)]))
      .sort(([one], [other]) => one - other);
    const found = [];
    let busy = 0;
    let end = spans[0]?.[0];
    for (const [from, to] of spans) {
      if (from > end) found.push({ from: end, to: from });
      busy += Math.max(0, to - Math.max(from, end));
      end = Math.max(end, to);
    }
    const long = found.filter(({ from, to }) => to - from > Math.max(LEAST, LONG * busy));
    const length = busy * Math.min(SHORT, TOGETHER / long.length);
    return new Pauses(long.map(({ from, to }) => ({ from, to, left: length / (to - from) })));
  }

  place(time) {
    let place = time;
    for (const { from, to, left } of this.list) {
      if (time <= from) break;
      place -= (Math.min(time, to) - from) * (1 - left);
    }
    return place;
  }

  timeAt(place) {
    let saved = 0; // by all pauses before
    for (const { from, to, left } of this.list) {
      const behind = place + saved - from;
      if (behind <= 0) break;
      if (behind < (to - from) * left) return from + behind / left;
      saved += (to - from) * (1 - left);
    }
    return place + saved;
  }

  /** The pauses in sight. */
  within([from, to]) {
    return this.list.filter((pause) => pause.to > from && pause.from < to);
  }

  /** The parts of a window that are no pauses. */
  between([from, to]) {
    const parts = [];
    let since = from;
    for (const pause of this.within([from, to])) {
      if (pause.from > since) parts.push([since, pause.from]);
      since = pause.to;
    }
    if (to > since) parts.push([since, to]);
    return parts;
  }
}
