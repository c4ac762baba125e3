// The banner: what the state is, in a sentence, and what else is to say.

import { make, makeShape, setAttribute, setText } from "./elements.js";
import { withPlaces } from "./links.js";
import { moodClass } from "./text.js";

/** The picture of who waits for whom, in a part that opens and closes. */
export function makeWaitGraph() {
  const element = make("details", "wait-graph");
  const drawing = make("div");
  element.append(make("summary", "", "Who waits for whom"), drawing);
  let drawn = null;
  let opened = false;
  return {
    element,
    show(picture = "", opens = false) {
      element.hidden = !picture;
      // Made by wait_shapes.py, with all names escaped: no text of a rank is markup in it.
      if (picture !== drawn) drawing.innerHTML = drawn = picture;
      // As the user has left it, until another kind of picture comes.
      if (picture && opens !== opened) element.open = opened = opens;
    },
  };
}

/** `goTo(place)` is called where a place in a sentence is pressed. */
export function makeBanner(dismiss, goTo) {
  const element = make("div", "banner calm");
  const shape = makeShape("calm");
  const title = make("b");
  const text = make("span", "said");
  const line = make("p");
  line.append(title, " ", text);
  const more = make("div", "more");
  const said = make("div", "", null, { role: "status", tabindex: "-1" });
  said.append(line, more);
  const graph = makeWaitGraph();
  const hang = make("p", "last quiet");
  const over = make("span");
  const away = make("button", "small", "Dismiss", { type: "button" });
  away.addEventListener("click", () => {
    // The button goes, and the focus would fall to the page.
    said.focus();
    dismiss();
  });
  hang.append(over, " ", away);
  const words = make("div", "words");
  words.append(said, graph.element, hang);
  element.append(shape, words);
  let shown = null;
  let told = null;
  return {
    element,
    show({ mood, title: name, text: sentence, more: others, last, picture, opens }) {
      const sentences = [sentence, ...others];
      graph.show(picture, opens);
      hang.hidden = !last;
      if (last !== told) over.replaceChildren(...withCode((told = last) ?? "", goTo));
      setAttribute(element, "class", `banner ${moodClass(mood)}`);
      setAttribute(shape, "class", `shape ${moodClass(mood)}`);
      // A screen reader reads a live region when it is written: write changes only.
      setText(title, name);
      const all = sentences.join("\n");
      if (all === shown) return;
      shown = all;
      text.replaceChildren(...withCode(sentences[0] ?? "", goTo));
      more.replaceChildren();
      for (const sentence of sentences.slice(1)) {
        const next = make("p");
        next.append(...withCode(sentence, goTo));
        more.append(next);
      }
    },
  };
}

/** Return nodes for a text, with the parts between backticks as code. */
function withCode(text, goTo) {
  return text
    .split("`")
    .flatMap((part, place) => (place % 2 ? make("code", "", part) : withPlaces(part, goTo)));
}
