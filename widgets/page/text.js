// Words and elements: what every part of the board builds with.

/** How long something has been going on; the same words as `elapsed_text`. */
function elapsedText(seconds) {
  if (seconds < 10) {
    return `${(Math.floor(Math.max(0, seconds) * 10) / 10).toFixed(1)} s`;
  }
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

/** A duration in ns with three digits that count; as `duration_text`. */
function durationText(ns) {
  for (const [unit, size] of [["ns", 1], ["µs", 1e3], ["ms", 1e6], ["s", 1e9]]) {
    const value = ns / size;
    if (value < 999.5 || unit === "s") {
      const digits = unit === "ns" || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
      return `${value.toFixed(digits)} ${unit}`;
    }
  }
}

/** An element; text becomes text, never markup, whatever a rank has sent. */
function make(tag, name = "", text = null, attributes = {}) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== null) element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) {
    element.setAttribute(key, value);
  }
  return element;
}

/** Set an attribute if it is not so already: writing costs a restyle. */
function put(element, key, value) {
  if (element.getAttribute(key) !== value) element.setAttribute(key, value);
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const MOODS = new Set(["calm", "busy", "working", "warning", "error"]);

/** A mood as a class; one that nobody knows is none. */
function moodClass(mood) {
  return MOODS.has(mood) ? mood : "calm";
}

/** The shape that stands for a mood, beside the word that says it. */
function makeShape(mood) {
  return make("span", `shape ${moodClass(mood)}`, null, { "aria-hidden": "true" });
}

function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}
