"""The stacks of ranks at one moment as text, equal ones once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rankscope.backends.observe.stacks import Frame, Stack
from rankscope.backends.rank_sets import group_by, name_ranks
from rankscope.engines import RankStacks
from rankscope.engines.observe.profiling import (
    innermost_line,
    line_name,
    without_internals,
)

__all__ = ["stack_text"]

#: The files whose calls begin a thread, and a script that ``-m rankscope.torch`` runs.
_STARTS = ("/threading.py", "<frozen runpy>", "/runpy.py", "/rankscope/torch.py")


def stack_text(found: RankStacks, every: bool = False) -> str:
    """Return the stacks, those that are equal on several ranks once."""

    def shown(rank: int) -> tuple[Stack, ...]:
        return tuple(
            one if every else one._replace(frames=without_internals(one.frames))
            for one in found.stacks[rank]
        )

    ranks_of = group_by(sorted(found.stacks), shown)
    blocks = [_block(stacks, ranks) for stacks, ranks in ranks_of.items()]
    return "\n\n".join([*blocks, *_silent(found.errors)])


def _block(stacks: Sequence[Stack], ranks: Sequence[int]) -> str:
    main, *others = stacks
    at, _ = innermost_line(main.frames)
    where = "idle: no cell runs"
    if main.frames:
        where = f"at {line_name(at)}" if at is not None else "busy, at no line of yours"
    lines = [f"{name_ranks(ranks)}: {where}", *_frames(_begun(main.frames))]
    for one in others:
        lines += [f"  thread {one.thread}", *_frames(_begun(one.frames))]
    return "\n".join(lines)


def _begun(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Return the calls of a thread from its own function, or its script, on."""
    own = (place for place, one in enumerate(frames) if not one.place.endswith(_STARTS))
    return frames[next(own, 0) :]


def _frames(frames: Sequence[Frame]) -> list[str]:
    places = [line_name(one) if one.line else "Rankscope" for one in frames]
    width = max(map(len, places), default=0)
    lines = []
    for place, frame in zip(places, frames, strict=True):
        # A cell's own lines are in no function.
        function = "" if frame.function[0] == "<" else f"in {frame.function}"
        text = "  ".join(part for part in (function, frame.text) if part)
        lines.append(f"    {place:<{width}}  {text}".rstrip())
    return lines


def _silent(errors: Mapping[int, str]) -> list[str]:
    found = group_by(errors, errors.__getitem__)
    return [f"{name_ranks(ranks)}: {why}" for why, ranks in found.items()]
