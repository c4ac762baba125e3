"""A flame graph of ranks as HTML that needs nothing else: calls below their callers.

Boxes lie in the boxes of their callers, and their widths are parts of those: to zoom
is to hide the others, and without the script, on a page that is not trusted, the
whole picture remains, with its tooltips.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from rankscope.backends.rank_sets import group_by, name_ranks

from .tables import page_file, style_of

__all__ = ["Box", "flame_graph"]

#: The part of a rank's time below which a call is left out, and the most boxes.
LEAST = 0.002
MOST = 3000
#: A call is uneven if the rank with the least time has less than this part of the most.
UNEVEN = 0.8
#: Ranks that have a field each in the strip of an uneven call.
STRIPS = 64

_KINDS = {"own": "your code", "op": "ops", "library": "libraries"}


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
    """Return the picture of `root`, whose seconds are those of `ranks`."""
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
        f'<div class="rankscope-flame">{style_of("flame_graph")}<p class="head">'
        f'<b>{escape(title)}</b><label class="live">show <select aria-label="ranks">'
        f"{everyone}{choices}</select></label>"
        '<button type="button" class="live whole" disabled>Zoom out</button></p>'
        f'<p class="legend">{legend}{strip}</p>'
        f'<div class="graph">{_box(root, 100.0, ranks, least)}</div>'
        '<p class="detail live" aria-live="polite">&nbsp;</p>'
        f"{shown}<script>{page_file('flame_graph.js')}</script></div>"
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
    spent = dict(zip(ranks, seconds, strict=True))
    told = [rank for rank in spent if not spent[rank] < 0.05 <= max(seconds)]
    ranks_of = group_by(told, lambda rank: f"{spent[rank]:.1f} s")
    return " · ".join(f"{text} on {name_ranks(of)}" for text, of in ranks_of.items())


def _strip(seconds: Sequence[float]) -> str:
    """Return a field for each rank, the darker the longer it was there."""
    most = max(seconds)
    if not 1 < len(seconds) <= STRIPS or min(seconds) >= UNEVEN * most:
        return ""
    fields = "".join(f'<i style="opacity:{one / most:.2f}"></i>' for one in seconds)
    return f'<span class="strip">{fields}</span>'
