"""Groups of torch that this rank is making: it waits for the ranks that make it too.

``new_group`` returns on a rank when all ranks of the group have called it. Until then
torch's registry does not have the group, and there is no op that could be aborted: the
rank waits in the store of the default group.
"""

from __future__ import annotations

import functools
import inspect
import json
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import DistAbortedError, DistError
from ..groups.abort_reason import AbortReason
from ..groups.key import GroupKey
from ..groups.summary import GroupStatus, OpStatus
from ..rank_sets import name_ranks
from ..stores.base import Store
from ..work.flight_recorder import recorder
from ..work.record_fields import record_fields
from .aborting import HINT, abort
from .frames import calling_frame
from .private.groups import Names
from .stores import disconnect

__all__ = ["UnfinishedGroup", "UnfinishedGroups"]

#: The op that a rank is in, as summaries and records have it.
OP = "new_group"

# Where in the store the worlds of a rank are counted, and who makes which group.
_WORLDS, _MEMBERS = "rankscope/worlds", "rankscope/members"


class UnfinishedGroup:
    """A group that this rank makes, as the world treats it until it is made."""

    def __init__(
        self, key: GroupKey, rank: int, arguments: Mapping[str, Any], default: Any
    ) -> None:
        self.key = key
        self.reason: AbortReason | None = None
        self._rank = rank
        self._default = default
        self._store = arguments["store"]
        timeout = arguments.get("timeout")
        self._timeout = 0.0 if timeout is None else timeout.total_seconds()
        self._began_ns = time.time_ns()
        self._frame = calling_frame() or ("", 0, "")

    @property
    def name(self) -> str:
        """The name that a person reads."""
        return self.key.name

    def summary(self) -> GroupStatus:
        """Return its status on this rank."""
        begun = OpStatus(OP, 1, source=recorder.name_source(self._frame))
        elapsed = (time.time_ns() - self._began_ns) / 1e9
        return GroupStatus(
            name=self.name,
            ranks=self.key.ranks,
            backend="",
            generation=0,
            state="ready" if self.reason is None else "aborted",
            reason=None if self.reason is None else str(self.reason),
            timeout=self._timeout,
            enqueued=begun,
            started=begun,
            issued=0,
            in_flight=1,
            oldest=replace(
                begun,
                state="started",
                elapsed=elapsed,
                timeout=self._timeout,
                nbytes=0,
            ),
            library="torch",
            unfinished=True,
        )

    def record(self) -> dict[str, Any]:
        """Return the making of the group as the record of an op."""
        return record_fields(
            record_id=-1,
            group=self.name,
            group_id=self.key.id,
            # As of the first collective, which it is.
            collective_seq_id=1,
            op=OP,
            state="started",
            timeout=self._timeout,
            created_ns=self._began_ns,
            started_ns=self._began_ns,
            ended_ns=0,
            frame=self._frame,
            name_source=recorder.name_source,
        )

    def goes_on_without(self, ranks: Collection[int]) -> bool:
        """Return False: all ranks of the world meet while a group is made."""
        return False

    def abort(self, reason: str, *, by: str = "", culprits: Sequence[int] = ()) -> None:
        """End the wait: disconnect this rank from the store; return at once.

        The default group has the same store, and is aborted with it: its rebuild makes
        another store.
        """
        if self.reason is not None:
            return
        why = AbortReason(reason, by or f"rank {self._rank}", culprits=tuple(culprits))
        self.reason = why
        if not disconnect(self._store):
            self.reason = AbortReason(
                f"{reason}; the wait for the other ranks goes on until its timeout, "
                "since only one in a TCPStore can be ended",
                why.by,
                culprits=why.culprits,
            )
        if self._default is not None:
            abort(self._default, why)

    def error(self) -> DistAbortedError:
        """Return the error of the call that makes the group."""
        assert self.reason is not None
        return DistAbortedError(
            f"{OP} on rank {self._rank}: the wait for the other ranks of torch's group "
            f"{self.name!r} was aborted: {self.reason}; {HINT}",
            rank=self._rank,
            group=self.name,
            op=OP,
            culprits=tuple(self.reason.culprits),
            reason=self.reason.text,
        )

    def rebuild(self, generation: int | None, store: Store | None) -> None:
        """Fail: there is nothing to rebuild."""
        raise DistError(
            f"torch's group {self.name!r} is not made yet: %dist_abort, then make it "
            "on all of its ranks"
        )

    def export(self) -> dict[str, Any]:
        """Return nothing: there is no group that a fresh process could join."""
        return {}


class UnfinishedGroups:
    """The groups that this process is making just now.

    Parameters
    ----------
    key_of
        Returns the key of a group by torch's name and description, and its ranks.
    """

    def __init__(self, key_of: Callable[[str, str, tuple[int, ...]], GroupKey]) -> None:
        self._key_of = key_of
        self._unfinished: list[UnfinishedGroup] = []
        # The worlds of this rank over the store of the present one; 0: not known.
        self._world = 0

    def __iter__(self) -> Any:
        return iter(list(self._unfinished))

    def install(self, torch: Names) -> Callable[[], None]:
        """Note each group while torch makes it; return the undoing."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            signature = inspect.signature(original)

            @functools.wraps(original)
            def make(*args: Any, **kwargs: Any) -> Any:
                arguments = signature.bind(*args, **kwargs).arguments
                one = self._begin(torch, arguments)
                self._claim_number(torch, arguments)
                if one is None:
                    return original(*args, **kwargs)
                self._unfinished.append(one)
                recorder.changed()
                try:
                    return original(*args, **kwargs)
                except RuntimeError as error:
                    if one.reason is None:
                        raise
                    raise one.error() from error
                finally:
                    self._unfinished.remove(one)
                    recorder.changed()

            return make

        return torch.wrap_maker(wrap)

    def _begin(
        self, torch: Names, arguments: Mapping[str, Any]
    ) -> UnfinishedGroup | None:
        """Return the group of `arguments`; ``None`` if this rank waits for no other.

        A rebuild makes groups on another thread, once all ranks are there.
        """
        default = torch.default
        size, ranks = arguments["group_size"], arguments["global_ranks_in_group"]
        rank = arguments["group_rank"] if default is None else default.rank()
        members = tuple(ranks) or tuple(range(size))
        main = threading.current_thread() is threading.main_thread()
        if not main or rank not in members or len(members) < 2:
            return None
        name = str(arguments.get("group_name") or "")
        key = self._key_of(name, str(arguments.get("group_desc") or ""), members)
        return UnfinishedGroup(key, rank, arguments, default)

    def _claim_number(self, torch: Names, arguments: Mapping[str, Any]) -> None:
        """Raise `ValueError` if another rank makes another group by the same number.

        Torch pairs the groups of one number, whatever ranks they have: ops of ranks in
        different groups would complete, with wrong values. The first rank counts, and
        none waits for another.
        """
        store, default = arguments["store"], torch.default
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
