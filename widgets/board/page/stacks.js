// Where the ranks are: their stacks now, or a flame graph of some seconds.
//
// While a cell runs the kernel is busy, and %dist_profile waits for the cell's end.

import { make, setAttribute, setText } from "./elements.js";
import { withPlaces } from "./links.js";

const SAMPLED = 5; // s of a flame graph
const TALLEST = 310; // px of a flame graph before it scrolls
// A frame of another origin alone knows how high it is.
const TELL_HEIGHT =
  "<script>new ResizeObserver(() => parent.postMessage(document.documentElement.offsetHeight, '*'))" +
  ".observe(document.body)</script>";

export class Stacks {
  constructor(board) {
    this.board = board;
    this.element = make("div", "stacks", null, {
      role: "region",
      "aria-label": "where the ranks are",
    });
    this.element.hidden = true;
    this.title = make("b", "grow facts");
    this.again = this.button("Again", () => this.ask());
    this.sample = this.button(`Sample ${SAMPLED} s`, () => this.ask(SAMPLED));
    setAttribute(
      this.sample,
      "title",
      `Look at every rank 100 times a second for ${SAMPLED} s, while its cell runs.`,
    );
    const tools = make("div", "tools");
    tools.append(this.title, this.again, this.sample, this.button("Close", () => this.close()));
    // The stack of a rank that holds many calls has a scrollbar, and keys for it.
    this.shown = make("div", "shown", null, { tabindex: "0" });
    this.element.append(tools, this.shown);
  }

  button(label, press) {
    const button = make("button", "small", label, { type: "button" });
    button.addEventListener("click", press);
    return button;
  }

  /** Without ranks or kernel there is nothing to look at; what was seen remains. */
  update() {
    const able = this.board.store.live && !this.asking;
    this.again.disabled = this.sample.disabled = !able;
    setText(this.sample, this.asking === SAMPLED ? "Sampling…" : `Sample ${SAMPLED} s`);
  }

  ask(seconds = 0) {
    this.asking = seconds || true;
    this.update();
    this.board.store.request("profile", { seconds }, (answer) => {
      this.asking = false;
      this.update();
      if (answer.ok) this.show(answer);
      else this.board.showOutcome(answer.text, false);
    });
  }

  show({ title, stacks, page }) {
    setText(this.title, title);
    this.shown.replaceChildren(stacks === undefined ? this.frame(page) : this.text(stacks));
    this.shown.scrollTop = 0;
    this.element.hidden = false;
  }

  text(stacks) {
    const text = make("pre");
    text.append(...withPlaces(stacks, (line) => this.board.goTo(line)));
    return text;
  }

  /** A page of its own: the picture has a script, which a shadow root would not run. */
  frame(page) {
    const frame = make("iframe", "", null, { sandbox: "allow-scripts", title: "flame graph" });
    const style = getComputedStyle(this.board.body);
    const value = (name) => style.getPropertyValue(name).trim();
    const dark = isDark();
    const look =
      `color-scheme: ${dark ? "dark" : "light"}; color: ${value("--rs-fg")};` +
      `--jp-layout-color0: ${value("--rs-ground")}; background: ${value("--rs-ground")}`;
    frame.srcdoc = `<!doctype html><html data-jp-theme-light="${!dark}" style="${look}">${page}${TELL_HEIGHT}`;
    const fit = ({ source, data }) => {
      if (!frame.isConnected) window.removeEventListener("message", fit);
      else if (source === frame.contentWindow) frame.height = Math.min(data, TALLEST);
    };
    window.addEventListener("message", fit);
    return frame;
  }

  close() {
    this.board.actions.querySelector("button").focus();
    this.element.hidden = true;
    this.shown.replaceChildren();
  }
}

/** Whether the page has a dark theme. */
function isDark() {
  const { classList, dataset } = document.body;
  if (dataset.jpThemeLight) return dataset.jpThemeLight === "false";
  if (classList.contains("vscode-dark")) return true;
  if (classList.contains("vscode-light")) return false;
  return window.matchMedia("(prefers-color-scheme: dark)").matches;
}
