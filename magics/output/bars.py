"""Progress bars: the unfinished lines of ranks as one table with a bar for each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from rankscope.backends.rank_sets import format_ranks
from rankscope.engines.errors import plain

__all__ = ["bar_table", "is_progress"]

#: A bar of tqdm: description, percentage, the bar itself, counts and times.
_BAR = re.compile(r"^(?P<what>.*?)\s*\b(?P<percent>\d{1,3})%\|[^|]*\|\s*(?P<rest>.*)$")
#: How far a program is, or how fast.
_PROGRESS = re.compile(r"\d ?%|\d ?/ ?\d|\d ?(it|[kMG]?i?B)/s|\ds/it")

_TABLE = (
    '<div style="display: grid; grid-template-columns: max-content max-content '
    "minmax(6em, 20em) max-content; column-gap: 0.8em; align-items: center; "
    "font-family: var(--jp-code-font-family, monospace); "
    'font-size: var(--jp-code-font-size, 0.9em)">{}</div>'
)
_ROW = (
    '<span style="opacity: 0.75">{label}</span><span>{what}</span>'
    '<progress value="{percent}" max="100" style="width: 100%" '
    'aria-label="{name}: {percent} %"></progress><span>{percent:>3} % · {rest}</span>'
)
_LINE = (
    '<span style="opacity: 0.75">{label}</span>'
    '<span style="grid-column: 2 / -1; white-space: pre">{line}</span>'
)


def is_progress(line: str) -> bool:
    """Return whether a line that was written over says how far a program is."""
    return _PROGRESS.search(plain(line)) is not None


def bar_table(lines: Iterable[tuple[str, Sequence[int]]]) -> str | None:
    """Return HTML for `lines` with their ranks; ``None`` if there is no bar in them."""
    rows, has_bars = [], False
    for coloured, ranks in lines:
        line, label = plain(coloured), f"[{format_ranks(ranks)}]"
        bar = _BAR.match(line)
        if bar is None:
            rows.append(_LINE.format(label=label, line=escape(line)))
            continue
        has_bars = True
        what = bar["what"].removesuffix(":")
        rows.append(
            _ROW.format(
                label=label,
                what=escape(what),
                percent=min(int(bar["percent"]), 100),
                name=escape(f"{label} {what}".strip()),
                rest=escape(bar["rest"]),
            )
        )
    return _TABLE.format("".join(rows)) if has_bars else None
