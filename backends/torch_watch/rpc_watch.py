"""The watch of torch's RPC in this process: its workers are a group of the board."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

from ..errors import DistError
from ..groups.abort_reason import AbortReason
from ..groups.key import GroupKey
from ..groups.summary import GroupStatus, OpStatus
from ..groups.world import world
from ..stores.base import Store
from ..work.flight_recorder import recorder
from .importing import when_imported
from .private.rpc import RPC, RpcNames
from .rpc_calls import RpcCall, RpcLog, Served, this_rank
from .rpc_install import RpcWrappers

__all__ = ["RpcGroup", "RpcWatch", "watch_rpc"]

_log = logging.getLogger(__name__)

#: The name of the group of all workers.
NAME = "rpc"

#: What to do where a worker is gone; a group of RPC is not rebuilt.
REMEDY = (
    "a cell makes RPC anew: rpc.shutdown(graceful=False) where it runs, then "
    "rpc.init_rpc(…) on all ranks"
)


class RpcGroup:
    """The workers of torch's RPC: a `WatchedGroup` whose ops are its calls.

    Its calls are abortable, but the group never is aborted: RPC goes on after it.

    Parameters
    ----------
    ranks
        The global ranks of the workers.
    log
        What this rank does.
    """

    def __init__(self, ranks: Sequence[int], log: RpcLog) -> None:
        self.key = GroupKey(NAME, tuple(sorted(ranks)))
        self._log = log

    def summary(self) -> GroupStatus:
        """Return its status on this rank."""
        calls = self._log.in_flight()
        waiting = [call for call in calls if call.state == "started"]
        main = threading.main_thread().ident
        # First what the cell waits for, then what the other threads do.
        waiting.sort(key=lambda call: (call.thread != main, -call.number))
        known: list[RpcCall | Served] = [*waiting, *self._log.serving(), *calls]
        oldest = known[0] if known else None
        completed = self._log.completed
        return GroupStatus(
            name=NAME,
            ranks=self.key.ranks,
            backend="tensorpipe",
            generation=0,
            state="ready",
            reason=None,
            timeout=self.timeout,
            completed=None
            if completed is None
            else OpStatus(
                completed.title,
                completed.number,
                duration=(completed.ended_ns - completed.began_ns) / 1e9,
                source=completed.source,
            ),
            in_flight=len(calls),
            oldest=None if oldest is None else self._in_flight(oldest),
            library="torch",
            rpc=True,
        )

    def _in_flight(self, call: RpcCall | Served) -> OpStatus:
        peer = call.peer if isinstance(call, RpcCall) else None
        return OpStatus(
            call.title,
            call.number,
            state="started",
            elapsed=(time.time_ns() - call.began_ns) / 1e9,
            peer=self.key.ranks.index(peer) if peer in self.key.ranks else None,
            source=call.source,
        )

    @property
    def timeout(self) -> float | None:
        """Seconds after which an RPC fails; ``None`` where there is no limit."""
        from torch.distributed.rpc import get_rpc_timeout

        try:
            return float(get_rpc_timeout()) or None
        except RuntimeError:
            # Not initialized yet, or not any more.
            return None

    def abort(self, reason: str, *, by: str = "", culprits: Sequence[int] = ()) -> None:
        """End the waits of this rank."""
        by = by or this_rank()
        self._log.abort(AbortReason(reason, by, culprits=tuple(culprits)))
        recorder.changed()

    def goes_on_without(self, ranks: Collection[int]) -> bool:
        """Return whether none of these global ranks is in the group."""
        return set(ranks).isdisjoint(self.key.ranks)

    def rebuild(self, generation: int | None, store: Store | None) -> None:
        """Refuse: what the workers hold for each other would be lost."""
        raise DistError(f"torch's RPC is not rebuilt: {REMEDY}")

    def export(self) -> dict[str, Any]:
        """Return its name and ranks; a fresh process does not join it."""
        return {"library": RPC, "name": NAME, "ranks": list(self.key.ranks)}


class RpcWatch:
    """Torch's RPC in this process: a `GroupSource` of the world.

    It has one group from the start of ``init_rpc`` to the end of ``shutdown``.
    """

    library = RPC

    def __init__(self) -> None:
        self.log = RpcLog()
        #: What is not shown with this torch; mostly empty.
        self.advice: list[str] = []
        self._names: RpcNames | None = None
        self._group: RpcGroup | None = None

    def start(self) -> None:
        """Watch from now on, or from the import of ``torch.distributed.rpc`` on."""
        when_imported(RPC, self._install)

    def _install(self, rpc: ModuleType) -> None:
        try:
            self._names = RpcNames(rpc)
        except (AttributeError, KeyError) as error:
            self.advice.append(f"torch's RPC is not watched: this torch has no {error}")
            _log.warning(self.advice[-1])
            return
        RpcWrappers(self._names, self.log, self._on_ranks).install()

    def _on_ranks(self, ranks: Mapping[int, int]) -> None:
        self._group = RpcGroup(list(ranks.values()), self.log)
        recorder.changed()

    # -- GroupSource -----------------------------------------------------------

    @property
    def rank(self) -> int | None:
        """``None``: RPC gives a process an id, not a rank."""
        return None

    @property
    def world_size(self) -> int | None:
        """``None``: see `rank`."""
        return None

    def groups(self) -> Sequence[RpcGroup]:
        """Return the group of the workers, while RPC runs or begins."""
        group, names = self._group, self._names
        if group is None or names is None:
            return []
        return [group] if names.running or self.log.in_flight() else []

    def import_group(self, exported: Mapping[str, Any]) -> None:
        """Do nothing: a fresh process calls ``init_rpc``."""

    def records(self) -> Sequence[dict[str, Any]]:
        """Return the records of the calls, oldest first."""
        return [
            record
            for group in self.groups()
            for record in self.log.records(group.key, group.timeout or 0.0)
        ]


_watch: RpcWatch | None = None
_lock = threading.Lock()


def watch_rpc() -> RpcWatch:
    """Watch torch's RPC in this process; return the watch. Later calls return the same.

    Torch is not imported: the watch begins when it is. All workers have to be watched:
    they agree on each ``init_rpc`` in a way of their own.
    """
    global _watch
    with _lock:
        if _watch is None:
            _watch = RpcWatch()
            world.sources.append(_watch)
            _watch.start()
        return _watch
