// Hosts: the elements that board and bar live in.

import { make, setAttribute } from "./elements.js";

const NO_SHORTCUTS = "data-lm-suppress-shortcuts";

/** Make a host and the section in its shadow root.

A shadow root: the page's styles for outputs do not apply inside, ours not outside. */
export function makeHost(name, label, styles) {
  const element = make("div", `${name} rankscope-host`);
  setAttribute(element, NO_SHORTCUTS, "true");
  watchKeys();
  const root = element.attachShadow({ mode: "open" });
  const body = make("section", "board", null, { "aria-label": label });
  root.append(make("style", "", styles), body);
  return { element, body };
}

/** Note which element of a host has the focus, or had it as the host left the page. */
export function noteFocus({ element, body }) {
  const noted = { target: null };
  body.addEventListener("focusin", (event) => (noted.target = event.target));
  body.addEventListener("focusout", () => {
    // While it is taken away, it still counts as connected.
    setTimeout(() => {
      if (element.isConnected) noted.target = body.getRootNode().activeElement;
    });
  });
  return noted;
}

/** Leave keys with Ctrl or ⌘ to JupyterLab ("save"), and no others: "d d" deletes the
cell. JupyterLab looks at an attribute of the element when a key comes to the document,
so that it is written before, at the window. */
function watchKeys() {
  if (window.rankscopeWatchesKeys) return;
  window.rankscopeWatchesKeys = true;
  window.addEventListener(
    "keydown",
    (event) => {
      const host = event.target.closest?.(".rankscope-host");
      if (!host) return;
      if (event.ctrlKey || event.metaKey) host.removeAttribute(NO_SHORTCUTS);
      else setAttribute(host, NO_SHORTCUTS, "true");
    },
    true,
  );
}
