"""ProfileReport: where ranks spent their time, as a flame graph and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from rankscope.backends.observe.stacks import MAIN, Frame
from rankscope.backends.rank_sets import name_ranks
from rankscope.engines import Profile
from rankscope.engines.errors import group_by_message
from rankscope.engines.observe.profiling import (
    file_name,
    innermost_line,
    is_users,
    line_name,
    without_internals,
)

from .flame_graph import UNEVEN, Box, flame_graph
from .tables import aligned, trusted_html

__all__ = ["ProfileReport"]

#: Rows of the table, and the part of a rank's time below which a row has no such rank.
ROWS = 20
LEAST = 0.01
#: In the path of the ops of `torch.distributed`.
_TORCH_OPS = "/torch/distributed/distributed_c10d.py"


class ProfileReport:
    """A `Profile` that shows itself: a flame graph in a notebook, else a table.

    With `every`, what Rankscope does inside an op is shown, too.
    """

    def __init__(self, profile: Profile, every: bool = False) -> None:
        self.profile = profile
        self._every = every

    def __repr__(self) -> str:
        return "\n".join([self._title(), "", *self._table(), *self._silent()])

    def _repr_mimebundle_(self, **options: Any) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": self.html()}

    def save(self, path: str | PathLike[str]) -> None:
        """Write the flame graph as an HTML page that needs nothing else."""
        page = (
            '<!doctype html><meta charset="utf-8"><title>Rankscope</title>'
            '<meta name="color-scheme" content="light dark"><body>'
            f"{self.html()}</body>"
        )
        Path(path).write_text(page, encoding="utf-8")

    def _title(self) -> str:
        ranks = self.profile.ranks
        return f"{name_ranks(ranks)}, sampled for {self.profile.seconds:.1f} s"

    def _silent(self) -> list[str]:
        errors = self.profile.errors
        return ["", f"left out: {group_by_message(errors)}"] if errors else []

    # -- text ------------------------------------------------------------------

    def _table(self) -> list[str]:
        spent: dict[tuple[str, str], dict[int, float]] = {}
        for rank, frames, thread, seconds in self._stacks():
            if thread == MAIN:
                of = spent.setdefault(_line_and_call(frames), {})
                of[rank] = of.get(rank, 0.0) + seconds
        rows = []
        for (line, call), by_rank in spent.items():
            there = {
                rank: seconds
                for rank, seconds in by_rank.items()
                if seconds >= LEAST * self.profile.ranks[rank].seconds
            }
            rows += [
                (sum(alike.values()), _row(alike, line, call))
                for alike in _alike(there)
            ]
        rows.sort(key=lambda row: -row[0])
        table = [
            ("s per rank", "ranks", "line", "in"),
            *(row for _, row in rows[:ROWS]),
        ]
        lines = aligned(table, [True, False, False, False])
        if len(rows) > ROWS:
            lines.append(f"and {len(rows) - ROWS} more, with less time each")
        return lines

    def _stacks(self) -> Iterator[tuple[int, tuple[Frame, ...], str, float]]:
        for rank, sampled in self.profile.ranks.items():
            for stack, seconds in sampled.weights:
                frames = stack.frames
                if not self._every:
                    frames = without_internals(frames)
                yield rank, frames, stack.thread, seconds

    # -- HTML ------------------------------------------------------------------

    def html(self) -> str:
        """Return the flame graph."""
        ranks = list(self.profile.ranks)
        root = Box("all", "all", "root", [0.0] * len(ranks))
        for rank, frames, thread, seconds in self._stacks():
            place = ranks.index(rank)
            box = root
            box.seconds[place] += seconds
            if thread != MAIN:
                box = box.inside(f"thread {thread}", f"thread {thread}", "library")
                box.seconds[place] += seconds
            for frame in frames:
                for label, about, kind in _boxes(frame):
                    box = box.inside(label, about, kind)
                    box.seconds[place] += seconds
            if not frames:
                box.inside("idle", "no cell runs", "idle").seconds[place] += seconds
        _join_single_lines(root)
        notes, seconds = self._silent()[1:], self.profile.seconds
        graph = flame_graph(self._title(), root, ranks, seconds, notes)
        return trusted_html(graph, f"<pre>{escape(repr(self))}</pre>")


def _line_and_call(frames: Sequence[Frame]) -> tuple[str, str]:
    """Return the user's innermost line, and what it has called."""
    at, inner = innermost_line(frames)
    if not frames:
        return "idle", ""
    if at is None:
        return "", frames[-1].function
    return line_name(at), inner[-1].function if inner else at.text


def _alike(by_rank: dict[int, float]) -> Iterator[dict[int, float]]:
    """Yield the ranks with about the same seconds, those with the most first."""
    alike: dict[int, float] = {}
    for rank, seconds in sorted(by_rank.items(), key=lambda one: -one[1]):
        if alike and seconds < UNEVEN * max(alike.values()):
            yield alike
            alike = {}
        alike[rank] = seconds
    if alike:
        yield alike


def _row(by_rank: dict[int, float], line: str, call: str) -> tuple[str, str, str, str]:
    low, high = min(by_rank.values()), max(by_rank.values())
    spent = f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f}–{high:.1f}"
    return spent, name_ranks(by_rank), line, call


def _boxes(frame: Frame) -> Iterator[tuple[str, str, str]]:
    """Yield label, tooltip and kind of a call's box, and of the box of its line in it.

    A function is one box, as a flame graph has it, however many of its lines were seen:
    a generator that is left and entered again would be a box for each of them. Where
    the code is the user's, the box of the function has a box for each of its lines; the
    lines of a cell or of a script itself need no function around them.
    """
    function = frame.function
    if frame.internal:
        place = file_name(frame) if frame.line else "Rankscope"
        yield function, f"{function} · {place}", "op"
        return
    begins = f", which begins at line {frame.begins}" if frame.begins else ""
    place, line = file_name(frame), line_name(frame)
    box = f"{function} · {place}", f"{function} in {place}{begins}"
    if not is_users(frame):
        yield *box, "op" if _TORCH_OPS in frame.place else "library"
    elif function == "<module>":
        yield f"{line} · {frame.text}", f"{line} · {frame.text}", "own"
    else:
        yield *box, "own"
        yield f"{line} · {frame.text}", f"{line} in {function} · {frame.text}", "line"


def _join_single_lines(box: Box) -> None:
    """Leave out the box of a function of which one line was seen; keep the line's."""
    for key, call in box.calls.items():
        # Only a function has lines, as long as those below are not joined.
        inside = list(call.calls.values())
        if len(inside) == 1 and inside[0].kind == "line":
            box.calls[key] = call = inside[0]
        _join_single_lines(call)
