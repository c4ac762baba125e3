"""How many ops of each kind a group has completed on this rank, and their bytes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from .op_type import payload

__all__ = ["OpCounts"]

#: Kinds of op and array that are counted before they become bytes.
KINDS = 64


class OpCounts:
    """Counts ops as they complete; the bytes are multiplied when somebody asks.

    A training issues the same few ops again and again: an op costs one look-up.
    """

    __slots__ = ("_kinds", "_totals", "_whole", "ranks")

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        # Op, size of an element, and shapes → how many.
        self._kinds: dict[Hashable, int] = {}
        self._totals: dict[str, tuple[int, int]] = {}
        self._whole = True

    def add(self, op: str, itemsize: int, sizes: Any) -> None:
        """Count an op, named as in records; `sizes` are tuples."""
        one = len(sizes) == 1
        kind = (op, itemsize, sizes[0]) if one else (op, itemsize, *sizes)
        try:
            self._kinds[kind] += 1
        except KeyError:
            self._kinds[kind] = 1
            if len(self._kinds) > KINDS:
                kinds, self._kinds = self._kinds, {}
                self._totals = self._sum(kinds)

    def forget(self) -> None:
        """Count no more: ops have completed that nobody has seen."""
        self._whole = False

    def totals(self) -> dict[str, tuple[int, int]]:
        """Return op → how many have completed, and bytes as nccl-tests counts them.

        Empty where that is not known.
        """
        return self._sum(dict(self._kinds)) if self._whole else {}

    def _sum(self, kinds: Any) -> dict[str, tuple[int, int]]:
        found = dict(self._totals)
        for (op, itemsize, *sizes), count in kinds.items():
            ops, nbytes = found.get(op, (0, 0))
            moved = payload(op, sizes, itemsize, self.ranks) or 0
            found[op] = ops + count, nbytes + count * moved
        return found
