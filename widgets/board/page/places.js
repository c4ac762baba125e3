// Places in the notebook: where the board stands, and the lines it names.

/** The first element with the class `name` in one that a selector finds. */
export function homeIn(selector, name) {
  return [...document.getElementsByClassName(name)].find((home) => home.closest(selector));
}

/**
 * Scroll to a line of a cell and highlight it; return whether the notebook of the board
 * has it: a cell that ran again has another number.
 */
export function goToLine(element, source, name) {
  const found = /^cell (\d+) line (\d+)(?: in .+)?$/.exec(source ?? "");
  // The board of the bar stands beside the notebook's cells, a docked one elsewhere.
  const panel = element.getRootNode().host?.closest(".jp-NotebookPanel");
  const notebook =
    element.closest(".jp-Notebook") ??
    panel?.querySelector(".jp-Notebook") ??
    homeIn(".jp-Notebook", name)?.closest(".jp-Notebook");
  if (!found || !notebook) return false;
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
