"""Descent: a communicator made out of another one, by ncclCommSplit or ncclCommShrink.

NCCL needs every rank of the new communicator for it, and the old one at rest.
A group's first use comes to each rank when it comes, so the ranks meet first,
each lends the old communicator if it can just then, and only where all do is it
used: else they make the new one from a fresh id.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import DistBackendError, DistTimeoutError
from .nccl_seam import Seam
from .store import Store

if TYPE_CHECKING:
    from .nccl_queue import NCCLQueue

__all__ = ["Descent"]

# Seconds between two looks at a communicator that is being made.
_NAP = 5e-4
_NO = b"no"


@dataclass(frozen=True)
class Descent:
    """Where the communicator of a group may come from, on one device of this rank.

    `queue` is that of the old communicator, ``None`` where this rank has none;
    `place` is its number among those of its group. `excluded` are the old
    ranks that are left out; none: all stay. With `abort`, NCCL ends what the
    old one is at, which is of no use afterwards. `release()` is called once
    the old one is no longer needed.
    """

    queue: NCCLQueue | None
    place: int
    excluded: tuple[int, ...]
    abort: bool
    release: Callable[[], None]

    def derive(
        self,
        seam: Seam,
        store: Store,
        rank: int,
        size: int,
        options: dict[str, Any],
        deadline: float,
        wanted: Callable[[], bool],
    ) -> Any | None:
        """Return the new communicator's handle, ``None`` if the ranks do not agree.

        Every rank of the new group calls it, with a `store` of that group's
        own. Blocks until ``time.monotonic()`` is `deadline`, and as long as
        ``wanted()``. What goes wrong once they have agreed is raised.
        """
        lent = False
        try:
            _meet(store, "came", rank, size, b"1", deadline)
            lent = self._lend(seam, options)
            mine = b"%d" % self.place if lent else _NO
            if _meet(store, "lends", rank, size, mine, deadline) != {mine} or not lent:
                return None
            handle = self._make(seam, rank, deadline, wanted)
            if self.abort:
                # The old one may be freed when nobody needs it any more.
                _meet(store, "made", rank, size, b"1", deadline)
            return handle
        finally:
            if lent and self.queue is not None:
                self.queue.take_back()
            self.release()

    def _lend(self, seam: Seam, options: dict[str, Any]) -> bool:
        if self.queue is None or (self.excluded and not seam.nccl.can_shrink):
            return False
        return self.queue.lend(options, abort=self.abort)

    def _make(
        self, seam: Seam, rank: int, deadline: float, wanted: Callable[[], bool]
    ) -> Any:
        queue, nccl = self.queue, seam.nccl
        assert queue is not None
        parent = queue.comm
        with parent.mutex, seam.cuda.device(parent.device):
            if self.excluded:
                made = nccl.shrink(parent.handle, self.excluded, abort=self.abort)
            else:
                made = nccl.split(parent.handle, rank)
        while True:
            # NCCL says through the old one how far it is, and what went wrong.
            with parent.mutex:
                if parent.poll() and nccl.ready(made):
                    return made
            why = ""
            if not wanted():
                why = f"{parent.name}: what was being made of it was aborted"
            elif time.monotonic() > deadline:
                why = f"{parent.name}: what was made of it was not there in time"
            if why:
                # Nothing else ends it.
                queue.fail(why)
                raise DistBackendError(why)
            time.sleep(_NAP)


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
