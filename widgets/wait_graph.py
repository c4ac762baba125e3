"""Who waits for whom: the cycle of a deadlock as a picture, an SVG without a script.

It has no width of its own: text of a fixed size, on the grounds of any theme, in the
variables of the board, of a report or of JupyterLab, whichever there are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from rankscope.backends.observe.verdicts import WaitFor
from rankscope.backends.printable import printable

__all__ = ["folded", "told", "wait_graph"]

#: Ranks that are drawn; of a longer cycle its beginning and its last rank.
MOST = 12
#: Columns of the picture: what 600 px have room for.
_COLUMNS = 4

_RED = "var(--rs-error, var(--error, var(--jp-error-color1, #d32f2f)))"
#: In pixels. A letter of the font is about this wide.
_FONT, _LETTER = 11, 6.1
_HALF, _GAP = 13.0, 3.0
_NARROWEST, _WIDEST, _ROW = 116.0, 184.0, 74.0
#: From the middle of a slanted arrow to its label.
_SLANTED = 17
#: Letters of a label: reduce_scatter_tensor has them.
_LABEL = 21


class _Node(NamedTuple):
    text: str
    #: Half the width.
    half: float
    #: It stands for ranks that are left out.
    gap: bool = False


class _Edge(NamedTuple):
    """The labels of an edge: the op, and its number with the group."""

    op: str
    number: str

    @property
    def length(self) -> float:
        return max(len(self.op), len(self.number)) * _LETTER


_Point = tuple[float, float]


def told(cycle: Sequence[WaitFor]) -> str:
    """Return what the picture shows as a text."""
    shown = cycle if len(cycle) <= MOST else cycle[: MOST - 2]
    parts = [
        f"rank {one.rank} waits for rank {one.awaited} in {one.op} of group {one.group}"
        for one in shown
    ]
    if len(shown) < len(cycle):
        parts.append(f"and so on, through {len(cycle)} ranks, back to the first")
    return printable("; ".join(parts))


@functools.lru_cache(maxsize=8)
def wait_graph(cycle: tuple[WaitFor, ...]) -> str:
    """Return a picture of ranks that wait for each other; empty without any.

    Parameters
    ----------
    cycle
        Each rank, with the op in which it waits for the next one; see
        `Verdict.cycle`.
    """
    if len(cycle) < 2:
        return ""
    nodes, edges = _shown(cycle)
    places = _places(nodes, edges)
    ends = list(zip(places, nodes, strict=True))
    arrows = [
        _arrow(*start, *end, edge, bent=len(nodes) == 2)
        for start, end, edge in zip(ends, [*ends[1:], ends[0]], edges, strict=True)
    ]
    legend = _legend(cycle)
    left, right = _width(places, nodes, edges, len(legend) * _LETTER)
    top, below = (-58, 74) if len(nodes) == 2 else (-20, 36)
    bottom = max(y for _, y in places) + below
    parts = [
        f'<g fill="{_RED}" stroke="{_RED}" stroke-width="1.5">',
        *(line for line, _ in arrows),
        *(_outline(*one) for one in ends),
        "</g>",
        *(labels for _, labels in arrows),
        *(_number(*one) for one in ends),
        _text(legend, (left + right) / 2, bottom, "middle", quiet=True),
    ]
    width, height = right - left, math.ceil(bottom + 10 - top)
    # A notebook that is not trusted keeps the words alone.
    drawn = "\n".join(parts)
    count = f"{len(cycle)} ranks wait for each other"
    return (
        f'<svg role="img" width="{width}" height="{height}" font-size="{_FONT}" '
        f'viewBox="{left:g} {top:g} {width} {height}" fill="currentColor" '
        'style="max-width:100%;height:auto">'
        f"<title>{count}</title>\n<desc>{escape(told(cycle))}</desc>\n"
        f"{drawn}</svg>"
    )


def folded(picture: str) -> str:
    """Return a picture in a part that can be closed; empty without one."""
    if not picture:
        return ""
    return (
        '<details class="wait-graph" open><summary>Who waits for whom</summary>'
        f"{picture}</details>"
    )


def _shown(cycle: Sequence[WaitFor]) -> tuple[list[_Node], list[_Edge]]:
    shared = len({one.group for one in cycle}) == 1
    nodes = [_Node(text := str(one.rank), _half(text)) for one in cycle]
    edges = [_edge(one, shared) for one in cycle]
    if len(cycle) > MOST:
        # The op of the last rank that is left out leads to the last one.
        left = len(cycle) - MOST + 1
        gap = f"{left} more"
        nodes[MOST - 2 : -1] = [_Node(gap, _half(gap), gap=True)]
        edges[MOST - 2 : -2] = []
    return nodes, edges


def _edge(one: WaitFor, shared: bool) -> _Edge:
    op, _, number = one.op.partition(" ")
    number = _clipped(number)
    if not shared:
        between = " · " if number else ""
        number += between + _clipped(one.group, _LABEL - len(number + between))
    return _Edge(_clipped(op), number)


def _half(text: str) -> float:
    return max(_HALF, len(text) * _LETTER / 2 + 7)


def _clipped(text: str, longest: int = _LABEL) -> str:
    text = printable(" ".join(text.split()))
    if len(text) <= longest:
        return text
    end = max(1, longest // 2 - 1)
    return f"{text[: longest - end - 1]}…{text[-end:]}"


# -- places ----------------------------------------------------------------------


def _places(nodes: Sequence[_Node], edges: Sequence[_Edge]) -> list[_Point]:
    """Return the places of the nodes, clockwise around a rectangle."""
    count = len(nodes)
    longest = max(edge.length for edge in edges)
    pitch = longest + 2 * max(node.half for node in nodes) + 2 * _GAP + 12
    pitch = min(max(pitch, _NARROWEST), _WIDEST)
    if count <= 4:
        # The labels at both sides stand between them.
        pitch = max(pitch, 2 * longest + 40 if count == 4 else longest + 24)
    if count == 2:
        return [(0, 0), (pitch, 0)]
    if count == 3:
        return [(0, 0), (pitch, 0), (pitch / 2, 1.2 * _ROW)]
    columns = min(_COLUMNS, math.ceil(count / 2))
    sides = max(0, (count - 2 * columns + 1) // 2)
    width = (columns - 1) * pitch
    below = count - columns - 2 * sides
    height = (sides + 1) * _ROW
    rows = [(place + 1) * _ROW for place in range(sides)]
    return [
        *((place * pitch, 0.0) for place in range(columns)),
        *((width, y) for y in rows),
        *((width - place * width / (below - 1), height) for place in range(below)),
        *((0.0, y) for y in reversed(rows)),
    ]


def _width(
    places: Sequence[_Point],
    nodes: Sequence[_Node],
    edges: Sequence[_Edge],
    legend: float,
) -> tuple[float, float]:
    """Return the left and the right end of the picture; `legend` is its width."""
    ends = [
        end
        for (x, _), node in zip(places, nodes, strict=True)
        for end in (x - node.half - 2, x + node.half + 2)
    ]
    if len(nodes) == 3:
        # The labels of the slanted sides stand outside.
        width = places[1][0]
        room = [_SLANTED + edge.length for edge in edges]
        ends += [width * 3 / 4 + room[1], width / 4 - room[2]]
    middle = (min(ends) + max(ends)) / 2
    ends += [middle - legend / 2, middle + legend / 2]
    return math.floor(min(ends)), math.ceil(max(ends))


# -- elements --------------------------------------------------------------------


def _arrow(
    start: _Point, source: _Node, end: _Point, target: _Node, edge: _Edge, bent: bool
) -> tuple[str, str]:
    """Return an arrow and its labels."""
    (x, y), (to_x, to_y) = start, end
    across, down = to_x - x, to_y - y
    away = math.hypot(across, down)
    across, down = across / away, down / away
    if bent:
        # Above from left to right, below from right to left.
        side = -1 if across > 0 else 1
        x, y = x + across * source.half * 0.7, side * (_HALF - 1)
        to_x, to_y = to_x - across * (target.half + _GAP), side * (_HALF - 5)
        middle = (x + to_x) / 2
        bend = side * 42
        tip = (to_x - middle, to_y - bend)
        length = math.hypot(*tip)
        tip = tip[0] / length, tip[1] / length
        line = f"M{x:.1f} {y:.1f}Q{middle:.1f} {bend} {to_x:.1f} {to_y:.1f}"
        label = (middle, -32.0 if side < 0 else 39.0)
        return _line(line, (to_x, to_y), tip), _labels(edge, label, "middle", side)
    x, y = _leave(start, source, across, down)
    to_x, to_y = _leave(end, target, -across, -down)
    line = f"M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"
    middle, height = (x + to_x) / 2, (y + to_y) / 2
    arrow = _line(line, (to_x, to_y), (across, down))
    if not down:
        return arrow, _labels(edge, (middle, height), "middle", 0)
    # Of a rectangle inside, where there is room; of a triangle outside.
    outside = across != 0
    right = (down > 0) == outside
    beside = _SLANTED if outside else 10
    x = middle + (beside if right else -beside)
    return arrow, _labels(edge, (x, height), "start" if right else "end", None)


def _leave(place: _Point, node: _Node, across: float, down: float) -> _Point:
    """Return where a line in this direction leaves a node."""
    half = node.half if not down else min(node.half, _HALF + 2) if across else _HALF
    return place[0] + across * (half + _GAP), place[1] + down * (half + _GAP)


def _line(path: str, end: _Point, direction: _Point) -> str:
    (x, y), (across, down) = end, direction
    corners = [
        (x, y),
        (x - 8 * across + 3.5 * down, y - 8 * down - 3.5 * across),
        (x - 8 * across - 3.5 * down, y - 8 * down + 3.5 * across),
    ]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
    return f'<path d="{path}" fill="none"/><polygon points="{points}" stroke="none"/>'


def _labels(edge: _Edge, at: _Point, anchor: str, side: int | None) -> str:
    """Return op and number: `side` -1 above, 1 below, 0 on both sides, None beside."""
    x, y = at
    first, second = {-1: (-13, 0), 1: (0, 13), 0: (-6, 15), None: (-2, 11)}[side]
    op = _text(edge.op, x, y + first, anchor)
    return op + _text(edge.number, x, y + second, anchor, quiet=True)


def _outline(place: _Point, node: _Node) -> str:
    x, y = place
    dashes = ' stroke-dasharray="3 3"' if node.gap else ""
    return (
        f'<rect x="{x - node.half:.1f}" y="{y - _HALF:g}" width="{2 * node.half:.1f}" '
        f'height="{2 * _HALF:g}" rx="{_HALF:g}" fill-opacity=".14"{dashes}/>'
    )


def _number(place: _Point, node: _Node) -> str:
    x, y = place
    return (
        f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" '
        f'font-weight="600">{escape(node.text)}</text>'
    )


def _text(text: str, x: float, y: float, anchor: str, quiet: bool = False) -> str:
    if not text:
        return ""
    shade = ' fill-opacity=".75"' if quiet else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{shade}>'
        f"{escape(text)}</text>"
    )


def _legend(cycle: Sequence[WaitFor]) -> str:
    groups = {one.group for one in cycle}
    text = "rank → the rank that it waits for"
    if len(groups) == 1:
        text += f", all in group {_clipped(groups.pop())}"
    return text
