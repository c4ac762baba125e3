"""The side process of one rank in one group: the only place where gloo runs.

`Child` starts it without site-packages and without importing the package, which
makes the start fast. It reads commands of its rank from a socket, runs them on
memory that it shares with the rank, and reports. Killing it ends a hung
collective; an exception in gloo ends it, too, and the rank reads the last lines
of its output.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import termios
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from .abi import Gloo
from .collectives import Collectives, Region
from .eager import EagerCollectives
from .libraries import LIBRARIES
from .messages import Messages, Outcome
from .pipeline import Whole
from .wire import (
    MESSAGE_BYTES,
    Command,
    EagerLayout,
    Kind,
    Piece,
    Progress,
    Report,
    Status,
    Transfer,
)

__all__ = ["main"]

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


class _Segments:
    """The rank's shared memory; a segment is mapped when a command first names it."""

    def __init__(self, memory: socket.socket) -> None:
        self._memory = memory
        # Number 0 stands for no memory at all.
        self._maps: dict[int, tuple[Any, Any, int]] = {0: (None, None, 0)}

    def address(self, number: int, offset: int) -> int:
        while number not in self._maps:
            self._map_next()
        return self._maps[number][2] + offset

    def _map_next(self) -> None:
        message, fds, _, _ = socket.recv_fds(self._memory, 16, 1)
        if not message:
            os._exit(0)  # the rank is gone
        number, size = struct.unpack("=QQ", message)
        mapped = mmap.mmap(fds[0], size)
        os.close(fds[0])
        pin = ctypes.c_char.from_buffer(mapped)
        self._maps[number] = (mapped, pin, ctypes.addressof(pin))


class _WaitingThreads:
    """Threads that each wait for one message; as many as messages in flight."""

    def __init__(self) -> None:
        self._todo: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        threading.stack_size(256 << 10)

    def run(self, wait: Callable[[], None]) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                threading.Thread(target=self._work, daemon=True).start()
        self._todo.put(wait)

    def _work(self) -> None:
        while True:
            _exit_on_error(self._todo.get())
            with self._lock:
                self._idle += 1


class Server:
    """Reads commands, runs them in order, and reports."""

    def __init__(
        self,
        channel: socket.socket,
        memory: socket.socket,
        progress: Progress,
        eager_memory: mmap.mmap,
        gloo: Gloo,
    ) -> None:
        self._channel = channel
        self._progress = progress
        self._eager_pin: Any = ctypes.c_char.from_buffer(eager_memory)
        self._eager = EagerCollectives(
            gloo, memoryview(eager_memory), ctypes.addressof(self._eager_pin)
        )
        self._collectives = Collectives(gloo)
        self._messages = Messages(gloo)
        self._segments = _Segments(memory)
        self._waiting_threads = _WaitingThreads()
        self._inbox = bytearray(MESSAGE_BYTES)
        self._inbox_view = memoryview(self._inbox)
        # Commands read while an op was waiting for a chunk.
        self._later: deque[bytes] = deque()
        #: The last chunk that the rank has made room for, by op.
        self.granted: dict[int, int] = {}
        self._report_lock = threading.Lock()
        self._reports = 0

    def serve(self) -> None:
        """Run until the rank sends CLOSE; exit if the rank is gone."""
        while True:
            if self._later:
                message = memoryview(self._later.popleft())
            else:
                count = self._channel.recv_into(self._inbox)
                if not count:
                    os._exit(0)  # the rank is gone
                message = self._inbox_view[:count]
            command = Command.unpack(message)
            started = time.time_ns()
            kind = command.kind
            if kind == Kind.EAGER:
                self._progress.start(command.number, started)
                self._eager.run(command)
                self.report(command.number, Status.DONE, started, time.time_ns())
                self._eager.post(command)
            elif kind in (Kind.SEND, Kind.RECV):
                self._progress.start(command.number, started)
                self._post(command, started)
            elif kind == Kind.CREDIT:
                self.granted[command.number] = command.extra
            elif kind == Kind.CLOSE:
                return
            else:
                self._progress.start(command.number, started)
                self._run(command, message)
                self.report(command.number, Status.DONE, started, time.time_ns())

    def read(self, *, wait: bool) -> None:
        """Read one message; raises `BlockingIOError` if there is none."""
        message = self._channel.recv(MESSAGE_BYTES, 0 if wait else socket.MSG_DONTWAIT)
        if not message:
            os._exit(0)  # the rank is gone
        if message[0] == Kind.CREDIT:
            credit = Command.unpack(memoryview(message))
            self.granted[credit.number] = credit.extra
        else:
            self._later.append(message)

    def _run(self, command: Command, message: memoryview) -> None:
        collectives, kind = self._collectives, command.kind
        address = self._segments.address(command.segment, command.offset)
        chunks = _Slots(self, command.number) if command.extra else Whole()
        if kind == Kind.ALL_REDUCE:
            collectives.reduce(command, address, None, chunks)
        elif kind == Kind.REDUCE:
            collectives.reduce(command, address, command.peer, chunks)
        elif kind == Kind.BROADCAST:
            collectives.broadcast(command, address, chunks)
        elif kind == Kind.REDUCE_SCATTER:
            pieces = Piece.unpack_all(message)
            regions = [self._region(*piece) for piece in pieces]
            target = self._segments.address(command.target, command.target_offset)
            collectives.reduce_scatter(command, regions, target)
        elif kind == Kind.EXCHANGE:
            collectives.exchange(
                command,
                [
                    (
                        each.peer,
                        self._region(
                            each.source, each.source_offset, each.source_bytes
                        ),
                        self._region(
                            each.target, each.target_offset, each.target_bytes
                        ),
                    )
                    for each in Transfer.unpack_all(message)
                ],
            )
        else:
            raise ValueError(f"no command has the kind {kind}")
        self.granted.pop(command.number, None)

    def _region(self, segment: int, offset: int, length: int) -> Region:
        return self._segments.address(segment, offset), length

    def _post(self, command: Command, started: int) -> None:
        address = self._segments.address(command.segment, command.offset)
        start = (
            self._messages.send if command.kind == Kind.SEND else self._messages.recv
        )
        wait = start(address, command.length, command.peer, command.extra)

        def finish() -> None:
            outcome: Outcome = wait()
            wrong = outcome.wrong_bytes
            status = Status.DONE if wrong is None else Status.SIZE_MISMATCH
            self.report(
                command.number,
                status,
                started,
                time.time_ns(),
                outcome.peer,
                wrong or 0,
            )

        self._waiting_threads.run(finish)

    def report(
        self,
        number: int,
        status: int,
        started: int,
        completed: int,
        peer: int = 0,
        extra: int = 0,
    ) -> None:
        """Send a report to the rank; from any thread."""
        with self._report_lock:
            self._reports += 1
            report = Report(
                self._reports, number, status, peer, started, completed, extra
            )
            self._channel.send(report.pack())


class _Slots:
    """The chunks of an op whose array passes through slots (see `Chunks`)."""

    def __init__(self, server: Server, index: int) -> None:
        self._server = server
        self._index = index

    def ready(self, chunk: int) -> bool:
        try:
            while chunk > self._server.granted.get(self._index, 0):
                self._server.read(wait=False)
        except BlockingIOError:
            return False
        return True

    def need(self, chunk: int) -> None:
        while chunk > self._server.granted.get(self._index, 0):
            self._server.read(wait=True)

    def done(self, chunk: int) -> None:
        self._server.report(self._index, Status.CHUNK, 0, 0, extra=chunk)


class _Store:
    """The group's store, reached through the rank (`RendezvousStore`)."""

    def __init__(self, rendezvous: socket.socket) -> None:
        self._rendezvous = rendezvous

    def receive(self) -> bytes:
        answer = self._rendezvous.recv(MESSAGE_BYTES)
        if not answer:
            os._exit(0)  # the rank is gone
        return answer

    def set(self, key: str, value: bytes) -> None:
        self._rendezvous.send(b"set\0" + key.encode() + b"\0" + value)

    def get(self, key: str) -> bytes:
        self._rendezvous.send(b"get\0" + key.encode() + b"\0")
        # An empty value and the rank's end would look alike: one byte more.
        return self.receive()[1:]

    def wait(self, keys: list[str]) -> None:
        for key in keys:
            self.get(key)


def _exit_on_error(function: Callable[[], None]) -> None:
    """Run `function`; an exception ends the process, as an exception in gloo does."""
    try:
        function()
    except BaseException:  # noqa: BLE001 - the rank shows it to the user
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process with the thread that started it."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NAME, b"rankscope-gloo", 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _drain() -> None:
    """Wait until the peers' kernels have all that was sent.

    Closing a connection with unread data resets it, and a peer that has not
    finished would lose what this machine's kernel still holds.
    """
    deadline = time.monotonic() + 1
    for name in os.listdir("/proc/self/fd"):
        try:
            while _unsent(int(name)) and time.monotonic() < deadline:
                time.sleep(0.001)
        except OSError:
            continue  # not a socket, or closed meanwhile


def _unsent(fd: int) -> int:
    answer = fcntl.ioctl(fd, termios.TIOCOUTQ, b"\0\0\0\0")
    return struct.unpack("i", answer)[0]


def _serve() -> None:
    channel_fd, memory_fd, rendezvous_fd, page_fd, eager_fd = map(int, sys.argv[1:6])
    parent, rank, size = map(int, sys.argv[6:9])
    _die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # gloo's tcp transport ends the process when a peer dies: no core file for that.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = socket.socket(fileno=channel_fd)
    memory = socket.socket(fileno=memory_fd)
    rendezvous = socket.socket(fileno=rendezvous_fd)
    page = mmap.mmap(page_fd, Progress.SIZE)
    eager_memory = mmap.mmap(eager_fd, EagerLayout(size).nbytes)
    progress = Progress(memoryview(page))
    store = _Store(rendezvous)
    library, path = sys.argv[9:11]
    gloo = LIBRARIES[library](path, rank, size)
    gloo.connect(store, store.receive().decode())
    rendezvous.close()
    progress.connect()
    Server(channel, memory, progress, eager_memory, gloo).serve()
    _drain()
    os._exit(0)


def main() -> None:
    """Serve the rank that started this process; never returns."""
    _exit_on_error(_serve)
