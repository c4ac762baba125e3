"""Processes that are forked from one which has imported what they need.

Each worker of the tests starts ``python -m tests.forks MODULE FD`` once for a kind of
them. It imports what the `MODULE` of that kind lists in ``PRELOADED``, and forks a
process for each request on the socket FD, which has the process's environment, working
directory and limits, and its descriptors. The process calls the module's ``run``.
"""

from __future__ import annotations

import contextlib
import fcntl
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Forked", "Server", "early"]

_ROOT = Path(__file__).resolve().parents[1]

#: The start of a process, of Python, numpy or torch reads these: later ones have no
#: effect.
_EARLY = ("GLIBC_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TORCH_")

#: Of a pid, and of an exit code.
_NUMBER = struct.Struct("<i")


def early(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a forked process cannot get."""
    return {k: v for k, v in environment.items() if k.startswith(_EARLY)}


class Forked(subprocess.Popen[bytes]):
    """A child of the server, which has the methods of a child of ours."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.returncode: int | None = None
        self.args = ["a forked process"]
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


class Server:
    """The process that forks those of `module`."""

    def __init__(self, module: str) -> None:
        self._requests, theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                cwd=_ROOT,
                pass_fds=[theirs.fileno()],
                # Ctrl-C is for the tests alone.
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.early = early(os.environ)

    def fork(
        self,
        what: Any,
        environment: Mapping[str, str],
        descriptors: Mapping[int, int],
        folder: str | None = None,
    ) -> Forked:
        """Fork a process that does `what`, with descriptors: its number → that here."""
        request = {
            "what": what,
            "environment": {**environment},
            "folder": os.path.abspath(folder or "."),
            "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
            "descriptors": [*descriptors],
        }
        end, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(
                self._requests,
                [pickle.dumps(request)],
                [theirs.fileno(), *descriptors.values()],
            )
        return Forked(end)

    def popen(
        self,
        what: Any,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        pass_fds: Sequence[int] = (),
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        **_: object,
    ) -> Forked:
        """Fork a process that does `what`, with the options of a `Popen`.

        Its pipes have no buffer, and it leads a session.
        """
        pipes: dict[str, Any] = {}
        passed = {number: number for number in pass_fds}
        with contextlib.ExitStack() as theirs:
            for number, given in enumerate((stdin, stdout, stderr)):
                if given == subprocess.PIPE:
                    # Its end of stdin is the one to read, of the others to write.
                    ends = os.pipe() if number == 0 else os.pipe()[::-1]
                    theirs.callback(os.close, ends[0])
                    name = ("stdin", "stdout", "stderr")[number]
                    pipes[name] = os.fdopen(ends[1], "rb" if number else "wb", 0)
                    given = ends[0]
                elif given == subprocess.STDOUT:
                    given = passed[1]
                elif given is None:
                    given = number
                passed[number] = given if isinstance(given, int) else given.fileno()
            forked = self.fork(what, os.environ if env is None else env, passed, cwd)
        vars(forked).update(pipes)
        return forked

    def close(self) -> None:
        """End the server, which may import its modules still."""
        self._requests.close()
        self._process.wait(60)


# -- the server ----------------------------------------------------------------


def _serve(requests: socket.socket) -> Any:
    """Fork a process at each request; in it, return what it is to do."""
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
            data, (*received,), _, _ = socket.recv_fds(requests, 1 << 20, 8)
            if not data:
                sys.exit()
            end, *descriptors = received
            pid = os.fork()
            if pid == 0:
                requests.close()
                os.close(end)
                for process, (_, other) in ends.items():
                    os.close(process)
                    other.close()
                return _become(pickle.loads(data), descriptors)
            for one in descriptors:
                os.close(one)
            ended = socket.socket(fileno=end)
            _tell(ended, pid)
            process = os.pidfd_open(pid)
            ends[process] = (pid, ended)
            poll.register(process, select.POLLIN)


def _become(request: dict[str, Any], received: list[int]) -> Any:
    """Make this process the one that would have been started."""
    os.setsid()
    # First out of the way of the numbers that they are to have.
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 100) for one in received]
    for one in received:
        os.close(one)
    for one, number in zip(moved, request["descriptors"], strict=True):
        os.dup2(one, number)
        os.close(one)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    resource.setrlimit(resource.RLIMIT_NOFILE, request["limits"])
    # The module random sees to itself.
    importlib.import_module("numpy").random.seed()
    return request["what"]


def _tell_end(process: int, pid: int, end: socket.socket) -> None:
    # Who finds that there is no such process any more may ask how it ended.
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert found is not None
    code = found.si_status
    with end:
        _tell(end, code if found.si_code == os.CLD_EXITED else -code)
    os.waitpid(pid, 0)
    os.close(process)


def _tell(end: socket.socket, number: int) -> None:
    # Nobody has to be there any more.
    with contextlib.suppress(OSError):
        end.send(_NUMBER.pack(number))


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    module = importlib.import_module(sys.argv[1])
    module.preload()
    module.run(_serve(socket.socket(fileno=int(sys.argv[2]))))
