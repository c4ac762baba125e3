// The places of boards: a widget's view, or the HTML of an output.

/** Scroll to a line of a cell and highlight it, if the notebook has it. */
function goToLine(element, source) {
  const found = /^cell (\d+) line (\d+)$/.exec(source ?? "");
  // The board of the bar stands beside the notebook's cells.
  const panel = element.getRootNode().host?.closest(".jp-NotebookPanel");
  const notebook = element.closest(".jp-Notebook") ?? panel?.querySelector(".jp-Notebook");
  if (!found || !notebook) return;
  for (const prompt of notebook.querySelectorAll(".jp-InputPrompt")) {
    if (prompt.textContent.trim() !== `[${found[1]}]:`) continue;
    const cell = prompt.closest(".jp-Cell");
    const line = cell.querySelectorAll(".cm-line")[Number(found[2]) - 1] ?? cell;
    line.scrollIntoView({ block: "nearest" });
    line.animate(
      [{ background: "color-mix(in srgb, var(--jp-warn-color1) 45%, transparent)" }, {}],
      { duration: 1800, easing: "ease-out" },
    );
    return;
  }
}

/**
 * Keep a live board in each element of a class, as elements are added and removed.
 *
 * The output of a cell is HTML with the last state, so that every viewer of a saved
 * notebook shows it; a page with a kernel shows the live board in its place. (The
 * output of a widget would be "model not found" there.)
 */
function inhabit(store, model) {
  const name = model.get("name");
  const homes = new Map(); // element → board
  let bar = null;
  const unpin = () => {
    model.set("pinned", false);
    model.save_changes();
  };
  const pin = () => {
    const pinned = model.get("pinned");
    if (pinned && !bar) bar = new Bar(store, unpin);
    else if (!pinned) bar = void bar?.destroy();
    bar?.place(document.getElementsByClassName(name)[0]);
  };
  const settle = () => {
    const gone = [...homes.keys()].filter((home) => !home.isConnected);
    const homeless = gone.map((home) => homes.get(home));
    gone.forEach((home) => homes.delete(home));
    for (const home of document.getElementsByClassName(name)) {
      if (homes.has(home)) continue;
      for (const child of home.children) child.hidden = true;
      // An output whose HTML is replaced keeps its board.
      const board = homeless.pop() ?? new Board(store);
      board.moveTo(home);
      homes.set(home, board);
    }
    homeless.forEach((board) => board.destroy());
    pin();
  };
  // Together with the page's own changes, before they are painted.
  const watcher = new MutationObserver(settle);
  watcher.observe(document.body, { childList: true, subtree: true });
  settle();
  model.on("change:pinned", pin);
  return () => {
    watcher.disconnect();
    model.off("change:pinned", pin);
    bar?.destroy();
    for (const [home, board] of homes) {
      board.destroy();
      for (const child of home.children) child.hidden = false;
    }
  };
}

const stores = new Map(); // the board's name → its store

function storeOf(model) {
  const name = model.get("name");
  if (!stores.has(name)) stores.set(name, new Store(model));
  return stores.get(name);
}

export default {
  initialize({ model }) {
    const store = storeOf(model);
    const leave = inhabit(store, model);
    return () => {
      leave();
      store.end();
      stores.delete(model.get("name"));
    };
  },
  render({ model, el }) {
    const board = new Board(storeOf(model));
    el.append(board.element);
    return () => board.destroy();
  },
};
