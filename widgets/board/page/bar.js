// The board as a bar with the state, the verdict and Abort: in the output of a cell that
// hangs; and in sight wherever the notebook is scrolled to, where it is pinned, or where
// nothing else of the board is in sight while a cell hangs. It opens the whole board above
// itself.

import { OUTCOME_SHOWN, makeActions } from "./actions.js";
import { makeWaitGraph } from "./banner.js";
import { Board } from "./board.js";
import { make, makeShape, setAttribute, setText } from "./elements.js";
import { makeHost, noteFocus } from "./host.js";
import { withPlaces } from "./links.js";
import { goToLine } from "./places.js";
import { moodClass } from "./text.js";

export class Bar {
  /** `unpin` removes a pinned one; without it the bar is that of a cell. */
  constructor(store, unpin = null) {
    this.store = store;
    this.unpin = unpin;
    this.build();
    store.open(this);
    this.draw();
  }

  build() {
    const [name, label] = this.unpin
      ? ["rankscope-bar", "Rankscope board, pinned"]
      : ["rankscope-hang", "why this cell hangs"];
    const { element, body } = makeHost(name, label, this.store.model.get("styles"));
    this.element = element;
    this.body = body;
    this.drawer = make("div", "drawer");
    this.past = make("p", "", "This cell has ended. While it hung:");
    this.shape = makeShape("calm");
    this.title = make("b");
    this.text = make("span", this.unpin ? "grow facts" : "grow");
    this.news = make("span", "grow facts", null, { role: "status" });
    this.actions = make("span", "actions");
    this.opener = make("button", "small", "Board", { type: "button", "aria-expanded": "false" });
    this.opener.addEventListener("click", () => this.unfold());
    this.buttons = makeActions(this, ["Abort"]);
    const line = make("div", "line", null);
    line.append(this.shape, this.title, this.text, this.news, this.actions, this.opener);
    if (this.unpin) {
      const name = this.store.model.get("pinned") ? "Unpin" : "Hide";
      const away = make("button", "small", name, { type: "button" });
      setAttribute(away, "title", "Remove this bar; the board stays below its cell.");
      away.addEventListener("click", () => this.unpin());
      line.append(away);
    }
    this.body.append(this.drawer, line);
    if (!this.unpin) {
      // A pinned one is a line: the board has the picture.
      this.graph = makeWaitGraph();
      line.append(this.graph.element);
    }
    this.focus = noteFocus(this);
    this.showOutcome("", true);
  }

  /** Where it stands: in the notebook of the board, else in the page. */
  place(home) {
    const parent = home?.closest(".jp-NotebookPanel") ?? document.body;
    if (this.element.parentElement === parent) return;
    this.element.classList.toggle("in-page", parent === document.body);
    parent.append(this.element);
  }

  /** Stand in an element of the output of a cell; keep the focus. */
  moveTo(home) {
    const { target } = this.focus;
    this.cell = Number(/rankscope-cell-(\d+)/.exec(home.className)?.[1]);
    this.element.hidden = false;
    home.prepend(this.past);
    home.append(this.element);
    this.leave();
    target?.focus({ preventScroll: true });
  }

  /**
   * Give way to the text of the output where no rank is in the cell: the kernel removes
   * the output of one that has ended, but not of a page that was loaded meanwhile. On a
   * busy machine the verdict may come before the state of the ranks.
   */
  leave() {
    if (!this.element.parentElement) return;
    const rows = [...this.store.rows.values()].flatMap((ranks) => [...ranks.values()]);
    const cells = new Set(rows.filter(({ cell }) => cell).map(({ cell }) => Number(cell)));
    // No rank may be in a cell; and the text says more than that there is no kernel.
    const ended = Math.min(...cells) > this.cell;
    const over = this.store.connection.closed || ended;
    for (const child of this.element.parentElement.children) child.hidden = !over;
    this.element.hidden = over;
    // The text is of when it did.
    this.past.hidden = !ended;
  }

  /** The group that stands first: that of the verdict. */
  tab() {
    const { groups, headline } = this.store;
    return groups.find((group) => group.id === headline.groups?.[0]) ?? groups[0];
  }

  onChange(change) {
    if (change.trouble) this.showOutcome(change.trouble, false);
    if (change.all || change.head || change.banner || change.groups) this.draw();
  }

  draw() {
    const { mood, title, text, picture, opens } = this.store.headline;
    setAttribute(this.body, "class", this.store.live ? "board" : "board over");
    setAttribute(this.shape, "class", `shape ${moodClass(mood)}`);
    setText(this.title, title);
    const said = text.replaceAll("`", "");
    if (said !== this.text.textContent) {
      this.text.replaceChildren(
        ...withPlaces(said, (line) => goToLine(this.element, line, this.store)),
      );
    }
    setAttribute(this.text, "title", said);
    this.graph?.show(picture, opens);
    if (!this.unpin) this.leave();
    // A question is about the group that it names.
    if (!this.buttons.asking()) this.buttons.update();
  }

  showOutcome(text, ok) {
    clearTimeout(this.timer);
    setText(this.news, text);
    setAttribute(this.news, "title", text);
    this.news.hidden = !text;
    this.text.hidden = Boolean(text);
    if (text) this.timer = setTimeout(() => this.showOutcome("", true), OUTCOME_SHOWN);
  }

  unfold() {
    if (this.board) {
      this.board.destroy();
      this.board = null;
    } else {
      this.board = new Board(this.store);
      this.drawer.append(this.board.element);
    }
    setAttribute(this.opener, "aria-expanded", String(Boolean(this.board)));
  }

  destroy() {
    clearTimeout(this.timer);
    this.board?.destroy();
    this.store.close(this);
    this.past.remove();
    this.element.remove();
  }
}
