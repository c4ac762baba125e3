"""The rank's end of its side process: starting, commanding, hearing, killing it."""

from __future__ import annotations

import logging
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

from .errors import DistBackendError
from .gloo_child import Child
from .gloo_mailbox import Frames
from .gloo_protocol import (
    REPORT_BYTES,
    Kind,
    Progress,
    Report,
    Status,
    pack,
)
from .gloo_rendezvous import Rendezvous
from .gloo_work import GlooWork, Operation
from .poller import poller
from .shared import Segment, heap
from .store import Store

__all__ = ["SideProcess"]

_log = logging.getLogger(__name__)

# Shared memory that ops in flight may take for copies; the others wait for it.
_BUDGET = 256 << 20
# An orderly end is a matter of milliseconds.
_PATIENCE = 2.0

_alive: set[SideProcess] = set()


class SideProcess:
    """One process that runs gloo for one rank in one group.

    ``on_failure(reason)`` is called, on a thread of its own, if it ends unasked.
    """

    def __init__(
        self,
        library: str,
        store: Store,
        rank: int,
        size: int,
        on_failure: Callable[[str], None],
    ) -> None:
        self.rank = rank
        self._size = size
        self._library = library
        self._on_failure = on_failure
        self._channel, self._channel_end = _socket_pair()
        self._memory, self._memory_end = _socket_pair()
        rendezvous, self._rendezvous_end = _socket_pair()
        self._page_fd = os.memfd_create("rankscope-progress", os.MFD_CLOEXEC)
        os.ftruncate(self._page_fd, Progress.SIZE)
        self._page = mmap.mmap(self._page_fd, Progress.SIZE)
        self._progress = Progress(memoryview(self._page))
        self.frames = Frames(size)
        self._child = Child(f"the side process of rank {rank}")

        # Held while a message is made and sent, so that messages go in order.
        self._sending = threading.RLock()
        self._numbers = 0
        self._sequence = 0
        self._flying: dict[int, Operation] = {}
        self._started: dict[int, Operation] = {}  # collectives
        self._waiting: deque[Operation] = deque()  # for shared memory
        self._staged = 0
        self._known: set[Segment] = set()
        self._outbox: deque[bytes] = deque()  # the socket is full

        # Held by whoever reads the reports: one waiter, or the poller for the
        # Works that nobody waits for. Those are counted.
        self._reading = threading.Lock()
        self._detached = 0
        self._arming = threading.Lock()
        self._interest = 0
        self._inbox = bytearray(REPORT_BYTES)
        self._serial = 1
        self._receiving = False
        self._over: deque[tuple[Operation, Report]] = deque()  # Works to end
        self._ended = False

        self._life = threading.Lock()  # for what follows, and the progress page
        self._closing = False
        self._buried = False
        self._reason = ""  # why it ended, if nobody asked it to
        self._gone = threading.Event()

        _alive.add(self)
        self._rendezvous = Rendezvous(store, rank, size, rendezvous, self._fail)
        self._rendezvous.start()
        poller.call(self._spawn)

    # -- ops ---------------------------------------------------------------

    def submit(self, operation: Operation, *, collective: bool = True) -> None:
        """Send `operation` on its way; returns at once."""
        with self._sending:
            if self._ended:
                why = self._reason or f"the side process of rank {self.rank} has ended"
                operation.work.mark_failed(DistBackendError(why))
                return
            self._numbers += 1
            operation.number = self._numbers
            if collective:
                self._sequence += 1
                operation.sequence = self._sequence
            alone = not self._flying
            self._flying[operation.number] = operation
            if alone or (not self._waiting and self._fits(operation)):
                self._start(operation)
            else:
                self._waiting.append(operation)

    def wait(self, work: GlooWork, timeout: float | None) -> bool:
        """Block until `work` is over or `timeout` passed, reading reports meanwhile."""
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while work.pending:
                if not self._reading.acquire(blocking=False):
                    break  # somebody else reads
                try:
                    if self._interest & select.EPOLLIN:
                        self._update_interest()
                    if not self._receive(_left(deadline)):
                        break  # the time or the process is over
                finally:
                    self._reading.release()
                self._settle()
        finally:
            if work.pending:
                self.detach(work)
            elif self._detached:
                self._update_interest()
            if self._over or self._receiving:
                # An interrupt kept us, or somebody else is at it right now.
                poller.call(self._read_all)
        return work.is_completed() or work.block_on_event(_left(deadline))

    def detach(self, work: GlooWork) -> None:
        """Nobody waits for `work` now: the poller brings it on."""
        with self._arming:
            if work.detached or not work.pending:
                return
            work.detached = True
            self._detached += 1
        self._update_interest()

    def refresh(self) -> None:
        """Report to the Works in flight which of them have started."""
        with self._life:
            if self._buried:
                return
            last = self._progress.last_started
            begun = [
                (operation.work, self._progress.started_ns(number))
                for number, operation in list(self._flying.items())
                if number <= last
            ]
        for work, at_ns in begun:
            work.mark_started(at_ns or None)

    @property
    def connected(self) -> bool:
        """Whether the connections to all peers stand."""
        with self._life:
            return not self._buried and self._progress.connected

    # -- the end -----------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """The process id; ``None`` if it has not been started."""
        return self._child.pid

    def kill(self) -> None:
        """End it now, whatever it is doing; the Works are failed by the caller."""
        self._child.kill()
        self._rendezvous.stop()

    def close(self) -> None:
        """End it in good order: nothing is in flight."""
        connected = self.connected
        with self._life:
            self._closing = True
        if connected:
            with self._sending:
                self._send(pack(Kind.CLOSE))
        if not connected or not self._gone.wait(_PATIENCE):
            self.kill()
            self._gone.wait(_PATIENCE)
        self._rendezvous.join()

    def _fail(self, reason: str) -> None:
        """Something else than the process failed: end it, and say so then."""
        with self._life:
            if self._child.killed or self._closing:
                return
            self._reason = reason
        self.kill()

    def _announce(self, reason: str) -> None:
        # A thread of its own: it may talk to a store that does not answer.
        def announce() -> None:
            self._on_failure(reason)
            for operation in list(self._flying.values()):
                operation.work.mark_failed(DistBackendError(reason))

        threading.Thread(
            target=announce, name="rankscope-gloo-failure", daemon=True
        ).start()

    # -- sending (with _sending held) --------------------------------------

    def _fits(self, operation: Operation) -> bool:
        if self._staged and self._staged + operation.staged > _BUDGET:
            return False  # one op alone always fits; otherwise it would never run
        if not operation.has_room():
            return False
        # What a collective before it is going to write must be there to be read.
        return not operation.inputs or not any(
            operation.reads(each.written()) for each in list(self._started.values())
        )

    def _start(self, operation: Operation) -> None:
        if operation.sequence:
            self._started[operation.number] = operation
        self._staged += operation.staged
        message = operation.start()
        for segment in operation.segments():
            if segment not in self._known:
                self._introduce(segment)
        self._send(message)
        for chunk in operation.credits():
            self._send(pack(Kind.CREDIT, number=operation.number, extra=chunk))

    def _introduce(self, segment: Segment) -> None:
        self._known.add(segment)
        try:
            socket.send_fds(
                self._memory,
                [struct.pack("=QQ", segment.number, segment.size)],
                [segment.fd],
            )
        except (BrokenPipeError, ConnectionResetError):
            return  # it has died, and the poller is about to see it

    def _send(self, message: bytes) -> None:
        if not self._outbox:
            try:
                self._channel.send(message, socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass  # it is busy: the poller tells when there is room
            except (BrokenPipeError, ConnectionResetError):
                return  # it has died, and the poller is about to see it
            else:
                return
        self._outbox.append(message)
        self._update_interest()

    def _flush(self) -> None:
        """There is room again; on the poller's thread."""
        with self._sending:
            waiting, self._outbox = self._outbox, deque()
            for message in waiting:
                self._send(message)
        self._update_interest()

    # -- hearing (by whoever holds _reading) -------------------------------

    def _update_interest(self) -> None:
        """Tell the poller what to look for."""
        with self._arming:
            interest = select.EPOLLOUT if self._outbox else 0
            if self._detached and not self._reading.locked():
                interest |= select.EPOLLIN
            if interest != self._interest:
                self._interest = interest
                poller.change(self._channel.fileno(), interest)

    def _receive(self, timeout: float | None) -> bool:
        """Take in one report; ``False`` if none came in time or none will come."""
        if self._ended:
            return False
        if not self._receiving or not self._unread():
            if timeout is not None and not self._readable(timeout):
                return False
            # An interrupt may come right after the call, or later. Then the
            # report is in the inbox, and its serial number tells that it is new.
            self._receiving = True
            try:
                count = self._channel.recv_into(self._inbox)
            except ConnectionResetError:
                count = 0  # it died with commands unread
            if not count:
                self._ended = True
                return False
        self._dispatch()
        self._receiving = False
        return True

    def _readable(self, timeout: float) -> bool:
        poll = select.poll()  # select() ends at descriptor 1023
        poll.register(self._channel, select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def _unread(self) -> bool:
        return Report.unpack(self._inbox).serial == self._serial

    def _dispatch(self) -> None:
        report = Report.unpack(self._inbox)
        operation = self._flying.get(report.number)
        # It is gone if an interrupt has this called with the same report again.
        if operation is not None:
            if report.status == Status.CHUNK:
                following = operation.chunk_done(report.extra)
                if following is not None:
                    with self._sending:
                        self._send(
                            pack(Kind.CREDIT, number=report.number, extra=following)
                        )
            else:
                operation.collect(report)
                self._over.append((operation, report))
                self._forget(operation)
        self._serial += 1

    def _forget(self, operation: Operation) -> None:
        operation.release()
        work = operation.work
        with self._arming:
            work.pending = False
            if work.detached:
                self._detached -= 1
        self._started.pop(operation.number, None)
        del self._flying[operation.number]
        if operation.staged or self._waiting:
            with self._sending:
                self._staged -= operation.staged
                while self._waiting and self._fits(self._waiting[0]):
                    self._start(self._waiting.popleft())

    def _settle(self) -> None:
        """End the Works whose ops are over.

        Without _reading, since their callbacks may wait for others. An entry
        is taken away when it has been dealt with, so an interrupt loses none.
        """
        while self._over:
            try:
                entry = self._over[0]
            except IndexError:
                return  # another thread was faster
            operation, report = entry
            operation.finish(report)
            try:
                self._over.remove(entry)
            except ValueError:
                continue  # another thread has ended it at the same time

    # -- on the poller's thread --------------------------------------------

    def _spawn(self) -> None:
        ends = [self._channel_end, self._memory_end, self._rendezvous_end]
        descriptors = [end.fileno() for end in ends]
        descriptors += [self._page_fd, self.frames.fd]
        parent = os.getpid()
        try:
            self._child.start(
                [*descriptors, parent, self.rank, self._size, self._library],
                descriptors,
            )
        except OSError as error:
            self._fail(f"the side process of rank {self.rank} did not start: {error}")
        finally:
            for end in ends:
                end.close()
        # Without a process the other end is closed: the same end as any other.
        with self._arming:
            poller.watch(self._channel.fileno(), self._on_event, self._interest)

    def _on_event(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush()
        if events & (select.EPOLLHUP | select.EPOLLERR):
            self._bury()
        elif events & select.EPOLLIN:
            self._read_all()

    def _read_all(self) -> None:
        more = True
        while more and self._reading.acquire(blocking=False):
            try:
                more = self._receive(0)
            finally:
                self._reading.release()
            self._settle()
        # Either nobody reads now, or a waiter does and wakes us when it leaves.
        self._update_interest()

    def _bury(self) -> None:
        """The process has closed its end: hear the rest, reap it, say why."""
        poller.forget(self._channel.fileno())
        # A waiter that leads sees the same end and leaves.
        self._read_all()
        while not self._ended:
            time.sleep(0.001)
            self._read_all()
        end = self._child.reap()
        with self._life:
            if not (self._reason or self._child.killed or self._closing):
                self._reason = end
            self._buried = True
            self._progress.release()
            self._page.close()
            os.close(self._page_fd)
        self._rendezvous.stop()
        with self._sending:
            self._channel.close()
            self._memory.close()
            for operation in self._flying.values():
                operation.release()
            self.frames.release()
        _alive.discard(self)
        if not _alive:
            heap.trim()
        if self._reason:
            self._announce(self._reason)
        self._gone.set()


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    # Packets: a message arrives whole, and the end of one end shows at the other.
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
