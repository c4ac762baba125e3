"""The rank's end of its side process: starting, commanding and ending it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Callable

from ..devices.shared_memory import Segment, heap
from ..errors import ConnectionLostError, DistBackendError, DistError
from ..stores.base import Store
from .admission import Admission
from .channel import Channel
from .child import Child
from .eager import EagerBuffers
from .fd_poller import poller
from .library import Library
from .lost_connection import connection_lost
from .memfd import MappedMemfd
from .operations import Operation
from .rendezvous import Rendezvous
from .report_reader import ReportReader
from .side.wire import Command, Kind, Progress

__all__ = ["SideProcess"]

# An orderly end is a matter of milliseconds.
_SHUTDOWN_SECONDS = 2.0

_alive: set[SideProcess] = set()


class SideProcess:
    """One process that runs gloo for one rank in one group.

    ``on_failure(cause)`` is called, on a thread of its own, if it ends unasked: with a
    `ConnectionLostError` where gloo says so, else with a sentence.
    Raises `OSError` if the system refuses a descriptor or memory.
    """

    def __init__(
        self,
        library: Library,
        store: Store,
        rank: int,
        size: int,
        on_failure: Callable[[str | DistError], None],
    ) -> None:
        self.rank = rank
        self._size = size
        self._library = library
        #: gloo's name of its transport.
        self.transport = library.transport
        self._on_failure = on_failure
        # Held while a message is made and sent, so that messages go in order. A
        # signal handler may issue an op in the middle of another: hence an RLock.
        self._sending = threading.RLock()
        self._numbers = 0
        self._sequence = 0
        self._known_segments: set[Segment] = set()
        self._admission = Admission()
        # Held for what follows, and for the progress page.
        self._state_lock = threading.Lock()
        self._closing = False
        self._released = False
        # Why it ended, if it was not asked to.
        self._cause: str | ConnectionLostError = ""
        self._gone = threading.Event()

        with contextlib.ExitStack() as undo:
            commands, self._commands_end = _socket_pair(undo)
            self._memory, self._memory_end = _socket_pair(undo)
            rendezvous, self._rendezvous_end = _socket_pair(undo)
            self._page = MappedMemfd("rankscope-progress", Progress.SIZE)
            undo.callback(self._page.close)
            self._progress = Progress(memoryview(self._page.map))
            undo.callback(self._progress.release)
            self.eager_buffers = EagerBuffers(size)
            undo.callback(self.eager_buffers.release)
            self._child = Child(f"the side process of rank {rank}")
            undo.callback(self._child.close)
            self._channel = Channel(commands, poller)
            self.reader = ReportReader(
                self._channel,
                poller,
                self._admission.in_flight,
                self._grant_chunk,
                self._remove,
            )
            self._rendezvous = Rendezvous(
                store, rank, size, str(library), rendezvous, self._fail
            )
            self._rendezvous.start()
            undo.callback(self._rendezvous.stop)
            poller.call(self._spawn)
            undo.pop_all()
        _alive.add(self)

    # -- ops ---------------------------------------------------------------

    def submit(self, operation: Operation, *, collective: bool = True) -> None:
        """Start `operation` as soon as it can run; returns at once."""
        with self._sending:
            if self.reader.ended:
                cause = self._cause or f"the side process of rank {self.rank} has ended"
                operation.work.mark_failed(_as_error(cause))
                return
            self._numbers += 1
            operation.number = self._numbers
            if collective:
                self._sequence += 1
                operation.sequence = self._sequence
            if not self._admission.add(operation):
                return
            try:
                self._start(operation)
            except Exception:
                self._withdraw(operation)
                raise

    def _withdraw(self, operation: Operation) -> None:
        """Forget an op that did not start (with _sending held)."""
        self._admission.remove(operation)
        operation.release()
        # Without a gap: the sequence matches the next op with those of the other
        # ranks. An op of a signal handler may have taken the next number.
        if operation.number == self._numbers:
            self._numbers -= 1
            self._sequence -= bool(operation.sequence)

    def refresh(self) -> None:
        """Mark the Works in flight as started whose ops have started."""
        with self._state_lock:
            if self._released:
                return
            last = self._progress.last_started
            started = [
                (operation.work, self._progress.started_ns(number))
                for number, operation in list(self._admission.in_flight.items())
                if number <= last
            ]
        for work, at_ns in started:
            work.mark_started(at_ns or None)

    @property
    def connected(self) -> bool:
        """Whether the process is connected to all peers."""
        with self._state_lock:
            return not self._released and self._progress.connected

    # -- the end -----------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """The process id; ``None`` if it has not been started."""
        return self._child.pid

    def kill(self) -> None:
        """End it now, in whatever state it is; the caller fails the Works."""
        self._child.kill()
        self._rendezvous.stop()

    def close(self) -> None:
        """End it in good order: nothing is in flight."""
        connected = self.connected
        with self._state_lock:
            self._closing = True
        if connected:
            with self._sending:
                self._channel.send(Command(Kind.CLOSE).pack())
        if not connected or not self._gone.wait(_SHUTDOWN_SECONDS):
            self.kill()
            self._gone.wait(_SHUTDOWN_SECONDS)
        self._rendezvous.join()

    def _fail(self, reason: str) -> None:
        """Kill it because of `reason`, which is reported when it has ended."""
        with self._state_lock:
            if self._child.killed or self._closing:
                return
            self._cause = reason
        self.kill()

    def _announce(self, cause: str | ConnectionLostError) -> None:
        # On a thread of its own: a store that does not answer may block it.
        def announce() -> None:
            self._on_failure(cause)
            for operation in list(self._admission.in_flight.values()):
                operation.work.mark_failed(_as_error(cause))

        threading.Thread(
            target=announce, name="rankscope-gloo-failure", daemon=True
        ).start()

    # -- sending -----------------------------------------------------------

    def _start(self, operation: Operation) -> None:
        """Send an admitted op (with _sending held)."""
        message = operation.start()
        for segment in operation.segments():
            if segment not in self._known_segments:
                self._send_segment(segment)
        self._channel.send(message)
        for chunk in operation.credits():
            self._grant_chunk(operation.number, chunk)

    def _send_segment(self, segment: Segment) -> None:
        self._known_segments.add(segment)
        try:
            socket.send_fds(
                self._memory,
                [struct.pack("=QQ", segment.number, segment.size)],
                [segment.fd],
            )
        except (BrokenPipeError, ConnectionResetError):
            return  # the process has ended; the poller reports it

    def _grant_chunk(self, number: int, chunk: int) -> None:
        """Announce that op `number` has room for `chunk`."""
        with self._sending:
            command = Command(Kind.CREDIT, number=number, extra=chunk)
            self._channel.send(command.pack())

    def _remove(self, operation: Operation) -> None:
        """Start what `operation`, which is over, has held up."""
        with self._sending:
            waiting = self._admission.remove(operation)
            while waiting and (following := self._admission.next()) is not None:
                try:
                    self._start(following)
                except (MemoryError, OSError) as error:
                    # The other ranks wait for the op, whose caller is long gone.
                    self._fail(f"no memory for {following.work.describe()}: {error}")
                    return

    # -- on the poller's thread --------------------------------------------

    def _spawn(self) -> None:
        ends = [self._commands_end, self._memory_end, self._rendezvous_end]
        descriptors = [end.fileno() for end in ends]
        descriptors += [self._page.fd, self.eager_buffers.fd]
        parent = os.getpid()
        try:
            self._child.start(
                [
                    *(*descriptors, parent, self.rank, self._size),
                    *(self._library.name, self._library.path),
                ],
                descriptors,
            )
        except OSError as error:
            self._fail(f"the side process of rank {self.rank} did not start: {error}")
        finally:
            for end in ends:
                end.close()
        # Without a process the other end is closed: the same end as any other.
        self._channel.watch(self._on_event)

    def _on_event(self, events: int) -> None:
        # A hang-up may be reported before there is room: a flush then drops what waits.
        if events & (select.EPOLLOUT | select.EPOLLHUP):
            with self._sending:
                self._channel.flush()
        if events & (select.EPOLLHUP | select.EPOLLERR):
            self._channel.unwatch()
            self.reader.finish(self._on_child_exit)
        elif events & select.EPOLLIN:
            self.reader.read_all()

    def _on_child_exit(self) -> None:
        """Reap the process, release what it used, and report why it ended."""
        end = self._child.reap()
        with self._state_lock:
            if not (self._cause or self._child.killed or self._closing):
                self._cause = connection_lost(end, self._rendezvous.addresses) or end
            self._released = True
            self._progress.release()
            self._page.close()
        self._rendezvous.stop()
        with self._sending:
            self._channel.close()
            self._memory.close()
            for operation in self._admission.in_flight.values():
                operation.release()
            self.eager_buffers.release()
        _alive.discard(self)
        if not _alive:
            heap.trim()
        if self._cause:
            self._announce(self._cause)
        self._gone.set()


def _as_error(cause: str | ConnectionLostError) -> DistBackendError:
    return DistBackendError(cause) if isinstance(cause, str) else cause


def _socket_pair(undo: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    # Packets: a message arrives whole, and closing one end shows at the other.
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return undo.enter_context(near), undo.enter_context(far)
