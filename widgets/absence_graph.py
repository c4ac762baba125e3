"""Who waits for whom where ranks are missing: dashed, with where they are instead."""

from __future__ import annotations

import functools

from rankscope.backends.observe.verdicts import Absence, Verdict, Waiting
from rankscope.backends.printable import printable
from rankscope.backends.rank_sets import name_ranks

from . import wait_shapes as shapes
from .wait_graph import wait_graph
from .wait_shapes import GAP, LETTER

__all__ = ["absence_graph", "in_fold", "picture_of"]

#: Ops, and places of missing ranks, that are drawn.
MOST = 4
#: Letters of where a rank is: all has room in 600 px.
_WHERE = 36
#: In pixels, between two nodes below each other, and to the right of the labels.
_ROW, _ARROW = 46.0, 26.0


def picture_of(verdict: Verdict) -> str:
    """Return who waits for whom as SVG, in a cycle or for missing ranks; or nothing."""
    ring = {rank for one in verdict.cycle for rank in one.ranks}
    besides = tuple(sorted({*verdict.waiting, *verdict.culprits} - ring))
    return wait_graph(verdict.cycle, besides) or absence_graph(
        verdict.waits, verdict.absent
    )


def in_fold(picture: str, opens: bool, style: str = "") -> str:
    """Return a picture in a part that opens and closes; empty without one."""
    if not picture:
        return ""
    style = f' style="{style}"' if style else ""
    return (
        f'<details class="wait-graph"{" open" * opens}>'
        f"<summary{style}>Who waits for whom</summary>{picture}</details>"
    )


@functools.lru_cache(maxsize=8)
def absence_graph(waits: tuple[Waiting, ...], absent: tuple[Absence, ...]) -> str:
    """Return a picture of ranks that wait for ranks that are missing; see `Verdict`."""
    if not waits or not absent:
        return ""
    edges = [shapes.edge_of(one.op, one.group) for one in waits[:MOST]]
    waiting = [shapes.node_of(one.ranks) for one in waits[:MOST]]
    missing = [shapes.node_of(one.ranks, dashed=True) for one in absent[:MOST]]
    middle = max(len(waiting), len(missing)) / 2
    begin = 2 * max(node.half for node in waiting) + GAP
    # Where the lines of all ops meet, if there are several.
    bend = begin + max(edge.length for edge in edges) + 14
    end = bend + _ARROW
    half = max(node.half for node in missing)
    starts = [_y(place, len(waiting), middle) for place in range(len(waiting))]
    ends = [_y(place, len(missing), middle) for place in range(len(missing))]
    heights = [*starts, *ends]
    red = [
        _path(f"M{2 * node.half + GAP:g} {y:g}H{bend:g}")
        for node, y in zip(waiting, starts, strict=True)
    ]
    red.append(_path(f"M{bend:g} {min(heights):g}V{max(heights):g}"))
    others, right = [], end
    for y, node, edge in zip(starts, waiting, edges, strict=True):
        place = (node.half, y)
        red.append(shapes.outline(place, node))
        others += [
            shapes.number(place, node),
            shapes.labels(edge, ((begin + bend) / 2, y), "middle", 0),
        ]
    for y, node, one in zip(ends, missing, absent, strict=False):
        place = (end + GAP + node.half, y)
        red += [
            shapes.line(f"M{bend:g} {y:g}H{end:g}", (end, y), (1.0, 0.0)),
            shapes.outline(place, node),
        ]
        where = shapes.clipped(one.where, _WHERE)
        others += [
            shapes.number(place, node),
            shapes.text(where, end + 2 * half + 4 * GAP, y + 4, "start", quiet=True),
        ]
        right = max(right, end + 2 * half + 4 * GAP + len(where) * LETTER)
    bottom = middle * 2 * _ROW
    left_out = _left_out(waits, absent)
    if left_out:
        others.append(shapes.text(left_out, 0, bottom + 8, "start", quiet=True))
        bottom += 14
    ranks = [rank for one in absent for rank in one.ranks]
    return shapes.svg(
        f"ranks wait for {name_ranks(ranks)}",
        _told(waits, absent),
        (-2, 0, right + 2, bottom),
        red,
        others,
    )


def _told(waits: tuple[Waiting, ...], absent: tuple[Absence, ...]) -> str:
    parts = [
        f"{name_ranks(one.ranks)} in {one.op} of group {one.group}"
        for one in waits[:MOST]
    ]
    parts += [
        f"missing: {name_ranks(one.ranks)}{f', {one.where}' if one.where else ''}"
        for one in absent[:MOST]
    ]
    return printable("; ".join(parts))


def _left_out(waits: tuple[Waiting, ...], absent: tuple[Absence, ...]) -> str:
    parts = []
    if len(waits) > MOST:
        parts.append(f"{len(waits) - MOST} more ops wait")
    if len(absent) > MOST:
        count = sum(len(one.ranks) for one in absent[MOST:])
        parts.append(f"{count} more {'ranks are' if count > 1 else 'rank is'} missing")
    return "; ".join(parts)


def _y(place: int, count: int, middle: float) -> float:
    """Return where the middle of a node is, of `count` below each other."""
    return (middle - count / 2 + place + 0.5) * _ROW


def _path(path: str) -> str:
    return f'<path d="{path}" fill="none"/>'
