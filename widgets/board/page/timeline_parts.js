// What stands around the picture of the timeline: buttons, legend, keys.

import { make, setAttribute } from "./elements.js";

const BUTTONS = [
  ["every", "All groups", "show the lanes of every group"],
  ["ranks", "All ranks", "show the lanes of every rank (o: of one group)"],
  ["stats", "Statistics", "of the ops in sight (s)"],
  ["pauses", "Pauses", "show pauses between ops at their length (p)"],
  ["out", "−", "zoom out (−)"],
  ["in", "+", "zoom in (+)"],
  ["last", "Last", "show what was last (0)"],
  ["all", "All", "show everything there is (a)"],
  ["export", "Export", "save as a Perfetto trace (JSON)"],
];
const SWITCHES = ["every", "ranks", "stats", "pauses"];
const LEGEND = [
  ["waits", "waits for the last rank"],
  ["runs", "all ranks are in"],
  ["flight", "in flight, waits"],
  ["stuck", "in flight, all ranks are in"],
  ["missing", "not entered"],
  ["held", "not entered: waits in another op"],
  ["failed", "failed or aborted"],
  ["message", "from a send to its receive; dashed: not issued"],
];
const KEYS =
  "Keys: arrows go from op to op, Shift ← → move, + − zoom, 0 shows what was last, a everything, " +
  "o opens ranks, s statistics, p pauses. Drag to move, with Shift to zoom in.";

/** The line above, with its buttons by name; `acts` are what they do. */
export function makeTools(acts) {
  const tools = make("div", "tools");
  const summary = make("span", "grow quiet");
  tools.append(summary);
  const buttons = {};
  for (const [key, label, about] of BUTTONS) {
    const button = make("button", "small", label, { type: "button", title: about });
    if (label.length === 1) setAttribute(button, "aria-label", about);
    if (SWITCHES.includes(key)) setAttribute(button, "aria-pressed", "false");
    button.addEventListener("click", acts[key]);
    tools.append(button);
    buttons[key] = button;
  }
  return { tools, summary, buttons };
}

/** The lines below, and the items of the legend by name. */
export function makeLegend() {
  const colours = make("div", "legend quiet");
  const items = {};
  for (const [name, about] of LEGEND) {
    items[name] = make("span");
    items[name].append(make("i", name, null, { "aria-hidden": "true" }), about);
    colours.append(items[name]);
  }
  return { legend: [colours, make("div", "quiet", KEYS)], items };
}

export function saveFile(name, text, type) {
  const link = make("a", "", null, { download: name });
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
