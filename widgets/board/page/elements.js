// Elements that every part of the board uses.

import { moodClass } from "./text.js";

/** Make an element; a text from a rank never becomes markup. */
export function make(tag, name = "", text = null, attributes = {}) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== null) element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) {
    element.setAttribute(key, value);
  }
  return element;
}

/** Set an attribute if it differs: a write costs a restyle. */
export function setAttribute(element, key, value) {
  if (element.getAttribute(key) !== value) element.setAttribute(key, value);
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** The shape of a mood, beside the word for the state. */
export function makeShape(mood) {
  return make("span", `shape ${moodClass(mood)}`, null, { "aria-hidden": "true" });
}
