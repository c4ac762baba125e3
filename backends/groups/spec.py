"""What a group is on this rank, in every generation, and what it is made from."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..devices.cuda_device import chosen_device
from ..errors import DistNetworkError
from ..interface.base import Backend
from .config import BackendConfig
from .key import GroupKey

__all__ = ["NON_GROUP_MEMBER", "GroupSpec", "NonGroupMember", "Origin"]


class GroupSpec:
    """Name, ranks, backends and timeout of a group, as this rank sees them."""

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        global_rank: int,
        config: BackendConfig,
        timeout: float,
    ) -> None:
        self.name = name
        self.ranks, self.size = list(ranks), len(ranks)
        #: What identifies the group on every rank.
        self.key = GroupKey(name, tuple(ranks))
        self.global_rank = global_rank
        self.rank = self.ranks.index(global_rank)
        self.config = config
        self.timeout = timeout
        # Of the thread that makes the group: backends are built later, perhaps on a
        # thread of the group.
        self.context = contextvars.copy_context()
        #: By number: what is called when the group is aborted.
        self.abort_hooks: dict[int, Callable[[], None]] = {}
        #: By number: what is called when the group has begun a new generation.
        self.rebuild_hooks: dict[int, Callable[[], None]] = {}
        self.device = chosen_device() if "cuda" in config.device_backend_map else None

    def global_ranks(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the global ranks of `ranks`, which are ranks in the group."""
        return tuple(self.ranks[rank] for rank in ranks)

    def culprits_of(self, error: BaseException) -> tuple[int, ...]:
        """Return the global ranks that `error`, of a backend or its store, names.

        Backends, and the keys of their stores, number ranks within the group; the loss
        of the store names the rank that served it.
        """
        culprits: tuple[int, ...] = tuple(getattr(error, "culprits", ()))
        if isinstance(error, DistNetworkError):
            return culprits
        return self.global_ranks(culprits)

    def identity(self) -> dict[str, Any]:
        """Return rank and group as attributes of an error."""
        return {"rank": self.global_rank, "group": self.name}

    def describe(self) -> str:
        """``group 'default' on rank 2``, for messages."""
        return f"group {self.name!r} on rank {self.global_rank}"


@dataclass(frozen=True)
class Origin:
    """The group that another one is made from, which leaves out `excluded` ranks."""

    #: That of the group: device type → the backend, if it was built.
    built_backend: Callable[[str], Backend | None]
    excluded: tuple[int, ...] = ()
    release: Callable[[], None] | None = None

    def split(self, backend: Backend, device: str) -> None:
        """Split the new group's `backend` from the parent group's for `device`."""
        backend.split_from(self.built_backend(device), self.excluded, self.release)


class NonGroupMember:
    """The type of ``GroupMember.NON_GROUP_MEMBER``, its only instance.

    `new_group` returns that object on a rank that is not in the new group, so that
    ``is`` and ``==`` find it, after a pickle and a copy too. It is false. In
    ``torch.distributed`` it is an instance of ``object``.

    Examples
    --------
    >>> bool(dist.GroupMember.NON_GROUP_MEMBER)
    False
    """

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return "NON_GROUP_MEMBER"

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"


NON_GROUP_MEMBER = NonGroupMember()
