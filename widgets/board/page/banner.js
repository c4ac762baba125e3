// The banner: what the state is, in a sentence, and what else is to say.

import { make, makeShape, setAttribute, setText } from "./elements.js";
import { moodClass } from "./text.js";

export function makeBanner(dismiss) {
  const element = make("div", "banner calm");
  const shape = makeShape("calm");
  const title = make("b");
  const text = make("span", "said");
  const line = make("p");
  line.append(title, " ", text);
  const more = make("div", "more");
  const words = make("div", "words", null, { role: "status" });
  words.append(line, more);
  const hang = make("p", "last quiet");
  const over = make("span");
  const away = make("button", "small", "Dismiss", { type: "button" });
  away.addEventListener("click", dismiss);
  hang.append(over, " ", away);
  words.append(hang);
  element.append(shape, words);
  let shown = null;
  return {
    element,
    show(mood, name, sentences, last) {
      hang.hidden = !last;
      setText(over, (last ?? "").replaceAll("`", ""));
      setAttribute(element, "class", `banner ${moodClass(mood)}`);
      setAttribute(shape, "class", `shape ${moodClass(mood)}`);
      // A screen reader reads a live region when it is written: write changes only.
      setText(title, name);
      const said = sentences.join("\n");
      if (said === shown) return;
      shown = said;
      text.replaceChildren(...withCode(sentences[0] ?? ""));
      more.replaceChildren();
      for (const sentence of sentences.slice(1)) {
        const next = make("p");
        next.append(...withCode(sentence));
        more.append(next);
      }
    },
  };
}

/** Return nodes for a text, with the parts between backticks as code. */
function withCode(text) {
  return text.split("`").map((part, place) => (place % 2 ? make("code", "", part) : part));
}
