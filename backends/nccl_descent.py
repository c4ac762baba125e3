"""Descent: a communicator made out of another one, by ncclCommSplit or ncclCommShrink.

NCCL needs every rank of the new communicator for it, and the old one at rest.
A group's first use comes to each rank when it comes, so the ranks meet first,
each lends the old communicator if it can just then, and only where all do is it
used: else they make the new one from a fresh id.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .errors import DistTimeoutError
from .nccl_comm import ABORT_WAIT
from .nccl_seam import Seam
from .store import Store

if TYPE_CHECKING:
    from .nccl_queue import NCCLQueue

__all__ = ["Descent"]

# Seconds between two looks at a communicator that is being made.
_NAP = 5e-4
_NO = b"no"


# What NCCL may still write into, as the abort of its parent has not come back.
_kept: list[Any] = []


class Descent:
    """Where the communicator of a group may come from, on one device of this rank.

    `queue` is that of the old communicator, ``None`` where this rank has none;
    `place` is its number among those of its group. `excluded` are the old
    ranks that are left out; none: all stay. With `abort`, NCCL ends what the
    old one is at, which is of no use afterwards. `release()` is called once
    the old one is no longer needed.
    """

    def __init__(
        self,
        queue: NCCLQueue | None,
        place: int,
        excluded: tuple[int, ...],
        abort: bool,
        release: Callable[[], None],
    ) -> None:
        self._queue, self._place, self._excluded = queue, place, excluded
        self._abort, self._release = abort, release
        #: Whether NCCL is at it, or may be: this rank is for it, and it is not there.
        self.making = False

    def derive(
        self,
        seam: Seam,
        store: Store,
        rank: int,
        size: int,
        options: dict[str, Any],
        deadline: float,
    ) -> Any | None:
        """Return the new communicator's handle, ``None`` if the ranks do not agree.

        Every rank of the new group calls it, with a `store` of that group's
        own. Blocks until ``time.monotonic()`` is `deadline`, or until
        `give_up`. What goes wrong once they have agreed is raised, and ends the
        old communicator too: it is at something that nothing else ends.
        """
        lent, made = False, None
        queue = self._queue
        try:
            _meet(store, "came", rank, size, b"1", deadline)
            # With the vote, the others may begin.
            self.making = True
            self.making = lent = self._lend(seam, options)
            mine = b"%d" % self._place if lent else _NO
            try:
                votes = _meet(store, "lends", rank, size, mine, deadline)
                if votes != {mine} or not lent or queue is None:
                    return None
                made = self._begin(seam, queue, rank)
                self._wait(seam, queue, made, deadline)
                if self._abort:
                    # The old one may be freed when nobody needs it any more.
                    _meet(store, "made", rank, size, b"1", deadline)
            except BaseException as error:
                if lent and queue is not None:
                    queue.fail(f"{queue.comm.name}: what was being made of it: {error}")
                    _discard(seam, queue, made)
                raise
            return made
        finally:
            self.making = False
            if lent and queue is not None:
                queue.take_back()
            self._release()

    def give_up(self) -> None:
        """End what NCCL is at, if it is: only the end of the old one does."""
        if self.making and self._queue is not None:
            name = self._queue.comm.name
            self._queue.fail(f"{name}: what was being made of it was aborted")

    def _lend(self, seam: Seam, options: dict[str, Any]) -> bool:
        if self._queue is None or (self._excluded and not seam.nccl.can_shrink):
            return False
        return self._queue.lend(options, abort=self._abort)

    def _begin(self, seam: Seam, queue: NCCLQueue, rank: int) -> Any:
        parent, nccl = queue.comm, seam.nccl
        with parent.mutex:
            parent.poll()
            if self._excluded:
                return nccl.shrink(parent.handle, self._excluded, abort=self._abort)
            return nccl.split(parent.handle, rank)

    def _wait(self, seam: Seam, queue: NCCLQueue, made: Any, deadline: float) -> None:
        while True:
            # NCCL says through the old one how far it is, and what went wrong.
            with queue.comm.mutex:
                if queue.comm.poll() and seam.nccl.ready(made):
                    return
            if time.monotonic() > deadline:
                raise DistTimeoutError("it was not there in time")
            time.sleep(_NAP)


def _discard(seam: Seam, queue: NCCLQueue, made: Any) -> None:
    """Free what was made, or will have been until the abort of its parent is over."""
    if made is None:
        return
    parent = queue.comm
    _kept.append(made)
    if parent.gone.wait(2 * ABORT_WAIT):
        seam.nccl.abort(made)
        _kept.remove(made)


def _meet(
    store: Store, key: str, rank: int, size: int, value: bytes, deadline: float
) -> set[bytes]:
    """Say `value` under `key`; return what all ranks say."""
    store.set(f"{key}/{rank}", value)

    def left() -> float:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise DistTimeoutError(f"not every rank has said {key!r} in time")
        return seconds

    return {store.get(f"{key}/{other}", left()) for other in range(size)}
