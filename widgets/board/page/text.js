// Texts that every part of the board uses.

/** The time since a start; the same text as `elapsed_text` in units.py. */
export function elapsedText(seconds) {
  if (seconds < 10) {
    return `${(Math.floor(Math.max(0, seconds) * 10) / 10).toFixed(1)} s`;
  }
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

/** Rank sets; the same text as `name_ranks` in rank_sets.py. */
export function nameRanks(ranks) {
  const runs = [];
  for (const rank of [...ranks].sort((a, b) => a - b)) {
    if (runs.length && rank === runs.at(-1)[1] + 1) runs.at(-1)[1] = rank;
    else runs.push([rank, rank]);
  }
  const parts = runs.map(([first, last]) => (first === last ? first : `${first}–${last}`));
  return `rank${ranks.length === 1 ? "" : "s"} ${parts.join(", ")}`;
}

/** The ranks of a group in a few letters: "0–7", or "1,5…61"; as in the names of tabs. */
export function shortRanks(ranks) {
  const step = ranks[1] - ranks[0];
  const even = ranks.every((rank, place) => rank === ranks[0] + place * step);
  if (ranks.length > 3 && step !== 1 && even) return `${ranks[0]},${ranks[1]}…${ranks.at(-1)}`;
  return ranks.length ? nameRanks(ranks).replace(/^ranks? /, "").replaceAll(", ", ",") : "";
}

/** A duration in ns with three significant digits; as `duration_text`. */
export function durationText(ns) {
  for (const [unit, size] of [["ns", 1], ["µs", 1e3], ["ms", 1e6], ["s", 1e9]]) {
    const value = ns / size;
    if (value < 999.5 || unit === "s") {
      const digits = unit === "ns" || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
      return `${value.toFixed(digits)} ${unit}`;
    }
  }
}

const NAME = 28; // letters of the name of a group

/** A long name of a group: its beginning, and its end, in which such names differ. */
export function shortName(name) {
  return name.length > NAME ? `${name.slice(0, 12)}…${name.slice(13 - NAME)}` : name;
}

const MOODS = new Set(["calm", "busy", "working", "warning", "error"]);

/** A mood as a class; an unknown one counts as calm. */
export function moodClass(mood) {
  return MOODS.has(mood) ? mood : "calm";
}

export function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}
