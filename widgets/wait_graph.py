"""Who waits for whom: the cycle of a deadlock as a picture, an SVG without a script."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Sequence

from rankscope.backends.observe.verdicts import Waiting
from rankscope.backends.printable import printable
from rankscope.backends.rank_sets import name_ranks, tell_ranks

from . import wait_shapes as shapes
from .wait_shapes import GAP, HALF, LETTER, Edge, Node, Point

__all__ = ["told", "wait_graph"]

#: Nodes that are drawn; of a longer cycle its beginning and its last one.
MOST = 12
#: Columns of the picture at most.
_COLUMNS = 4

#: Letters of the ranks that wait besides.
_WHO = 40
#: In pixels.
_NARROWEST, _WIDTH, _ROW, _LINE = 116.0, 600.0, 74.0, 14
#: From the middle of a slanted arrow to its label.
_SLANTED = 17


def told(cycle: Sequence[Waiting], besides: Collection[int] = ()) -> str:
    shown = cycle if len(cycle) <= MOST else cycle[: MOST - 2]
    parts = [
        f"{tell_ranks(one.ranks, f'waits for {name_ranks(one.awaited)}')} in {one.op} "
        f"of group {one.group}"
        for one in shown
    ]
    if len(shown) < len(cycle):
        parts.append(f"and so on, through {_count(cycle)} ranks, back to the first")
    if besides:
        parts.append(_because(besides))
    return printable("; ".join(parts))


@functools.lru_cache(maxsize=8)
def wait_graph(cycle: tuple[Waiting, ...], besides: tuple[int, ...] = ()) -> str:
    """Return a picture of a `Verdict.cycle`, and who else waits; empty without one."""
    if len(cycle) < 2:
        return ""
    nodes, edges = _shown(cycle)
    places = _places(nodes, edges)
    ends = list(zip(places, nodes, strict=True))
    arrows = [
        _arrow(*start, *end, edge, bent=len(nodes) == 2)
        for start, end, edge in zip(ends, [*ends[1:], ends[0]], edges, strict=True)
    ]
    legend = _legend(cycle, besides)
    left, right = _width(places, nodes, edges, max(map(len, legend)) * LETTER)
    top, below = (-58, 74) if len(nodes) == 2 else (-20, 36)
    bottom = max(y for _, y in places) + below
    return shapes.svg(
        f"{_count(cycle)} ranks wait for each other",
        told(cycle, besides),
        (left, top, right, bottom + 10 + _LINE * (len(legend) - 1)),
        [*(arrow for arrow, _ in arrows), *(shapes.outline(*one) for one in ends)],
        [
            *(names for _, names in arrows),
            *(shapes.number(*one) for one in ends),
            *(
                shapes.text(one, (left + right) / 2, bottom + y, "middle", quiet=True)
                for one, y in zip(legend, itertools.count(0, _LINE))
            ),
        ],
    )


def _because(besides: Collection[int]) -> str:
    who = name_ranks(besides)
    if len(who) > _WHO:
        who = f"{len(besides)} ranks"
    return f"{who} {'wait' if len(besides) > 1 else 'waits'} because of them"


def _count(cycle: Sequence[Waiting]) -> int:
    return len({rank for one in cycle for rank in one.ranks})


def _shown(cycle: Sequence[Waiting]) -> tuple[list[Node], list[Edge]]:
    shared = len({one.group for one in cycle}) == 1
    nodes = [shapes.node_of(one.ranks) for one in cycle]
    edges = [shapes.edge_of(one.op, "" if shared else one.group) for one in cycle]
    if len(cycle) > MOST:
        # The op of the last rank that is left out leads to the last one.
        left = len(cycle) - MOST + 1
        nodes[MOST - 2 : -1] = [shapes.node(f"{left} more", dashed=True)]
        edges[MOST - 2 : -2] = []
    return nodes, edges


# -- places ----------------------------------------------------------------------


def _places(nodes: Sequence[Node], edges: Sequence[Edge]) -> list[Point]:
    """Return the places of the nodes, clockwise around a rectangle."""
    count = len(nodes)
    longest = max(edge.length for edge in edges)
    widest = 2 * max(node.half for node in nodes)
    pitch = max(longest + widest + 2 * GAP + 12, _NARROWEST)
    if count <= 4:
        # The labels at both sides stand between them.
        pitch = max(pitch, 2 * longest + 40 if count == 4 else longest + 24)
    # A whole number: an edge down a side is not slanted by a rounding.
    pitch = math.ceil(pitch)
    if count == 2:
        return [(0, 0), (pitch, 0)]
    if count == 3:
        return [(0, 0), (pitch, 0), (pitch / 2, 1.2 * _ROW)]
    room = int((_WIDTH - widest) / pitch) + 1
    columns = min(_COLUMNS, room, math.ceil(count / 2))
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
    places: Sequence[Point], nodes: Sequence[Node], edges: Sequence[Edge], legend: float
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
    start: Point, source: Node, end: Point, target: Node, edge: Edge, bent: bool
) -> tuple[str, str]:
    """Return an arrow and its labels."""
    (x, y), (to_x, to_y) = start, end
    across, down = to_x - x, to_y - y
    away = math.hypot(across, down)
    across, down = across / away, down / away
    if bent:
        # Above from left to right, below from right to left.
        side = -1 if across > 0 else 1
        x, y = x + across * source.half * 0.7, side * (HALF - 1)
        to_x, to_y = to_x - across * (target.half + GAP), side * (HALF - 5)
        middle = (x + to_x) / 2
        bend = side * 42
        tip = (to_x - middle, to_y - bend)
        length = math.hypot(*tip)
        tip = tip[0] / length, tip[1] / length
        path = f"M{x:.1f} {y:.1f}Q{middle:.1f} {bend} {to_x:.1f} {to_y:.1f}"
        label = (middle, -32.0 if side < 0 else 39.0)
        return shapes.line(path, (to_x, to_y), tip), shapes.labels(
            edge, label, "middle", side
        )
    x, y = _leave(start, source, across, down)
    to_x, to_y = _leave(end, target, -across, -down)
    path = f"M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"
    middle, height = (x + to_x) / 2, (y + to_y) / 2
    arrow = shapes.line(path, (to_x, to_y), (across, down))
    if not down:
        return arrow, shapes.labels(edge, (middle, height), "middle", 0)
    # Of a rectangle inside, where there is room; of a triangle outside.
    outside = across != 0
    right = (down > 0) == outside
    beside = _SLANTED if outside else 10
    x = middle + (beside if right else -beside)
    return arrow, shapes.labels(edge, (x, height), "start" if right else "end", None)


def _leave(place: Point, node: Node, across: float, down: float) -> Point:
    """Return where a line in this direction leaves a node."""
    half = node.half if not down else min(node.half, HALF + 2) if across else HALF
    return place[0] + across * (half + GAP), place[1] + down * (half + GAP)


def _legend(cycle: Sequence[Waiting], besides: Collection[int]) -> list[str]:
    groups = {one.group for one in cycle}
    told = ["rank → the rank that it waits for"]
    if any(len(one.ranks) > 1 for one in cycle):
        told = ["ranks → the ranks that they wait for"]
    if len(groups) == 1:
        told.append(f"all in group {shapes.clipped(groups.pop())}")
    return told + ([_because(besides)] if besides else [])
