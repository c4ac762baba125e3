"""A flame graph of ranks as HTML that needs nothing else: calls below their callers.

Boxes lie in the boxes of their callers, and their widths are parts of those: to zoom
is to hide the others, and without the script, on a page that is not trusted, the
whole picture remains, with its tooltips.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from rankscope.backends.rank_sets import name_ranks

__all__ = ["Box", "flame_graph"]

#: The part of a rank's time below which a call is left out, and the most boxes.
LEAST = 0.002
MOST = 3000
#: A call is uneven if the rank with the least time has less than this part of the most.
UNEVEN = 0.8
#: Ranks that have a field each in the strip of an uneven call.
STRIPS = 64

_KINDS = {
    "own": "your code",
    "op": "ops",
    "library": "libraries",
}


@dataclass
class Box:
    """A call, the seconds that each rank spent in it, and what it called.

    `kind` is ``"root"``, ``"own"``, ``"op"``, ``"library"`` or ``"idle"``; ``"line"``
    is no call, but a line of the user's function whose box it is in.
    """

    label: str
    about: str
    kind: str
    seconds: list[float]
    calls: dict[tuple[str, str], Box] = field(default_factory=dict)

    def inside(self, label: str, about: str, kind: str) -> Box:
        """Return the box of a call from here, which is made if there is none."""
        key = label, about
        if key not in self.calls:
            self.calls[key] = Box(label, about, kind, [0.0] * len(self.seconds))
        return self.calls[key]


def flame_graph(
    title: str,
    root: Box,
    ranks: Sequence[int],
    seconds: float,
    notes: Sequence[str] = (),
) -> str:
    """Return the picture of `root`, whose seconds are those of `ranks`.

    `notes` stand below it; `seconds` is the time of the sampling.
    """
    least = _least(root, LEAST * seconds)
    choices = "".join(
        f'<option value="{place}">rank {rank}</option>'
        for place, rank in enumerate(ranks)
    )
    everyone = f'<option value="">{escape(name_ranks(ranks))}</option>'
    legend = "".join(
        f'<span class="{kind}"></span>{about}' for kind, about in _KINDS.items()
    )
    strip = (
        '<span class="uneven"></span>strip: the ranks with most of it'
        if len(ranks) > 1
        else ""
    )
    shown = "".join(f"<p>{escape(note)}</p>" for note in notes if note)
    return (
        f'<div class="rankscope-flame">{_STYLE}<p class="head"><b>{escape(title)}'
        '</b><label class="live">show <select aria-label="ranks">'
        f"{everyone}{choices}</select></label>"
        '<button type="button" class="live whole" disabled>Zoom out</button></p>'
        f'<p class="legend">{legend}{strip}</p>'
        f'<div class="graph">{_box(root, 100.0, ranks, least)}</div>'
        '<p class="detail live" aria-live="polite">&nbsp;</p>'
        f"{shown}<script>{_SCRIPT}</script></div>"
    )


def _least(root: Box, least: float) -> float:
    """Return the seconds below which calls are left out, so that `MOST` remain."""
    found, pending = [], [root]
    while pending:
        box = pending.pop()
        found.append(max(box.seconds))
        pending += box.calls.values()
    found.sort(reverse=True)
    return max(least, found[MOST]) if len(found) > MOST else least


def _box(box: Box, width: float, ranks: Sequence[int], least: float) -> str:
    total = sum(box.seconds)
    calls = sorted(
        (one for one in box.calls.values() if max(one.seconds) >= least),
        key=lambda one: -sum(one.seconds),
    )
    inside = "".join(
        _box(one, 100 * sum(one.seconds) / total, ranks, least) for one in calls
    )
    spent = ",".join(f"{one:.3g}" for one in box.seconds)
    about = escape(f"{box.about}\n{_by_rank(box.seconds, ranks)}", quote=True)
    strip = _strip(box.seconds) if box.kind not in ("root", "idle") else ""
    return (
        f'<div class="node" style="width:{width:.3f}%" data-s="{spent}">'
        f'<button type="button" class="{box.kind}" title="{about}">'
        f"{escape(box.label)}{strip}</button>"
        + (f'<div class="calls">{inside}</div>' if inside else "")
        + "</div>"
    )


def _by_rank(seconds: Sequence[float], ranks: Sequence[int]) -> str:
    """Return ``0.1 s on rank 0 · 4.9 s on ranks 1–3``."""
    ranks_of: dict[str, list[int]] = {}
    for rank, spent in zip(ranks, seconds, strict=True):
        if spent < 0.05 <= max(seconds):
            continue
        ranks_of.setdefault(f"{spent:.1f} s", []).append(rank)
    return " · ".join(f"{text} on {name_ranks(of)}" for text, of in ranks_of.items())


def _strip(seconds: Sequence[float]) -> str:
    """Return a field for each rank, the darker the longer it was there."""
    most = max(seconds)
    if not 1 < len(seconds) <= STRIPS or min(seconds) >= UNEVEN * most:
        return ""
    fields = "".join(f'<i style="opacity:{one / most:.2f}"></i>' for one in seconds)
    return f'<span class="strip">{fields}</span>'


_STYLE = """\
<style>
.rankscope-flame {
  --own: #a8d1f5; --op: #ffcb91; --library: #dde2e7; --ink: #15202b; --idle: #eef0f2;
  --strip: #22303d; font-family: var(--jp-ui-font-family, system-ui, sans-serif);
  font-size: var(--jp-ui-font-size1, 13px); line-height: 1.45;
}
@media (prefers-color-scheme: dark) {
  html:not(:has([data-jp-theme-light="true"])) .rankscope-flame {
    --own: #24527a; --op: #7a4a12; --library: #3d454d; --ink: #f2f5f8; --idle: #2a2f34;
    --strip: #ffffff;
  }
}
[data-jp-theme-light="false"] .rankscope-flame,
body.vscode-dark .rankscope-flame {
  --own: #24527a; --op: #7a4a12; --library: #3d454d; --ink: #f2f5f8; --idle: #2a2f34;
  --strip: #ffffff;
}
.rankscope-flame p, .jp-RenderedHTMLCommon .rankscope-flame p { margin: 0 0 .35em; }
.rankscope-flame .live { display: none; }
.rankscope-flame.works .live { display: inline-block; }
.rankscope-flame .head { display: flex; gap: 4px 16px; flex-wrap: wrap;
  align-items: baseline; }
.rankscope-flame .head :is(select, button) {
  font: inherit; color: inherit; padding: 1px 6px; border-radius: 3px;
  background: transparent; border: 1px solid rgba(127, 127, 127, .6);
}
.rankscope-flame .head option { background: var(--library); color: var(--ink); }
.rankscope-flame .head button:disabled { opacity: .5; }
.rankscope-flame .legend { opacity: .85; }
.rankscope-flame .legend span {
  display: inline-block; width: 1em; height: .8em; margin: 0 .4em 0 1.2em;
  vertical-align: -.05em; border-radius: 2px;
}
.rankscope-flame .legend span:first-child { margin-left: 0; }
.rankscope-flame .graph { max-height: 32em; overflow: hidden auto; }
.rankscope-flame .calls { display: flex; align-items: flex-start; }
.rankscope-flame .node {
  flex: none; min-width: 0; overflow: hidden; container-type: inline-size;
}
@container (max-width: 32px) {
  /* One letter is no label. */
  .rankscope-flame .node > button { color: transparent; }
}
.rankscope-flame .node > button {
  display: block; position: relative; box-sizing: border-box; width: 100%;
  height: 1.75em; padding: 0 .35em; margin: 0; overflow: hidden; text-align: left;
  white-space: nowrap; text-overflow: ellipsis; cursor: pointer; color: var(--ink);
  font: inherit; font-size: .92em; line-height: 1.5em; border-radius: 2px;
  border: solid var(--jp-layout-color0, Canvas); border-width: 0 1px 1px 0;
}
.rankscope-flame :is(.own, .line) { background: var(--own); }
.rankscope-flame .op { background: var(--op); }
.rankscope-flame :is(.library, .root) { background: var(--library); }
.rankscope-flame .idle { background: var(--idle); }
.rankscope-flame .uneven { background: linear-gradient(90deg,
  var(--library) 0 25%, var(--strip) 25%) bottom / 100% 4px no-repeat,
  var(--library); }
.rankscope-flame .node > button:is(:hover, :focus-visible) {
  filter: brightness(1.08) saturate(1.4); outline: 2px solid currentColor;
  outline-offset: -2px;
}
.rankscope-flame .strip {
  position: absolute; inset: auto 0 0 0; height: 3px; display: flex;
}
.rankscope-flame .strip i { flex: 1; background: var(--strip); }
.rankscope-flame.one .strip { display: none; }
.rankscope-flame .node.off { display: none; }
.rankscope-flame .node.path { width: 100% !important; }
.rankscope-flame .node.path:not(.zoomed) > button { opacity: .65; }
.rankscope-flame.works .detail { display: block; min-height: 1.45em; opacity: .85; }
</style>"""

_SCRIPT = """
for (const root of document.querySelectorAll(".rankscope-flame:not(.works)")) {
  root.classList.add("works");
  const nodes = [...root.querySelectorAll(".node")];
  const whole = root.querySelector(".whole");
  const detail = root.querySelector(".detail");
  const choice = root.querySelector("select");
  const parent = (node) => node.parentElement.closest(".node");
  const spent = (node) => {
    const each = node.dataset.s.split(",").map(Number);
    return choice.value === "" ? each.reduce((a, b) => a + b, 0) : each[+choice.value];
  };
  const zoom = (target) => {
    for (const node of nodes) node.classList.remove("off", "path", "zoomed");
    whole.disabled = !target || !parent(target);
    if (whole.disabled) return;
    target.classList.add("zoomed");
    for (let node = target; node; node = parent(node)) {
      node.classList.add("path");
      for (const one of node.parentElement.children)
        if (one !== node) one.classList.add("off");
    }
  };
  const draw = () => {
    root.classList.toggle("one", choice.value !== "");
    for (const node of nodes) {
      const above = parent(node);
      const part = above ? spent(node) / (spent(above) || 1) : 1;
      node.style.width = `${100 * part}%`;
      node.style.display = part > 0 || !above ? "" : "none";
    }
  };
  const tell = (event) => {
    const button = event.target.closest(".node > button");
    if (!button) return;
    const node = button.parentElement;
    const part = (100 * spent(node)) / (spent(nodes[0]) || 1);
    detail.textContent =
      `${part.toFixed(1)} % · ` + button.title.replaceAll("\\n", " · ");
  };
  root.addEventListener("click", (event) => {
    const button = event.target.closest(".node > button");
    if (button) zoom(button.parentElement);
  });
  root.addEventListener("mouseover", tell);
  root.addEventListener("focusin", tell);
  whole.addEventListener("click", () => zoom(null));
  choice.addEventListener("change", draw);
}
"""
