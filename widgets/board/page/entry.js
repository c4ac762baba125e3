// The places of boards: a widget's view, or the HTML of an output.

import { Bar } from "./bar.js";
import { Board } from "./board.js";
import { homeIn } from "./places.js";
import { Store } from "./store.js";

const DOCKED = ".jupyterlab-sidecar"; // the panel that dock.py opens
const SETTLED = 1_000; // ms in which the bar in the output of a cell that hangs comes

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
  const hangs = new Map(); // element in the output of a cell that hangs → {cell, one}: its bar
  const seen = new Set(); // the elements of both that are in sight
  let bar = null;
  let alarm = false; // a cell hangs, and nobody has removed the bar since
  let timer = 0;
  const unpin = () => {
    alarm = false;
    if (!model.get("pinned")) return pin();
    model.set("pinned", false);
    model.save_changes();
  };
  const pin = () => {
    // A panel that is closed, or behind another, keeps nothing in sight.
    const docked = homeIn(DOCKED, name)?.checkVisibility() ?? false;
    const pinned = model.get("pinned") && !docked;
    // What a cell prints pushes the bar in its output far down.
    const unseen = alarm && ![...seen].some((home) => home.isConnected);
    if (!pinned && !unseen) {
      const gone = bar;
      bar = void bar?.destroy();
      passFocus(gone, document.querySelector(".jp-Notebook .jp-Cell.jp-mod-active"));
    } else bar ??= new Bar(store, unpin);
    bar?.place(homeIn(".jp-NotebookPanel", name));
  };
  const sound = () => {
    clearTimeout(timer);
    const set = () => {
      alarm = model.get("hangs");
      pin();
    };
    if (model.get("hangs")) timer = setTimeout(set, SETTLED);
    else set();
  };
  /** The focus would fall to the page: what comes next is Rebuild, if it is in sight. */
  const passFocus = (gone, cell) => {
    if (!gone?.focus.target) return;
    const board = [...homes.values()].find(({ visible }) => visible);
    (board?.buttons.of("Rebuild") ?? cell)?.focus({ preventScroll: true });
  };
  const sight = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) seen.add(target);
      else seen.delete(target);
    }
    pin();
  });
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
      board.element.classList.toggle("docked", home.closest(DOCKED) !== null);
      homes.set(home, board);
      sight.observe(home);
    }
    homeless.forEach((board) => board.destroy());
    const unused = new Map(); // cell → the bar of an output that is gone
    for (const [home, { cell, one }] of hangs) {
      if (home.isConnected) continue;
      unused.set(cell, one);
      hangs.delete(home);
    }
    for (const home of document.getElementsByClassName(`${name}-hang`)) {
      if (hangs.has(home)) continue;
      for (const child of home.children) child.hidden = true;
      const cell = home.closest(".jp-Cell");
      // Why the cell hangs has changed: a question in the bar is open still.
      const one = unused.get(cell) ?? new Bar(store);
      unused.delete(cell);
      hangs.set(home, { cell, one });
      one.moveTo(home);
      sight.observe(home);
    }
    for (const [cell, one] of unused) {
      one.destroy();
      passFocus(one, cell);
    }
    pin();
  };
  // Together with the page's own changes, before they are painted.
  const watcher = new MutationObserver(settle);
  watcher.observe(document.body, { childList: true, subtree: true });
  settle();
  sound();
  model.on("change:pinned", pin);
  model.on("change:hangs", sound);
  return () => {
    clearTimeout(timer);
    watcher.disconnect();
    sight.disconnect();
    model.off("change:pinned", pin);
    model.off("change:hangs", sound);
    bar?.destroy();
    const bars = [...hangs].map(([home, { one }]) => [home, one]);
    for (const [home, board] of [...homes, ...bars]) {
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
