// Places in texts, "cell 28 line 4", as buttons that light the line in the notebook.

import { make } from "./elements.js";

const PLACE = /cell \d+ line \d+/;
// No line of text ends within these: a place with its brackets, "ranks 0–1".
const WHOLE = /([^\s]*cell \d+ line \d+[^\s]*|\branks? \d+(?:–\d+)?|\b\d+–\d+)/;

/** Whether a text is a place, and nothing else. */
export function isPlace(text) {
  return PLACE.exec(text)?.[0] === text;
}

/** Return nodes for a text; `goTo(place)` is called where a place is pressed. */
export function withPlaces(text, goTo) {
  return text.split(WHOLE).map((part, place) => {
    if (place % 2 === 0) return part;
    const [line] = PLACE.exec(part) ?? [];
    if (!line) return make("span", "whole", part);
    const link = make("button", "place", line, { type: "button" });
    link.addEventListener("click", () => goTo(line));
    const [before, after] = part.split(line);
    const whole = make("span", "whole");
    whole.append(before, link, after);
    return whole;
  });
}
