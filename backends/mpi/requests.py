"""The MPI requests of Works: posting them, and making them advance.

MPI advances only inside its calls. So a thread that waits for a Work drives the
queue of its group; for Works that no thread waits for, `progress` does.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import DistBackendError, DistError
from ..rank_sets import name_ranks
from ..work.op_type import OpType
from ..work.work import Work
from . import job
from .algorithms import SEND, Schedule, Transfer
from .progress import progress

__all__ = ["ANY_SOURCE", "MPIQueue", "MPIWork"]

#: As the peer of a receive: from any rank (MPI's own constant depends on the MPI).
ANY_SOURCE = -1

_log = logging.getLogger(__name__)

# A member's look-up on its class is slow before Python 3.11.
_RECV_OP = OpType.RECV

# Larger arrays are sent as several messages: MPI counts with 32 bits.
_MESSAGE = 1 << 30

# A waiter spins (yielding the core) for _SPIN seconds after the last progress,
# longer for large messages; then it takes naps, which grow: a rank that waits for
# a late one leaves the core to it.
_SPIN = 0.002
_SPIN_PER_BYTE = 2e-9
_NAP, _NAP_MAX = 2e-5, 5e-4
# The number of tests before it yields: a turn of its loop takes longer than the
# few microseconds that a small message needs.
_TESTS = 16

# Of aborted groups: requests that MPI has not completed or cancelled yet, and the
# memory that they may still read or write. See MPIQueue.abandon.
_abandoned: list[tuple[Any, Any]] = []


class MPIWork(Work):
    """A schedule of messages in flight."""

    __slots__ = ("nbytes", "queue", "requests", "schedule", "source", "tag")

    def __init__(
        self,
        queue: MPIQueue,
        op_type: OpType,
        schedule: Schedule,
        tag: int,
        nbytes: int,
        result: Any = None,
    ) -> None:
        super().__init__(op_type, result)
        self.queue = queue
        self.schedule = schedule
        self.tag = tag
        self.nbytes = nbytes
        # What the present stage still waits for: the request, the bytes to be
        # received (-1: a send), and the array, which must stay alive.
        self.requests: list[tuple[Any, int, Any]] = []
        # The sender of what was received last.
        self.source = -1

    def detach(self) -> None:
        """Have the process's thread drive it, as no thread waits for it."""
        if not self.is_completed():
            progress.add(self.queue)

    def _block(self, timeout: float | None) -> bool:
        clock = time.monotonic
        deadline = float("inf") if timeout is None else clock() + timeout
        queue = self.queue
        patience = _SPIN + self.nbytes * _SPIN_PER_BYTE
        nap, idle_from = _NAP, clock()
        queue.waiting.add(me := threading.get_ident())
        try:
            while True:
                moved = queue.advance(_TESTS)
                if self.is_completed():
                    return True
                now = clock()
                if now >= deadline:
                    break
                if not queue.opened.is_set():
                    queue.opened.wait(min(0.1, deadline - now))
                    idle_from = clock()
                elif moved:
                    nap, idle_from = _NAP, now
                elif now - idle_from < patience:
                    os.sched_yield()
                else:
                    time.sleep(min(nap, deadline - now))
                    nap = min(1.5 * nap, _NAP_MAX)
        except BaseException:
            # An interrupt: the op continues, and other ranks depend on it.
            self.detach()
            raise
        finally:
            queue.waiting.discard(me)
        self.detach()
        return False


class MPIQueue:
    """The ops of one group on this rank, over one communicator.

    Collectives run one at a time in the order of issue, as one may read the
    result of the one before it. Sends and receives start at once, beside them.
    """

    def __init__(self, fail: Callable[[str | DistError], None]) -> None:
        self.opened = threading.Event()
        #: The threads that drive this queue because they wait for one of its Works.
        self.waiting = set[int]()
        self._fail = fail
        self._lock = threading.Lock()
        self._mpi: Any = None
        self._comm: Any = None
        self._status: Any = None
        self._byte: Any = None
        self._collectives: collections.deque[MPIWork] = collections.deque()
        self._messages: list[MPIWork] = []
        # The Work whose schedule is being resumed; see _fail_after.
        self._resumed: MPIWork | None = None
        self._closed = False
        # MPI forgets a request that failed, which then looks as if it had
        # arrived: after the first error nothing advances.
        self._broken = False

    def open(self, comm: Any) -> None:
        """Start the ops issued meanwhile, over `comm` (``None``: a group of one)."""
        with self._lock:
            if self._closed:
                return
            self._comm = comm
            if comm is not None:
                self._mpi = job.initialise()
                self._status, self._byte = self._mpi.Status(), self._mpi.BYTE
            self.opened.set()
        self.advance()

    def submit(self, work: MPIWork, message: bool) -> None:
        """Start `work`: after the other collectives, or, if a `message`, at once."""
        with self._lock:
            if self._closed:
                raise DistBackendError("the communicator of the group was abandoned")
            if message:
                self._messages.append(work)
            else:
                self._collectives.append(work)
        self.advance()

    @property
    def busy(self) -> bool:
        """Whether anything is in flight."""
        return bool(self._collectives or self._messages)

    def advance(self, tests: int = 1) -> bool:
        """Advance without blocking; return whether any op progressed.

        Any thread may call this; while one does, calls of others do nothing. Each
        message is tested `tests` times, at 0.3 µs each.
        """
        if not self.opened.is_set() or not self._lock.acquire(blocking=False):
            return False
        over: list[MPIWork] = []
        broken: BaseException | None = None
        moved = False
        try:
            if self._broken:
                return False
            if self._messages:
                for work in list(self._messages):
                    if self._step(work, 1):
                        self._messages.remove(work)
                        over.append(work)
            queue = self._collectives
            while queue:
                work = queue[0]
                posted = len(work.requests)
                done = self._step(work, tests)
                moved = moved or done or len(work.requests) != posted
                if not done:
                    break
                queue.popleft()
                over.append(work)
        except BaseException as error:  # noqa: BLE001 - it ends every Work
            broken = error
            self._broken = isinstance(error, Exception) or self._resumed is not None
        finally:
            self._lock.release()
        for work in over:
            work.mark_completed(work.source if work.op_type is _RECV_OP else None)
        if broken is not None:
            self._fail_after(broken)
        return moved or bool(over)

    def _step(self, work: MPIWork, tests: int) -> bool:
        """Resume `work` as far as its messages allow; return whether it is over."""
        if not work.started_ns:
            work.mark_started()
        while True:
            if work.requests and not self._arrived(work, tests):
                return False
            self._resumed = work
            stage = next(work.schedule, None)
            if stage is not None:
                self._post(work, stage)
            self._resumed = None
            if stage is None:
                return True

    def _post(self, work: MPIWork, stage: list[Transfer]) -> None:
        comm, byte = self._comm, self._byte
        is_message = work.op_type.is_p2p
        for kind, peer, array in stage:
            if not array.size and not is_message:
                continue
            nbytes = array.nbytes
            for piece in (array,) if nbytes <= _MESSAGE else _pieces(array):
                if kind is SEND:
                    request = comm.Isend([piece, byte], peer, work.tag)
                    work.requests.append((request, -1, piece))
                else:
                    source = self._mpi.ANY_SOURCE if peer == ANY_SOURCE else peer
                    request = comm.Irecv([piece, byte], source, work.tag)
                    work.requests.append((request, piece.nbytes, piece))

    def _arrived(self, work: MPIWork, tests: int) -> bool:
        """Return whether all messages of the present stage have completed."""
        requests, status = work.requests, self._status
        while requests:
            request, expected, _ = requests[-1]
            # A null request had completed before an interrupt.
            if request:
                for _ in range(tests):
                    if request.Test(status):
                        break
                else:
                    return False
                if expected >= 0:
                    came = status.Get_count(self._byte)
                    if came != expected or work.op_type is _RECV_OP:
                        work.source = status.Get_source()
                    if came != expected:
                        raise DistBackendError(
                            f"rank {work.source} sent {came} bytes where "
                            f"{expected} were expected: the arrays' sizes differ "
                            "between ranks"
                        )
            requests.pop()
        return True

    def _fail_after(self, error: BaseException) -> None:
        """Fail the group after `error`; re-raise an interrupt that broke nothing."""
        work, self._resumed = self._resumed, None
        if not isinstance(error, Exception) and work is None:
            raise error
        # Otherwise a schedule was interrupted and would look as if it had ended.
        culprit = work or next(iter([*self._messages, *self._collectives]), None)
        reason = self._explain(error)
        # The group first, whose abort ends the Works: a thread that waits for one
        # may rebuild the group at once, and the other ranks would not be informed.
        self._fail(reason)
        if culprit is not None:
            cause = DistBackendError(f"{culprit.describe()} failed: {reason}")
            cause.__cause__ = error
            culprit.mark_failed(cause)
        if not isinstance(error, Exception):
            raise error

    def _explain(self, error: BaseException) -> str | DistError:
        """Return the reason; that of a death has the dead ranks as culprits."""
        mpi = self._mpi
        if mpi is None or not isinstance(error, mpi.Exception):
            return str(error) or type(error).__name__
        kind = error.Get_error_class()
        if kind == mpi.ERR_TRUNCATE:
            return (
                "a rank sent more than was expected: the arrays' sizes differ "
                "between ranks"
            )
        if kind == getattr(mpi, "ERR_PROC_FAILED", None):
            dead = self._dead_ranks()
            who = name_ranks(dead) if dead else "a rank"
            return DistBackendError(f"the process of {who} died", culprits=dead)
        return f"MPI reports {error.Get_error_string()}"

    def _dead_ranks(self) -> list[int]:
        """Return the dead ranks of the group, as far as MPI knows by now."""
        failed, members = self._comm.Get_failed(), self._comm.Get_group()
        return list(failed.Translate_ranks(None, members))

    def abandon(self) -> None:
        """Refuse further ops and abandon those in flight; waits for no other rank.

        Receives are cancelled, so that nothing more is written to the arrays. A
        request that MPI does not complete at once (a message half received, a
        send that was never received) is kept, with its memory, until it does.
        """
        job.note_abort()
        # Bounded, as this may be a signal handler that interrupted advance().
        locked = self._lock.acquire(timeout=1.0)
        try:
            self._closed = True
            works = [*self._collectives, *self._messages]
            self._collectives.clear()
            self._messages.clear()
            for work in works:
                for request, expected, array in work.requests:
                    _abandoned.append((request, array))
                    if request and expected >= 0:
                        request.Cancel()
                work.requests.clear()
        finally:
            if locked:
                self._lock.release()
        self.opened.set()
        _sweep()

    def close(self) -> None:
        """Free the communicator: nothing is in flight."""
        with self._lock:
            self._closed = True
            comm, self._comm = self._comm, None
        if comm is not None:
            try:
                comm.Free()
            except job.mpi_error() as error:
                # A member died in the meantime; its memory is all that is lost.
                _log.debug("a communicator could not be freed: %s", error)


def _pieces(array: Any) -> list[Any]:
    """Cut the flat `array` into messages whose bytes MPI can count."""
    view = array.view(np.uint8)
    return [view[start : start + _MESSAGE] for start in range(0, view.size, _MESSAGE)]


def _sweep() -> None:
    """Forget the abandoned requests that MPI has completed."""
    _abandoned[:] = [entry for entry in _abandoned if not _is_over(entry[0])]


def _is_over(request: Any) -> bool:
    try:
        return not request or bool(request.Test())
    except job.mpi_error():
        # Its peer died: the request ended with that error.
        return True
