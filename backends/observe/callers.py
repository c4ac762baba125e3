"""When the line of an op says too little: that of a helper, called at several lines."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from .evidence import SourceLine

__all__ = ["Callers"]


class Callers:
    """Names lines of a program; a helper's with the caller by which its ops differ."""

    def __init__(self, lines: Iterable[SourceLine | None]) -> None:
        # Readers of dumps make one object for each line: a hash costs more.
        objects = {id(one): one for one in lines if one is not None and one.callers}
        chains: dict[str, set[tuple[str, ...]]] = {}
        for one in set(objects.values()):
            chains.setdefault(str(one), set()).add(tuple(map(str, one.callers)))
        #: Line → how far outwards the first callers are that differ.
        self._depths = {}
        for line, found in chains.items():
            for depth, at in enumerate(zip_longest(*found)):
                if len(set(at) - {None}) > 1:
                    self._depths[line] = depth
                    break

    def named(self, line: SourceLine) -> str:
        """Return ``train.py:7``, or ``train.py:7, called at train.py:21``."""
        depth = self._depths.get(str(line))
        if depth is None:
            depth = _other_cell(line)
        if depth is None or depth >= len(line.callers):
            return str(line)
        return f"{line}, called at {line.callers[depth]}"


def _other_cell(line: SourceLine) -> int | None:
    """Return which caller of the line of a helper is the first one in another cell."""
    if not line.file.startswith("cell "):
        return None
    others = (
        depth
        for depth, one in enumerate(line.callers)
        if one.file.startswith("cell ") and one.file != line.file
    )
    return next(others, None)
