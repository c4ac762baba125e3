"""Groups of torch that this rank does not have yet: it makes them, or is to join them.

``new_group`` returns on a rank when all ranks of the group have called it. Until then
torch's registry does not have the group, and there is no op that could be aborted: the
rank waits in the store of the default group. A fresh process, of a restarted rank,
joins the groups of the others in their rebuild.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from ..errors import DistAbortedError, DistError
from ..groups.abort_reason import AbortReason
from ..groups.key import GroupKey
from ..groups.summary import GroupStatus, OpStatus, WatchedGroup
from ..rank_sets import name_ranks, write_members
from ..stores.base import Store
from ..work.flight_recorder import recorder
from ..work.op_type import OpType
from . import rebuilding
from .aborting import abort
from .creation import made_of
from .frames import calling_frames
from .private.groups import names
from .stores import disconnect
from .torch_record import TorchRecord

__all__ = ["PendingGroup", "UnfinishedGroup", "UnfinishedGroups", "export"]

#: The op that a rank is in, as summaries and records have it.
OP = "new_group"

# Where in the store the worlds of a rank are counted, and who makes which group.
_WORLDS, _MEMBERS = "rankscope/worlds", "rankscope/members"


class UnfinishedGroup(WatchedGroup):
    """A group that this rank makes, as the world treats it until it is made."""

    def __init__(
        self, key: GroupKey, rank: int, arguments: Mapping[str, Any], default: Any
    ) -> None:
        self.key, self.name, self.generation = key, key.name, 0
        self.reason: AbortReason | None = None
        self._rank = rank
        self._default = default
        self._store = arguments["store"]
        timeout = arguments.get("timeout")
        self._timeout = 0.0 if timeout is None else timeout.total_seconds()
        self._began_ns, self._since = time.time_ns(), time.monotonic()
        self._frames = calling_frames() or (("", 0, ""),)

    def summary(self) -> GroupStatus:
        begun = OpStatus(OP, 1, source=recorder.name_source(self._frames[0]))
        return GroupStatus(
            name=self.name,
            members=write_members(self.key.ranks),
            backend="",
            generation=self.generation,
            state="ready" if self.reason is None else "aborted",
            reason=None if self.reason is None else str(self.reason),
            aborts=int(self.reason is not None),
            timeout=self._timeout,
            enqueued=begun,
            started=begun,
            issued=0,
            in_flight=1,
            oldest=replace(
                begun,
                state="started",
                elapsed=time.monotonic() - self._since,
                timeout=self._timeout,
                nbytes=0,
            ),
            library="torch",
            unfinished=True,
        )

    def record(self) -> dict[str, Any]:
        made = TorchRecord(-1, self, OpType.UNKNOWN)
        # As of the first collective, which it is.
        made.collective_seq_id = 1
        made.state, made.timeout, made.frames = "started", self._timeout, self._frames
        made.created_ns = made.started_ns = self._began_ns
        return {**made.as_dict(), "op": OP}

    def abort(self, reason: AbortReason) -> None:
        """End the wait: disconnect this rank from the store; return at once.

        The default group has the same store, and is aborted with it: its rebuild makes
        another store.
        """
        if self.reason is not None:
            return
        why = self.reason = replace(reason, by=reason.by or f"rank {self._rank}")
        if not disconnect(self._store):
            self.reason = replace(
                why,
                text=f"{why.text}; the wait for the other ranks goes on until its "
                "timeout, since only one in a TCPStore can be ended",
            )
        if self._default is not None:
            abort(self._default, why)

    def error(self) -> DistAbortedError:
        assert self.reason is not None
        return DistAbortedError(
            f"{OP} on rank {self._rank}: the wait for the other ranks of torch's group "
            f"{self.name!r} was aborted: {self.reason}; {self.reason.remedy}",
            rank=self._rank,
            group=self.name,
            op=OP,
            culprits=tuple(self.reason.culprits),
            reason=self.reason.why,
        )

    def rebuild(self, generation: int | None, store: Store | None) -> None:
        """Fail: there is nothing to rebuild."""
        raise DistError(
            f"torch's group {self.name!r} is not made yet: %dist_abort, then make it "
            "on all of its ranks"
        )


class UnfinishedGroups:
    """The groups that this process is making; ``key_of`` returns the key of one."""

    def __init__(self, key_of: Callable[[str, str, tuple[int, ...]], GroupKey]) -> None:
        self._key_of = key_of
        self._unfinished: list[UnfinishedGroup] = []
        # The worlds of this rank over the store of the present one; 0: not known.
        self._world = 0

    def __iter__(self) -> Any:
        return iter(list(self._unfinished))

    @contextlib.contextmanager
    def making(self, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Note a group while torch makes it in the block, with these `arguments`."""
        one = self._begin(arguments)
        self._claim_number(arguments)
        if one is None:
            yield
            return
        self._unfinished.append(one)
        recorder.changed()
        try:
            yield
        except RuntimeError as error:
            if one.reason is None:
                raise
            raise one.error() from error
        finally:
            self._unfinished.remove(one)
            recorder.changed()

    def _begin(self, arguments: Mapping[str, Any]) -> UnfinishedGroup | None:
        """Return the group of `arguments`; ``None`` if this rank waits for no other.

        A rebuild makes groups on another thread, once all ranks are there.
        """
        default = names().default
        size, ranks = arguments["group_size"], arguments["global_ranks_in_group"]
        rank = arguments["group_rank"] if default is None else default.rank()
        members = tuple(ranks) or tuple(range(size))
        main = threading.current_thread() is threading.main_thread()
        if not main or rank not in members or len(members) < 2:
            return None
        name = str(arguments.get("group_name") or "")
        key = self._key_of(name, str(arguments.get("group_desc") or ""), members)
        return UnfinishedGroup(key, rank, arguments, default)

    def _claim_number(self, arguments: Mapping[str, Any]) -> None:
        """Raise `ValueError` if another rank makes another group by the same number.

        Torch pairs the groups of one number, whatever ranks they have: ops of ranks in
        different groups would complete, with wrong values. The first rank counts, and
        none waits for another.
        """
        store, default = arguments["store"], names().default
        members = list(arguments["global_ranks_in_group"])
        if not members:
            # The numbers begin anew in another world over the same store.
            self._world = store.add(f"{_WORLDS}/{arguments['group_rank']}", 1)
            return
        name = str(arguments.get("group_name") or "")
        # A rebuild, on another thread, makes what is known on all ranks. Those groups
        # have no number of which the members alone know (use_local_synchronization).
        main = threading.current_thread() is threading.main_thread()
        if default is None or not self._world or not name.isdigit() or not main:
            return
        if "rankscope" in str(arguments["backend"]):
            # Groups of ours are paired by their ranks. Torch's store may be gone, with
            # rank 0, and the numbers of a fresh process are its own.
            return
        claim = json.dumps([members, default.rank()])
        first = store.compare_set(f"{_MEMBERS}/{self._world}/{name}", "", claim)
        theirs, rank = json.loads(first)
        if theirs != members:
            raise ValueError(
                f"{OP} on rank {default.rank()}: this rank makes a group of "
                f"{name_ranks(members)}, while rank {rank} makes one of "
                f"{name_ranks(theirs)}. All ranks have to call new_group() for every "
                "group, in the same order; with use_local_synchronization=True, its "
                "members"
            )


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


class PendingGroup(WatchedGroup):
    """A group that others have `exported`, as the world treats it until its rebuild."""

    def __init__(self, exported: Mapping[str, Any]) -> None:
        self._exported = exported
        self.key = GroupKey(exported["name"], tuple(exported["ranks"]))
        self.name = self.key.name

    def summary(self) -> GroupStatus:
        return GroupStatus(
            name=self.name,
            members=write_members(self.key.ranks),
            backend=self._exported["backend"],
            generation=self._exported["generation"],
            state="aborted",
            reason=_REASON,
            timeout=self._exported["timeout"],
            issued=0,
            library="torch",
        )

    def abort(self, reason: AbortReason) -> None:
        """Do nothing: no op was issued."""

    def export(self) -> dict[str, Any]:
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
