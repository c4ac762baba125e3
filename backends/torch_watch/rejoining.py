"""Groups of torch that a fresh process, of a restarted rank, has yet to join."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

from ..errors import DistError
from ..groups.key import GroupKey
from ..groups.summary import GroupStatus
from ..stores.base import Store
from . import rebuilding
from .creation import made_of
from .private.groups import names

__all__ = ["PendingGroup", "export"]

_REASON = "this rank was started anew: its torch group is made by %dist_rebuild"


def export(group: Any, key: GroupKey) -> dict[str, Any]:
    """Return what a fresh process needs to join the next generation of `group`."""
    torch = names()
    made = made_of(group)
    arguments = made.arguments
    timeout = arguments.get("timeout", torch.c10d.default_pg_timeout)
    return {
        "library": "torch",
        "name": key.name,
        "ranks": list(key.ranks),
        "generation": made.generation,
        "place": made.place,
        "is_default": group is torch.default,
        "backend": str(arguments["backend"]),
        "group_name": str(group.group_name),
        "group_desc": arguments.get("group_desc"),
        "pg_tag": arguments.get("pg_tag"),
        "timeout": timeout.total_seconds(),
        "on_device": arguments.get("device_id") is not None,
        # The number that the next group gets as its name.
        "count": torch.count,
    }


class PendingGroup:
    """A group that the other ranks have, as the world treats it until it is rebuilt.

    Parameters
    ----------
    exported
        What `export` returned on another rank.
    """

    def __init__(self, exported: Mapping[str, Any]) -> None:
        self._exported = exported
        self.key = GroupKey(exported["name"], tuple(exported["ranks"]))

    @property
    def name(self) -> str:
        """The name that a person reads."""
        return self.key.name

    @property
    def library(self) -> str:
        """The library that makes it."""
        return "torch"

    def summary(self) -> GroupStatus:
        """Return its status on this rank."""
        return GroupStatus(
            name=self.name,
            ranks=self.key.ranks,
            backend=self._exported["backend"],
            generation=self._exported["generation"],
            state="aborted",
            reason=_REASON,
            timeout=self._exported["timeout"],
            issued=0,
            library="torch",
        )

    def goes_on_without(self, ranks: Collection[int]) -> bool:
        """Return False: all ranks of the world meet while a group is made."""
        return False

    def abort(self, reason: str, *, by: str = "", culprits: Sequence[int] = ()) -> None:
        """Do nothing: no op was issued."""

    def export(self) -> dict[str, Any]:
        """Return what another fresh process needs."""
        return dict(self._exported)

    def rebuild(self, generation: int | None, store: Store | None) -> None:
        """Join the group, which the other ranks make anew at the same time."""
        if store is None:
            raise DistError(f"torch's group {self.name!r} cannot be joined: no store")
        given = self._exported
        if generation is None:
            generation = given["generation"] + 1
        rank = int(os.environ["RANK"])
        place = self.key.ranks.index(rank)
        arguments = {
            "group_size": len(self.key.ranks),
            "group_rank": place,
            "global_ranks_in_group": [] if given["is_default"] else given["ranks"],
            "backend": given["backend"],
            "group_name": given["group_name"],
            "group_desc": given["group_desc"],
            "pg_tag": given["pg_tag"],
            "timeout": timedelta(seconds=given["timeout"]),
            "device_id": _device() if given["on_device"] else None,
        }
        rebuilding.join(
            self.key, rank, arguments, generation, store, given["place"], given["count"]
        )


def _device() -> Any:
    """Return this rank's GPU, which the start of the rank has made current."""
    import torch

    return torch.device("cuda", torch.cuda.current_device())
