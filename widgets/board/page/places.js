// Places in the notebook: where the board stands, and the lines it names.

import { make } from "./elements.js";

/** The first element with the class `name` in one that a selector finds. */
export function homeIn(selector, name) {
  return [...document.getElementsByClassName(name)].find((home) => home.closest(selector));
}

/** The letters of code that a line of the notebook has room for; 0: not known. */
export function lettersIn(name) {
  const home = homeIn(".jp-Notebook", name);
  if (!home) return 0;
  const style = getComputedStyle(home);
  const [size, family] = ["size", "family"].map((key) => style.getPropertyValue(`--jp-code-font-${key}`));
  const pen = make("canvas").getContext("2d");
  pen.font = `${size} ${family}`;
  return Math.floor(home.clientWidth / pen.measureText("0").width);
}

/**
 * Scroll to a line of a cell and highlight it; return whether the notebook of the board
 * has it: a cell that ran again has another number, and one of another notebook may have
 * that of one here.
 */
export function goToLine(element, source, store) {
  const found = /^cell (\d+) line (\d+)(?: in .+)?$/.exec(source ?? "");
  // The board of the bar stands beside the notebook's cells, a docked one elsewhere.
  const panel = element.getRootNode().host?.closest(".jp-NotebookPanel");
  const notebook =
    element.closest(".jp-Notebook") ??
    panel?.querySelector(".jp-Notebook") ??
    homeIn(".jp-Notebook", store.model.get("name"))?.closest(".jp-Notebook");
  if (!found || !notebook || !store.hasSent(source)) return false;
  const prompts = [...notebook.querySelectorAll(".jp-InputPrompt")];
  const prompted = (text) => prompts.find((one) => one.textContent.trim() === text);
  const last = Math.max(...prompts.map((one) => parseInt(one.textContent.slice(1)) || 0));
  // The cell that runs has no number yet, and comes before those that wait for it.
  const running = Number(found[1]) > last ? prompted("[*]:") : undefined;
  const cell = (prompted(`[${found[1]}]:`) ?? running)?.closest(".jp-Cell");
  if (!cell) return false;
  const line = cell.querySelectorAll(".cm-line")[Number(found[2]) - 1] ?? cell;
  line.scrollIntoView({ block: "nearest" });
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  line.animate(
    [{ background: "color-mix(in srgb, var(--jp-warn-color1) 45%, transparent)" }, {}],
    { duration: 1800, easing: still ? "step-end" : "ease-out" },
  );
  return true;
}
