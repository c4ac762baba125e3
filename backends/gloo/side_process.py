"""The side process of one rank in one group, and the thread that commands it.

The bindings of gloo hold the GIL: a collective that waits for a late peer would freeze
every thread of the rank, and nothing could end it. So gloo runs in a process of its
own, and `SideProcess.kill` ends whatever call it hangs in.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..descriptors import REMEDY
from ..errors import (
    ConnectionLostError,
    DistBackendError,
    DistError,
    DistStoreTimeoutError,
)
from ..messaging.connecting import Namer, different, own_address
from ..stores.base import Store
from ..stores.process_end import host_id
from ..thread_start import start_thread
from ..work.work import Work
from .library import Library

__all__ = ["MEMORY_BYTES", "SideProcess", "choose_address"]

Bytes = npt.NDArray[np.uint8]

#: Memory that rank and side process share. A larger array passes through it piece by
#: piece; pages that no piece has touched take no memory.
MEMORY_BYTES = 32 << 20

_PROGRAM = Path(__file__).with_name("child_main.py")
_MESSAGE_BYTES = 1 << 16
# Seconds between two looks at the side process while the store is waited for.
_SLICE = 0.25
# Seconds that the end of a killed process, and of its thread, may take.
_END_SECONDS = 2.0


class SideProcess:
    """One process that runs gloo for one rank in one group.

    A thread starts it, and runs the tasks of `submit` one after another: what `load`,
    `call` and `store` do belongs into such a task. `on_failure` is called with the
    reason when it ends unasked.
    """

    def __init__(
        self,
        library: Library,
        store: Store,
        rank: int,
        size: int,
        name: Namer,
        on_failure: Callable[[str | DistError], None],
    ) -> None:
        self.library = library
        self._store, self._rank, self._size = store, rank, size
        self._name, self._on_failure = name, on_failure
        # A signal handler may submit in the middle of a submit: hence an RLock.
        self._lock = threading.RLock()
        # The first one is running, or about to.
        self._tasks: deque[tuple[Work, Callable[[], None]]] = deque()
        self._calls = 0
        # Why no task is run any more.
        self._cause: str | DistError | None = None
        self._killed = False
        #: Whether it is connected to all peers.
        self.connected = False
        # Held while the thread writes to an array of the caller.
        self._storing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.ExitStack() as undo:
            # Packets: a message arrives whole, and closing one end shows at the other.
            self._channel, self._far_end = socket.socketpair(
                socket.AF_UNIX, socket.SOCK_SEQPACKET
            )
            undo.callback(self._far_end.close)
            undo.callback(self._channel.close)
            # Whatever socket.setdefaulttimeout says.
            for end in (self._channel, self._far_end):
                end.settimeout(None)
            # /dev/shm is often small in containers, and a memfd is not bound by it.
            self._memory_fd = os.memfd_create("rankscope-gloo", os.MFD_CLOEXEC)
            undo.callback(os.close, self._memory_fd)
            os.ftruncate(self._memory_fd, MEMORY_BYTES)
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, self._bell)
            # Of the process. A file in memory, not a pipe: it never fills up, and no
            # thread has to read.
            self._output = os.memfd_create("rankscope-output", os.MFD_CLOEXEC)
            undo.callback(os.close, self._output)
            self._memory: Bytes = np.frombuffer(
                mmap.mmap(self._memory_fd, MEMORY_BYTES), np.uint8
            )
            self._resources = undo.pop_all()
        self._released = False

    @property
    def pid(self) -> int | None:
        """The process id; ``None`` if it has not been started."""
        return None if self._process is None else self._process.pid

    @property
    def idle(self) -> bool:
        return not self._tasks

    def start(self) -> None:
        """Start the process and connect it, on the thread; does so once."""
        with self._lock:
            if self._thread is not None or self._killed:
                return
            self._thread = start_thread("gloo", self._run)

    def submit(self, work: Work, task: Callable[[], None]) -> Work:
        """Run ``task()`` after those before it; `work` ends with it. Returns `work`."""
        with self._lock:
            if self._cause is None:
                self._tasks.append((work, task))
                os.eventfd_write(self._bell, 1)
                return work
        work.mark_failed(_as_error(self._cause))
        return work

    # -- in a task ---------------------------------------------------------

    def load(self, source: npt.NDArray[np.generic]) -> None:
        """Copy the flat array `source` to the start of the shared memory."""
        self._memory[: source.nbytes] = source.view(np.uint8)

    def store(self, target: npt.NDArray[np.generic], start: int = 0) -> None:
        """Copy shared memory from byte `start` on to the flat array `target`."""
        with self._storing:
            if self._killed:
                raise EOFError  # the Work of `target` may be over
            target.view(np.uint8)[:] = self._memory[start : start + target.nbytes]

    def call(
        self,
        kind: str,
        count: int = 0,
        dtype: str = "uint8",
        reduction: str = "SUM",
        root: int = 0,
        output: int = 0,
        moved: str = "",
    ) -> None:
        """Run one collective of gloo, from the start of the memory to byte `output`."""
        self._calls += 1
        command = [kind, count, dtype, reduction, root, output]
        # Ranks that do not call alike have different tags: they wait for each other,
        # as gloo would end the process where messages differ in size, or mix them up.
        tag = zlib.crc32(json.dumps([self._calls, moved, *command]).encode())
        self._send(json.dumps([*command, tag]).encode())
        answer = self._receive()
        if answer != b"done":
            raise RuntimeError(f"{answer!r} instead of b'done'")

    # -- the end -----------------------------------------------------------

    def kill(self) -> None:
        """End it now, in whatever state it is; the caller fails the Works.

        When it returns, no array of a caller is written any more.
        """
        with self._lock:
            self._killed = True
            self._cause = self._cause or f"{self._called} was ended"
            if not self._released:
                if self._process is not None:
                    self._process.kill()
                os.eventfd_write(self._bell, 1)
                if self._thread is None:
                    self._release()
        with self._storing:
            pass

    def close(self) -> None:
        """End it: nothing is in flight."""
        self.kill()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_END_SECONDS)

    # -- the thread --------------------------------------------------------

    @property
    def _called(self) -> str:
        return f"the side process of {self._name([self._rank])}"

    def _run(self) -> None:
        cause: str | DistError
        try:
            self._connect()
            while self._next():
                work, task = self._tasks[0]
                error = self._perform(work, task)
                # First, so that whoever waits for the Work finds the process idle.
                self._tasks.popleft()
                if error is None:
                    work.mark_completed()
                else:
                    work.mark_failed(error)
            cause = ""
        except EOFError:
            cause = ""
        except DistError as error:
            cause = error
        except OSError as error:
            hint = f": {REMEDY}" if error.errno == errno.EMFILE else ""
            cause = f"{self._called} failed: {error}{hint}"
        except Exception as error:  # noqa: BLE001 - a fault of ours: the ops must end
            cause = f"{self._called} failed: {type(error).__name__}: {error}"
        self._finish(cause)

    def _perform(self, work: Work, task: Callable[[], None]) -> Exception | None:
        """Run a task; return the error that concerns its Work alone."""
        if work.state.is_terminal:
            return None
        work.mark_started()
        try:
            task()
        except ConnectionLostError:
            raise
        except DistError as error:
            return error
        return None

    def _next(self) -> bool:
        """Wait for a task; return whether there is one. `EOFError` if it has ended."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(self._bell, select.POLLIN)
        while not self._killed:
            if self._tasks:
                return True
            for descriptor, _ in poll.poll():
                if descriptor != self._bell:
                    raise EOFError
                os.eventfd_read(self._bell)
        return False

    def _finish(self, cause: str | DistError) -> None:
        """Reap the process, release what it used, and report why it ended."""
        process = self._process
        if process is not None:
            # Its socket may be closed before the process has ended by itself.
            if cause:
                process.kill()
            process.wait()
        if not cause:
            cause = f"{self._called} {self._how_it_ended()}"
            if process is not None and process.returncode == -signal.SIGABRT:
                # A C++ exception: gloo's word on a peer, or a fault.
                cause = ConnectionLostError(cause, reason=cause)
        with self._lock:
            self._cause = cause if self._cause is None else self._cause
            works = [work for work, _ in self._tasks]
            self._tasks.clear()
            self.connected = False
            self._release()
        if not self._killed:
            self._on_failure(self._cause)
        for work in works:
            work.mark_failed(_as_error(self._cause))

    def _how_it_ended(self) -> str:
        if self._process is None:
            return "never ran"
        name, code = f"(pid {self._process.pid})", self._process.returncode
        if code in (-signal.SIGKILL, -signal.SIGTERM):
            return f"{name} was killed by {signal.Signals(-code).name}"
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        size = os.fstat(self._output).st_size
        tail = os.pread(self._output, 4096, max(0, size - 4096))
        lines = [line for line in tail.decode(errors="replace").split("\n") if line]
        return f"{name} ended with {how}: {' | '.join(lines[-6:]) or 'no output'}"

    def _release(self) -> None:
        """Free what it uses (with the lock held): it has ended, or never started."""
        self._released = True
        self._resources.close()
        self._memory = np.empty(0, np.uint8)

    def _connect(self) -> None:
        descriptors = [self._far_end.fileno(), self._memory_fd]
        arguments = (
            *(*descriptors, os.getpid(), self._rank, self._size),
            *(self.library.name, self.library.path),
        )
        try:
            with self._lock:
                if self._killed:
                    raise EOFError
                # The kernel kills it when this thread ends.
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_PROGRAM), *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=self._output,
                    pass_fds=descriptors,
                    # Ctrl-C in a terminal signals the process group of the rank.
                    start_new_session=True,
                )
        finally:
            self._far_end.close()
        self._send(self._meet().encode())
        while (message := self._receive()) != b"ready":
            verb, key, value = message.split(b"\0", 2)
            name = f"mesh/{key.decode()}"
            if verb == b"set":
                self._store.set(name, value)
            else:
                self._send(b"=" + self._get(name))
        self.connected = True

    def _meet(self) -> str:
        """Return the address to listen at, once all ranks have published theirs."""
        own = {
            # Ranks share a loopback in one network namespace only.
            "machine": host_id("net"),
            "address": own_address(self._store),
            "library": str(self.library),
        }
        self._store.set(f"host/{self._rank}", json.dumps(own))
        hosts = [json.loads(self._get(f"host/{rank}")) for rank in range(self._size)]
        libraries = [host["library"] for host in hosts]
        # They have no transport in common, and would wait for each other for ever.
        if len({*libraries}) > 1:
            said = different(libraries, "gloo libraries", self._name)
            raise DistBackendError(f"{said}, or set RANKSCOPE_GLOO on every rank")
        return choose_address(hosts, self._rank)

    def _get(self, key: str) -> bytes:
        # Without a deadline: the dispatcher keeps those, and aborts.
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        while not self._killed:
            try:
                return self._store.get(key, timeout=_SLICE)
            except DistStoreTimeoutError:
                if poll.poll(0):
                    break
        raise EOFError

    def _send(self, message: bytes) -> None:
        try:
            self._channel.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError from None

    def _receive(self) -> bytes:
        try:
            message = self._channel.recv(_MESSAGE_BYTES)
        except ConnectionResetError:
            message = b""
        if not message:
            raise EOFError
        verb, _, said = message.partition(b"\0")
        if verb == b"error":
            # What follows the first sentence is gloo's guess at the cause.
            sentence = said.decode().partition(". ")[0]
            raise ConnectionLostError(f"gloo: {sentence}")
        return message


def _as_error(cause: str | DistError) -> DistError:
    return DistBackendError(cause) if isinstance(cause, str) else cause


def choose_address(hosts: Sequence[dict[str, str]], rank: int) -> str:
    """Return where the side process of `rank` listens: loopback if all share a host."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return hosts[rank]["address"]
    if len({host["machine"] for host in hosts}) == 1:
        return "127.0.0.1"
    return hosts[rank]["address"]
