"""NonGroupMember: what `new_group` returns on a rank outside the new group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from ..rank_sets import name_ranks

__all__ = ["NonGroupMember"]


class NonGroupMember:
    """What `new_group` returns on a rank that is not in the new group."""

    def __init__(self, name: str, ranks: Sequence[int], rank: int) -> None:
        self.group_desc = name
        self.ranks = list(ranks)
        self.global_rank = rank

    def refuse(self, op: str) -> NoReturn:
        """Raise the error of every op on a group this rank is not in."""
        raise ValueError(
            f"{op}: rank {self.global_rank} is not in group {self.group_desc!r} "
            f"({name_ranks(self.ranks)}); call it on those ranks only"
        )

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return (
            f"<NonGroupMember: rank {self.global_rank} is not in {self.group_desc!r} "
            f"({name_ranks(self.ranks)})>"
        )
