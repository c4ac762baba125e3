"""Reading the side process's reports, on whichever thread waits for one."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from .channel import Channel
from .fd_poller import FdPoller
from .operations import Operation
from .side.wire import REPORT_BYTES, Report, Status
from .work import GlooWork

__all__ = ["COPY_WAIT", "ReportReader"]

#: Seconds that an abort waits for a copy under way: it takes milliseconds.
COPY_WAIT = 0.5


class ReportReader:
    """Reads reports, completes their ops, and ends the Works.

    One thread reads at a time: a thread that waits for a Work, or the poller
    for Works that no thread waits for. A waiting thread that finds another one
    reading waits for its Work's event.

    ``grant(number, chunk)`` is called when op `number` has room for a further
    chunk, ``remove(operation)`` when an op is over. Both may be called again
    with the same arguments: a `KeyboardInterrupt` can break off the handling
    of a report at any point, and the report is then handled once more.
    """

    def __init__(
        self,
        channel: Channel,
        poller: FdPoller,
        in_flight: Mapping[int, Operation],
        grant: Callable[[int, int], None],
        remove: Callable[[Operation], None],
    ) -> None:
        self._channel = channel
        self._poller = poller
        self._in_flight = in_flight
        self._grant = grant
        self._remove = remove
        #: Whether the stream of reports has ended.
        self.ended = False
        self._reading = threading.Lock()  # held by the thread that reads
        # Held while arrays of the caller are read or written. Reentrant: a callback of
        # a Work that fails in it may abort the group.
        self._copying = threading.RLock()
        self._copies = True
        self._inbox = bytearray(REPORT_BYTES)
        self._serial = 1  # of the report to be handled next
        self._receiving = False
        self._completed: deque[tuple[Operation, Report]] = deque()  # Works to end
        self._on_end: Callable[[], None] | None = None
        # Works that no thread waits for and whose report has not been read.
        self._detached = 0
        self._detach_lock = threading.Lock()

    # -- by the threads that use Works -------------------------------------

    def drive(self, work: GlooWork, timeout: float | None) -> None:
        """Read reports until that of `work` has come; see `Waiter`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while work.pending:
                if not self._reading.acquire(blocking=False):
                    break  # another thread reads
                try:
                    if self._channel.wants_input:
                        self._update_interest()
                    if not self._receive(deadline):
                        break  # the time or the stream is over
                finally:
                    self._reading.release()
                self._end_works()
        finally:
            if work.pending:
                self.detach(work)
            elif self._detached:
                self._update_interest()
            if self._completed or self._receiving or self._on_end is not None:
                # An interrupt left a report half handled, another thread is
                # reading right now, or `finish` waits for this thread.
                self._poller.call(self.read_all)

    def detach(self, work: GlooWork) -> None:
        """Have the poller read the report of `work`, as no thread waits for it."""
        with self._detach_lock:
            if work.detached or not work.pending:
                return
            work.detached = True
            self._detached += 1
        self._update_interest()

    def stop_copies(self) -> None:
        """Return when no array of the caller is being copied; copy none from now on.

        An abort calls it: the arrays belong to the caller again when it returns. A
        report that is read later ends no Work, since its results are not copied. A
        thread that stands still in a copy is waited for `COPY_WAIT` seconds: no abort
        may hang.
        """
        self._copies = False
        if self._copying.acquire(timeout=COPY_WAIT):
            self._copying.release()

    # -- on the poller's thread --------------------------------------------

    def read_all(self) -> None:
        """Read what has come, unless another thread reads."""
        more = True
        while more and self._reading.acquire(blocking=False):
            try:
                more = self._receive(deadline=0)
            finally:
                self._reading.release()
            self._end_works()
        on_end = self._on_end
        if self.ended and on_end is not None:
            self._on_end = None
            on_end()
        else:
            # Either no thread reads now, or one does and calls this when it stops.
            self._update_interest()

    def finish(self, on_end: Callable[[], None]) -> None:
        """Call ``on_end()`` on the poller's thread once all reports are handled.

        The other end of the socket is closed and the poller watches the socket
        no more. A thread that is reading now has `read_all` called when it
        stops: the poller does not wait for it.
        """
        self._on_end = on_end
        self.read_all()

    # -- one report (by the thread that holds _reading) --------------------

    def _receive(self, deadline: float | None) -> bool:
        """Handle one report; ``False`` if none came in time or none will come."""
        if self.ended:
            return False
        # After an interrupt a report may lie in the inbox: its serial number
        # shows whether it has been handled.
        if not self._receiving or Report.unpack(self._inbox).serial != self._serial:
            if deadline is not None:
                left = max(0.0, deadline - time.monotonic())
                if not self._channel.readable(left):
                    return False
            self._receiving = True
            if not self._channel.receive_into(self._inbox):
                self.ended = True
                return False
        self._handle(Report.unpack(self._inbox))
        self._receiving = False
        return True

    def _handle(self, report: Report) -> None:
        operation = self._in_flight.get(report.number)
        # It is gone if an interrupt has this called with the same report again.
        if operation is not None:
            if report.status == Status.CHUNK:
                following = None
                with self._copying:
                    if self._copies:
                        following = operation.chunk_done(report.extra)
                if following is not None:
                    self._grant(report.number, following)
            else:
                with self._copying:
                    if self._copies:
                        operation.collect(report)
                        self._completed.append((operation, report))
                operation.release()
                work = operation.work
                with self._detach_lock:
                    if work.pending and work.detached:
                        self._detached -= 1
                    work.pending = False
                self._remove(operation)
        self._serial += 1

    def _end_works(self) -> None:
        """End the Works whose ops are over.

        Without _reading, since their callbacks may wait for other Works. An
        entry is removed after it has been handled, so an interrupt loses none.
        """
        while self._completed:
            try:
                entry = self._completed[0]
            except IndexError:
                return  # another thread was faster
            operation, report = entry
            operation.finish(report)
            try:
                self._completed.remove(entry)
            except ValueError:
                continue  # another thread has ended it at the same time

    def _update_interest(self) -> None:
        """Have the poller report input if it is the one to read it."""
        with self._detach_lock:
            self._channel.want_input(self._detached > 0 and not self._reading.locked())
