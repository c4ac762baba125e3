"""GroupSpec: what a group is on this rank, the same in every generation."""

from __future__ import annotations

import contextvars
from collections.abc import Iterable, Sequence
from typing import Any

from ..devices.cuda_device import chosen_device
from .config import BackendConfig
from .key import GroupKey

__all__ = ["GroupSpec"]


class GroupSpec:
    """Name, ranks, backends and timeout of a group, as this rank sees them.

    `ranks` are global ranks; `rank` is the place of this process, global rank
    `global_rank`, among them. `timeout` is in seconds.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        global_rank: int,
        config: BackendConfig,
        timeout: float,
    ) -> None:
        self.name = name
        self.ranks = list(ranks)
        self.global_rank = global_rank
        self.rank = self.ranks.index(global_rank)
        self.config = config
        self.timeout = timeout
        # Of the thread that makes the group: backends are built later, perhaps on a
        # thread of the group.
        self.context = contextvars.copy_context()
        self.device = chosen_device() if "cuda" in config.device_backend_map else None

    @property
    def key(self) -> GroupKey:
        """What identifies the group on every rank."""
        return GroupKey(self.name, tuple(self.ranks))

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    def global_ranks(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the global ranks of `ranks`, which are ranks in the group."""
        return tuple(self.ranks[rank] for rank in ranks)

    def identity(self) -> dict[str, Any]:
        """Return rank and group as attributes of an error."""
        return {"rank": self.global_rank, "group": self.name}

    def describe(self) -> str:
        """``group 'default' on rank 2``, for messages."""
        return f"group {self.name!r} on rank {self.global_rank}"
