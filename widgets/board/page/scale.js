// The scale of the timeline: from times to pixels and back. Nothing here draws.

export const GUTTER = 96; // px for the names of the lanes
export const STEP = 1.4; // the factor of one zoom step
export const NEAREST = 2_000; // ns; the highest zoom

/** The place of a time; `window` is [from, to] and `width` that of the picture. */
export function xOf([from, to], width, time) {
  return GUTTER + ((time - from) / (to - from)) * (width - GUTTER);
}

export function timeAt([from, to], width, x) {
  return from + ((x - GUTTER) / (width - GUTTER)) * (to - from);
}

/** In which part of a window a time is, from 0 to 1 in it. */
export function partAt([from, to], time) {
  return (time - from) / (to - from);
}

/** A window that is `factor` times as long; what is at the part `at` of it stays there. */
export function zoomed([from, to], factor, at = 0.5) {
  const span = Math.max(NEAREST, (to - from) * factor);
  const middle = from + (to - from) * at;
  return [middle - span * at, middle + span * (1 - at)];
}

/** A window that has moved by a part of its length. */
export function panned([from, to], part) {
  const by = (to - from) * part;
  return [from + by, to + by];
}

/** The distance of ticks: 1, 2 or 5 times a power of ten, some 90 px apart. */
export function tickStep(span, room) {
  const least = (span * 90) / Math.max(1, room);
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((times) => times * power).find((step) => step >= least);
}

/** The ticks of a window at a distance. */
export function ticks([from, to], step) {
  const found = [];
  for (let time = Math.ceil(from / step) * step; time <= to; time += step) {
    found.push(time);
  }
  return found;
}

/**
 * A time after the first op; of the first second in the unit for the distance of ticks:
 * 181954 ms is hard to read.
 */
export function tickText(time, step, last) {
  const [unit, size] = [["s", 1e9], ["ms", 1e6], ["µs", 1e3]].find(
    ([name, ns]) => step >= ns / 10 || (name === "s" && last >= ns) || name === "µs",
  );
  const digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
  return `${(time / size).toFixed(digits)} ${unit}`;
}
