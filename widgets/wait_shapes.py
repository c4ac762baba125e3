"""What the pictures of who waits for whom are made of: nodes, arrows, labels, in SVG.

Text of a fixed size, on the grounds of any theme, in the variables of the board, of a
report or of JupyterLab, whichever there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from rankscope.backends.printable import printable
from rankscope.backends.rank_sets import format_ranks

__all__ = [
    "GAP",
    "HALF",
    "LETTER",
    "Edge",
    "Node",
    "Point",
    "clipped",
    "edge_of",
    "labels",
    "line",
    "node",
    "node_of",
    "number",
    "outline",
    "svg",
    "text",
]

_RED = "var(--rs-error, var(--error, var(--jp-error-color1, #d32f2f)))"
#: In pixels. A letter of the font is about this wide.
_FONT, LETTER = 11, 6.1
HALF, GAP = 13.0, 3.0
#: The part of its size to which a picture shrinks.
_LEAST = 0.8
#: Letters of a label, which reduce_scatter_tensor has, and of a node.
_LABEL, _NAME = 21, 14

Point = tuple[float, float]


class Node(NamedTuple):
    text: str
    #: Half the width.
    half: float
    #: It stands for ranks that are left out, or are not there.
    dashed: bool = False


class Edge(NamedTuple):
    """The labels of an edge: the op, and its number with the group."""

    op: str
    number: str

    @property
    def length(self) -> float:
        return max(len(self.op), len(self.number)) * LETTER


def edge_of(op: str, group: str = "") -> Edge:
    """Return the labels for ``all_reduce #13``, with the group if it is to be told."""
    name, _, number = op.partition(" ")
    number = clipped(number)
    if group:
        between = " · " if number else ""
        number += between + clipped(group, _LABEL - len(number + between))
    return Edge(clipped(name), number)


def node_of(ranks: Sequence[int], dashed: bool = False) -> Node:
    """Return the node of some ranks: which they are, or how many."""
    told = format_ranks(ranks, "–")
    return node(told if len(told) <= _NAME else f"{len(ranks)} ranks", dashed)


def node(text: str, dashed: bool = False) -> Node:
    """Return a node with a text, as wide as that needs."""
    return Node(text, max(HALF, len(text) * LETTER / 2 + 7), dashed)


def clipped(text: str, longest: int = _LABEL) -> str:
    """Return the beginning and the end of a text that is too long."""
    text = printable(" ".join(text.split()))
    if len(text) <= longest:
        return text
    end = max(1, longest // 2 - 1)
    return f"{text[: longest - end - 1]}…{text[-end:]}"


def svg(
    title: str,
    about: str,
    box: tuple[float, float, float, float],
    red: Sequence[str],
    others: Sequence[str],
) -> str:
    """Return a picture of elements, the `red` ones below; `box` has x, y, x, y."""
    left, top, right, bottom = box
    width, height = math.ceil(right - left), math.ceil(bottom - top)
    parts = [
        f'<g fill="{_RED}" stroke="{_RED}" stroke-width="1.5">',
        *red,
        "</g>",
        *others,
    ]
    # A notebook that is not trusted keeps the words alone.
    drawn = "\n".join(parts)
    return (
        f'<svg role="img" width="{width}" height="{height}" font-size="{_FONT}" '
        f'viewBox="{left:g} {top:g} {width} {height}" fill="currentColor" '
        # Smaller letters than these cannot be read: a narrow page scrolls it.
        f'style="max-width:100%;min-width:{_LEAST * width:.0f}px;height:auto">'
        f"<title>{escape(title)}</title>\n<desc>{escape(about)}</desc>\n"
        f"{drawn}</svg>"
    )


def line(path: str, end: Point, direction: Point) -> str:
    """Return a line with an arrowhead at its `end`."""
    (x, y), (across, down) = end, direction
    corners = [
        (x, y),
        (x - 8 * across + 3.5 * down, y - 8 * down - 3.5 * across),
        (x - 8 * across - 3.5 * down, y - 8 * down + 3.5 * across),
    ]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
    return f'<path d="{path}" fill="none"/><polygon points="{points}" stroke="none"/>'


def labels(edge: Edge, at: Point, anchor: str, side: int | None) -> str:
    """Return op and number: `side` -1 above, 1 below, 0 on both sides, None beside."""
    x, y = at
    first, second = {-1: (-13, 0), 1: (0, 13), 0: (-6, 15), None: (-2, 11)}[side]
    op = text(edge.op, x, y + first, anchor)
    return op + text(edge.number, x, y + second, anchor, quiet=True)


def outline(place: Point, node: Node) -> str:
    x, y = place
    dashes = ' stroke-dasharray="3 3"' if node.dashed else ""
    return (
        f'<rect x="{x - node.half:.1f}" y="{y - HALF:g}" width="{2 * node.half:.1f}" '
        f'height="{2 * HALF:g}" rx="{HALF:g}" fill-opacity=".14"{dashes}/>'
    )


def number(place: Point, node: Node) -> str:
    x, y = place
    return (
        f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" '
        f'font-weight="600">{escape(node.text)}</text>'
    )


def text(told: str, x: float, y: float, anchor: str, quiet: bool = False) -> str:
    """Return a text at a place; nothing for an empty one."""
    if not told:
        return ""
    shade = ' fill-opacity=".75"' if quiet else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{shade}>'
        f"{escape(told)}</text>"
    )
