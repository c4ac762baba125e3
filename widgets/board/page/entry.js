// The places of boards: a widget's view, or the HTML of an output.

const DOCKED = ".jupyterlab-sidecar"; // the panel that dock.py opens

/** The first element with the class `name` in one that a selector finds. */
function homeIn(selector, name) {
  return [...document.getElementsByClassName(name)].find((home) => home.closest(selector));
}

/** Scroll to a line of a cell and highlight it, if the notebook of the board has it. */
function goToLine(element, source, name) {
  const found = /^cell (\d+) line (\d+)$/.exec(source ?? "");
  // The board of the bar stands beside the notebook's cells, a docked one elsewhere.
  const panel = element.getRootNode().host?.closest(".jp-NotebookPanel");
  const notebook =
    element.closest(".jp-Notebook") ??
    panel?.querySelector(".jp-Notebook") ??
    homeIn(".jp-Notebook", name)?.closest(".jp-Notebook");
  if (!found || !notebook) return;
  const prompts = [...notebook.querySelectorAll(".jp-InputPrompt")];
  const prompted = (text) => prompts.find((one) => one.textContent.trim() === text);
  const last = Math.max(...prompts.map((one) => parseInt(one.textContent.slice(1)) || 0));
  // The cell that runs has no number yet, and comes before those that wait for it.
  const running = Number(found[1]) > last ? prompted("[*]:") : undefined;
  const cell = (prompted(`[${found[1]}]:`) ?? running)?.closest(".jp-Cell");
  if (!cell) return;
  const line = cell.querySelectorAll(".cm-line")[Number(found[2]) - 1] ?? cell;
  line.scrollIntoView({ block: "nearest" });
  line.animate(
    [{ background: "color-mix(in srgb, var(--jp-warn-color1) 45%, transparent)" }, {}],
    { duration: 1800, easing: "ease-out" },
  );
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
  const hangs = new Map(); // element in the output of a cell that hangs → its bar
  let bar = null;
  const unpin = () => {
    model.set("pinned", false);
    model.save_changes();
  };
  const pin = () => {
    // A panel that is closed, or behind another, keeps nothing in sight.
    const docked = homeIn(DOCKED, name)?.checkVisibility() ?? false;
    const pinned = model.get("pinned") && !docked;
    if (pinned && !bar) bar = new Bar(store, unpin);
    else if (!pinned) bar = void bar?.destroy();
    bar?.place(homeIn(".jp-NotebookPanel", name));
  };
  const sight = new IntersectionObserver(pin);
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
      if (home.closest(DOCKED)) sight.observe(home);
    }
    homeless.forEach((board) => board.destroy());
    for (const [home, one] of hangs) {
      if (!home.isConnected) one.destroy();
      if (!home.isConnected) hangs.delete(home);
    }
    for (const home of document.getElementsByClassName(`${name}-hang`)) {
      if (hangs.has(home)) continue;
      for (const child of home.children) child.hidden = true;
      hangs.set(home, new Bar(store));
      home.append(hangs.get(home).element);
    }
    pin();
  };
  // Together with the page's own changes, before they are painted.
  const watcher = new MutationObserver(settle);
  watcher.observe(document.body, { childList: true, subtree: true });
  settle();
  model.on("change:pinned", pin);
  return () => {
    watcher.disconnect();
    sight.disconnect();
    model.off("change:pinned", pin);
    bar?.destroy();
    for (const [home, board] of [...homes, ...hangs]) {
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
