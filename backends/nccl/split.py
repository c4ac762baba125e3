"""CommSplit: a communicator derived by ncclCommSplit or ncclCommShrink.

NCCL requires that every rank of the new communicator takes part, and that the parent
communicator is idle. The ranks reach the first use of a new group at different times,
so the ranks first pass a barrier in the store. Each rank then reserves the parent
communicator if the parent is idle on that rank, and votes through the store. The
parent is split only if every rank has reserved the parent. The ranks vote once more
when NCCL is done: an abort of the parent ends the split on some ranks, and others may
have been faster. After a vote that was lost, a new communicator is created from a
fresh unique id.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import DistError, DistTimeoutError
from ..stores.base import Store
from .communicator import NCCLComm
from .interface import GpuApi, Handle
from .stream import NCCLStream

__all__ = ["CommSplit", "meet"]

# Seconds between two polls of a communicator that is being created.
_NAP = 5e-4


class CommSplit:
    """How a group's communicator derives from a parent, on one device of this rank.

    `ordinal` is the index of the `parent` stream among those of the parent group, whose
    ranks `excluded` are left out (by ncclCommShrink). With `abort`, NCCL aborts the
    parent's ops in flight, and the parent cannot be used afterwards.
    """

    def __init__(
        self,
        parent: NCCLStream | None,
        ordinal: int,
        excluded: tuple[int, ...],
        abort: bool,
        release: Callable[[], None],
    ) -> None:
        self._parent, self._ordinal, self._excluded = parent, ordinal, excluded
        self._abort, self._release = abort, release
        #: True from this rank's vote for the split until the new communicator is
        #: ready or has failed.
        self.deriving = False

    def derive(
        self,
        api: GpuApi,
        store: Store,
        rank: int,
        size: int,
        options: dict[str, Any],
        deadline: float,
    ) -> Handle | None:
        """Return the new communicator's handle, ``None`` if the ranks do not agree.

        Every rank of the new group calls `derive`, with a `store` that only the new
        group uses. `derive` blocks until ``time.monotonic()`` reaches `deadline`, or
        until `cancel`. An error after the vote is raised and also aborts the parent,
        because only an abort of the parent ends the NCCL call in progress.
        """
        reserved, made = False, None
        parent = self._parent
        try:
            # NCCLComm reads these keys to name the ranks that have not joined.
            store.set(f"came/{rank}", b"1")
            meet(store, "met", size, deadline)
            # As soon as the last rank has voted, another rank may call NCCL and
            # depend on this rank: set the flag before the vote.
            self.deriving = True
            if parent is not None and (api.nccl.can_shrink or not self._excluded):
                reserved = parent.reserve(options, abort=self._abort)
            self.deriving = reserved
            vote = self._ordinal if reserved else None
            try:
                agreed = _vote(store, "votes", vote, size, deadline)
                if not agreed or parent is None:
                    return None
                try:
                    made = self._call(api, parent.comm, rank)
                    _await_ready(api, parent.comm, made, deadline)
                except DistError:
                    if not parent.comm.ended:
                        raise
                    # For a reason of its own: the new group begins anew.
                    _vote(store, "made", None, size, deadline)
                    _discard(api, parent.comm, made, ready=False)
                    return None
                # With `abort` a rank frees the parent after this: no other rank needs
                # the parent any more, either.
                if not _vote(store, "made", 0, size, deadline):
                    _discard(api, parent.comm, made, ready=True)
                    return None
            except BaseException as error:
                if reserved and parent is not None:
                    parent.abort_group(
                        f"{parent.comm.name}: a communicator derived from it failed: "
                        f"{error}"
                    )
                    _discard(api, parent.comm, made, ready=False)
                raise
            return made
        finally:
            self.deriving = False
            if reserved and parent is not None:
                parent.release()
            self._release()

    def cancel(self, reason: str) -> None:
        """End a split in progress, if there is one, by an abort of the parent."""
        if self.deriving and self._parent is not None:
            name = self._parent.comm.name
            self._parent.abort_group(
                f"{name}: a communicator derived from it was aborted: {reason}"
            )

    def _call(self, api: GpuApi, parent: NCCLComm, rank: int) -> Handle:
        nccl = api.nccl
        with parent.mutex:
            parent.poll()
            if self._excluded:
                return nccl.shrink(parent.handle, self._excluded, abort=self._abort)
            return nccl.split(parent.handle, rank)


def _discard(
    api: GpuApi, parent: NCCLComm, made: Handle | None, *, ready: bool
) -> None:
    """Abort the communicator `made`, if there is one, that no rank is to use."""
    if made is None:
        return
    abort = partial(_abort, api, parent.device, made)
    if ready:
        abort()
    else:
        # NCCL may write the handle until the parent is freed, so the new
        # communicator is aborted only after that.
        parent.when_freed(abort)


def _abort(api: GpuApi, device: int, made: Handle) -> None:
    """Abort `made`, on a thread of the backend.

    NCCL restores the thread's device after the call: without `device`, that would
    create a context on device 0.
    """
    api.cuda.use(device)
    api.nccl.abort(made)


def _await_ready(api: GpuApi, parent: NCCLComm, made: Handle, deadline: float) -> None:
    while True:
        # NCCL reports progress and errors of the split through the parent.
        with parent.mutex:
            if parent.poll() and api.nccl.ready(made):
                return
        if time.monotonic() > deadline:
            raise DistTimeoutError("the new communicator was not ready in time")
        time.sleep(_NAP)


def meet(store: Store, key: str, size: int, deadline: float) -> None:
    """Return when all `size` ranks have called `meet` with this `key`: a barrier.

    A rank sends at most three requests, whatever `size` is, because one store serves
    all ranks.
    """
    if store.add(f"{key}/count", 1) == size:
        store.set(f"{key}/all", b"1")
    store.wait([f"{key}/all"], _left(deadline))


def _vote(store: Store, key: str, vote: int | None, size: int, deadline: float) -> bool:
    """Return whether all ranks vote for the same number; ``None`` is a vote against.

    A vote against decides at once: the other ranks hold back ops of the parent until
    the vote is decided.
    """
    if vote is None:
        store.set(f"{key}/agreed", b"0")
        return False
    ballot = f"{key}/{vote}"
    store.add(ballot, 1)
    if store.add(f"{key}/count", 1) == size:
        # This rank is the last to vote: the ballots of all other ranks are counted.
        agreed = store.add(ballot, 0) == size
        store.set(f"{key}/agreed", b"1" if agreed else b"0")
    return store.get(f"{key}/agreed", _left(deadline)) == b"1"


def _left(deadline: float) -> float:
    """Return the seconds until `deadline`; raise `DistTimeoutError` after it."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise DistTimeoutError("not every rank took part in time")
    return seconds
