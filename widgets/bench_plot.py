"""Log-log plots as SVG with the colours of the page's theme."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from .units import bytes_text

__all__ = ["Series", "colour", "marker", "plot"]

#: Of the whole picture and of the axes inside it, in px.
WIDTH, HEIGHT = 420, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 26, 40
#: Between two marks of the x axis.
APART = 52

# They contrast with white, with black and with each other, also without a difference
# between red and green; each has a shape of its own besides.
_COLOURS = ("#2f7fd6", "#d9711c", "#2c9c6a", "#a05cd1", "#c94f6d", "#8a8a1f")
_SHAPES: tuple[Callable[[float, float], str], ...] = (
    lambda x, y: f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>',
    lambda x, y: (
        f'<rect x="{x - 2.9:.1f}" y="{y - 2.9:.1f}" width="5.8" height="5.8"/>'
    ),
    lambda x, y: f'<path d="M{x:.1f} {y - 3.9:.1f}l3.7 6.4h-7.4z"/>',
    lambda x, y: f'<path d="M{x:.1f} {y - 4.2:.1f}l4.2 4.2-4.2 4.2-4.2-4.2z"/>',
)


@dataclass(frozen=True)
class Series:
    """One line: points (bytes, value) with positive values, and a note for each."""

    name: str
    points: Sequence[tuple[int, float]]
    notes: Sequence[str]


def colour(place: int) -> str:
    return _COLOURS[place % len(_COLOURS)]


def marker(place: int, x: float, y: float) -> str:
    """Return the mark of the line number `place`, as SVG around (x, y)."""
    return _SHAPES[place % len(_SHAPES)](x, y)


def plot(title: str, series: Sequence[Series], tick: Callable[[float], str]) -> str:
    """Return a log-log picture of `series`; ``tick(value)`` labels the y axis."""
    points = [point for one in series for point in one.points]
    sizes = sorted({size for size, _ in points})
    low, high = _decades([value for _, value in points])
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def across(size: float) -> float:
        first, last = math.log2(sizes[0]), math.log2(sizes[-1])
        if first == last:
            return (LEFT + right) / 2
        return LEFT + (math.log2(size) - first) / (last - first) * (right - LEFT)

    def up(value: float) -> float:
        part = (math.log10(value) - low) / (high - low)
        return bottom - part * (bottom - TOP)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(title)} against size">',
        f'<text class="name" x="{LEFT}" y="14">{escape(title)}</text>',
    ]
    for exponent in range(low, high + 1):
        y = up(10.0**exponent)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        label = escape(tick(10.0**exponent))
        parts.append(
            f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" '
            f'text-anchor="end">{label}</text>'
        )
    for size in _apart(sizes, across):
        x = across(size)
        parts.append(f'<path class="mark" d="M{x:.1f} {bottom}v4"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{bottom + 17}" '
            f'text-anchor="middle">{bytes_text(size)}</text>'
        )
    parts.append(
        f'<text class="tick" x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 6}" '
        'text-anchor="middle">size</text>'
    )
    for place, one in enumerate(series):
        parts.append(_line(place, one, across, up))
    return "".join([*parts, "</svg>"])


def _line(
    place: int,
    series: Series,
    across: Callable[[float], float],
    up: Callable[[float], float],
) -> str:
    spots = [(across(size), up(value)) for size, value in series.points]
    track = "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
    marks = [
        f"<g><title>{escape(note)}</title>{marker(place, x, y)}</g>"
        for (x, y), note in zip(spots, series.notes, strict=True)
    ]
    return (
        f'<g fill="{colour(place)}"><path d="M{track}" fill="none" '
        f'stroke="{colour(place)}" stroke-width="1.6"/>{"".join(marks)}</g>'
    )


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Return the powers of ten around `values`, at least one decade."""
    low = math.floor(math.log10(min(values)))
    high = math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _apart(sizes: Sequence[int], across: Callable[[float], float]) -> list[int]:
    """Return those of `sizes` whose labels have room."""
    shown: list[int] = []
    for size in sizes:
        if not shown or across(size) - across(shown[-1]) >= APART:
            shown.append(size)
    return shown
