// The box beside what the pointer or the keys are at on a picture.

import { make } from "./elements.js";

export class Tip {
  /** `attributes` are those of the box: whether a screen reader reads it. */
  constructor(attributes) {
    this.element = make("div", "tip", null, attributes);
    this.hide();
  }

  hide() {
    this.element.hidden = true;
  }

  /** Show a title and facts at a place of the window. */
  show(title, facts, { x, y }) {
    this.element.hidden = false;
    this.element.replaceChildren(make("b", "", title), ...facts.map((fact) => make("div", "", fact)));
    const home = this.element.parentElement;
    const box = home.getBoundingClientRect();
    // Above the place where there is no room below: outputs are cut off there.
    const end = home.parentElement.getBoundingClientRect().bottom;
    const below = y + 16 + this.element.offsetHeight <= end;
    const room = box.width - this.element.offsetWidth - 4;
    this.element.style.left = `${Math.max(0, Math.min(x - box.left + 14, room))}px`;
    this.element.style.top = `${y - box.top + (below ? 16 : -8 - this.element.offsetHeight)}px`;
  }
}
