"""Ranks that are forked from a process which has imported what they need.

A rank imports numpy, rankscope and, with the test's module, pytest: 0.4 s of CPU, and
the tests start about a thousand of them. So each worker starts ``python -m
tests.backends.forked_ranks FD`` once. It imports these for all, and forks a rank for
each request on the socket FD, which has the rank's environment, working directory and
limits, and the descriptors of its pipe, its output and its end.

`Ranks` of another interpreter, with variables of its own, or in the tests of the
conformance suite start as they do for a user.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.backends.conformance.ranks import Ranks

__all__ = ["forked_ranks"]

#: What the modules of the tests import. Nothing of it may start a thread or open a
#: descriptor that a rank would hold.
PRELOADED = (
    "pytest",
    "rankscope.backends.collectives.coalescing",
    "rankscope.backends.collectives.monitored_barrier",
    "rankscope.backends.collectives.objects",
    "rankscope.backends.conformance.rank_process",
    "rankscope.backends.conformance.checker",
    "rankscope.backends.conformance.exact",
    "rankscope.backends.conformance.mpi_ranks",
    "rankscope.backends.conformance.surface",
    "rankscope.backends.groups.subgroups",
    "tests.backends.backends",
    "tests.backends.whole_surface",
)

_ROOT = Path(__file__).resolve().parents[2]

#: Its tests try how `Ranks` starts a process.
_COLD = "tests.backends.conformance."

#: The start of a process, of Python or of numpy reads these: later ones have no effect.
_EARLY = ("GLIBC_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON")

#: Of a pid, and of an exit code.
_NUMBER = struct.Struct("<i")


class Forked(subprocess.Popen[bytes]):
    """A rank, which is a child of the server: it has the methods of a child of ours."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.returncode: int | None = None
        self.args = ["a forked rank"]
        (self.pid,) = _NUMBER.unpack(end.recv(_NUMBER.size))

    def __del__(self) -> None:
        self._end.close()

    def poll(self) -> int | None:
        """Return the exit code, a negative one for a signal; ``None`` while it runs."""
        self._await(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code."""
        self._await(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def _await(self, timeout: float | None) -> None:
        if self.returncode is None and _is_readable(self._end, timeout):
            (self.returncode,) = _NUMBER.unpack(self._end.recv(_NUMBER.size))
            self._end.close()

    def send_signal(self, signum: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)


def _is_readable(end: socket.socket, timeout: float | None) -> bool:
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


@contextlib.contextmanager
def forked_ranks() -> Iterator[None]:
    """Have `Ranks` fork their processes in the block, from one server."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = subprocess.Popen(
        [sys.executable, "-m", __name__, str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        cwd=_ROOT,
        pass_fds=[theirs.fileno()],
        # Ctrl-C is for the tests alone.
        start_new_session=True,
    )
    theirs.close()
    before = Ranks._start
    Ranks._start = _starter(ours, before)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Ranks._start = before  # type: ignore[method-assign]
        ours.close()
        server.wait(10)


_Start = Callable[[Ranks, int], tuple["subprocess.Popen[bytes]", Connection]]


def _starter(server: socket.socket, otherwise: _Start) -> _Start:
    early = _early()

    def start(self: Ranks, rank: int) -> tuple[subprocess.Popen[bytes], Connection]:
        if not _may_fork(self) or _early() != early:
            return otherwise(self, rank)
        ours, theirs = Pipe()
        end, their_end = socket.socketpair()
        request = {
            "environment": {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                **self._env,
            },
            "folder": os.getcwd(),
            "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE),
        }
        with open(self._log(rank), "ab") as log, theirs, their_end:
            descriptors = [theirs.fileno(), log.fileno(), their_end.fileno()]
            socket.send_fds(server, [pickle.dumps(request)], descriptors)
        ours.send(self._task(rank, self._python))
        return Forked(end), ours

    return start


def _early() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k.startswith(_EARLY)}


#: What `Ranks` sets by itself.
_USUAL = {
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANKSCOPE_KEY",
}


def _may_fork(ranks: Ranks) -> bool:
    return (
        ranks._python == sys.executable
        and set(ranks._env) <= _USUAL
        and ranks._function.__module__.startswith("tests.")
        and not ranks._function.__module__.startswith(_COLD)
    )


# -- the server ----------------------------------------------------------------


def _serve(requests: socket.socket) -> Connection:
    """Fork a rank at each request; in a rank, return its pipe."""
    for name in PRELOADED:
        # What is missing here is missed where a test needs it.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    ends: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for ready, _ in poll.poll():
            if ready != requests.fileno():
                poll.unregister(ready)
                _tell_end(ready, *ends.pop(ready))
                continue
            data, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 3)
            if not data:
                sys.exit()
            pipe, log, end = descriptors
            pid = os.fork()
            if pid == 0:
                requests.close()
                os.close(end)
                for process, (_, other) in ends.items():
                    os.close(process)
                    other.close()
                _become(pickle.loads(data), log)
                return Connection(pipe)
            os.close(pipe)
            os.close(log)
            ended = socket.socket(fileno=end)
            _tell(ended, pid)
            process = os.pidfd_open(pid)
            ends[process] = (pid, ended)
            poll.register(process, select.POLLIN)


def _become(request: dict[str, Any], log: int) -> None:
    """Make this process the one that `Ranks` would have started."""
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    resource.setrlimit(resource.RLIMIT_NOFILE, request["descriptors"])
    # The module random sees to itself.
    np.random.seed()


def _tell_end(process: int, pid: int, end: socket.socket) -> None:
    _, status = os.waitpid(pid, 0)
    os.close(process)
    with end:
        _tell(end, os.waitstatus_to_exitcode(status))


def _tell(end: socket.socket, number: int) -> None:
    # Nobody has to be there any more.
    with contextlib.suppress(OSError):
        end.send(_NUMBER.pack(number))


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pipe = _serve(socket.socket(fileno=int(sys.argv[1])))
    from rankscope.backends.conformance.rank_process import serve

    serve(pipe)
