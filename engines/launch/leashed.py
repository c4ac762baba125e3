"""A process of this host that ends with its stdin, and speaks lines of JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from subprocess import PIPE, Popen, TimeoutExpired
from typing import IO, Any

import psutil

from ..errors import ClusterStartError
from . import keeper_main

__all__ = ["CLOSE_TIMEOUT", "LeashedProcess", "ProcessEnd", "of_this_process"]

#: Lines of the output of a process that go into an error message.
OUTPUT_LINES = 20
#: Seconds that a process gets to end after its stdin has.
CLOSE_TIMEOUT = 4.0

_of_this_process: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


#: Children that run on, until they are found to have ended.
_released: list[int] = []


def _reap_released() -> None:
    for pid in [*_released]:
        ended = True
        # In a forked child they are the parent's.
        with contextlib.suppress(ChildProcessError):
            ended = os.waitpid(pid, os.WNOHANG)[0] == pid
        if ended:
            _released.remove(pid)


def of_this_process(pipe: IO[bytes]) -> IO[bytes]:
    """Return a `pipe` that forked processes, which may outlive this one, do not get."""
    _of_this_process.add(pipe)
    return pipe


def _close_in_child() -> None:
    for one in [*_of_this_process]:
        one.close()


os.register_at_fork(after_in_child=_close_in_child)


class ProcessEnd(ClusterStartError):
    """A process has ended before it had done what it was asked for."""


class LeashedProcess:
    """A process, and the pipes to it.

    It is made, and calls back, on the thread of an event loop. The end of its stdin,
    which only this process holds, ends it. ``on_end(self)`` is called when it has
    ended, unless it was closed. Its environment is `env`, by default that of this
    process; one that is `kept` may outlive this process: see `keep`.
    """

    def __init__(
        self,
        command: Sequence[str],
        on_end: Callable[[Any], None],
        *,
        env: Mapping[str, str] | None = None,
        kept: bool = False,
    ) -> None:
        keeper = [sys.executable, "-I", "-S", keeper_main.__file__] if kept else []
        _reap_released()
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - see `close`
        self._popen = Popen(
            [*keeper, *command],
            stdin=PIPE,
            stdout=PIPE,
            stderr=self._log,
            bufsize=0,
            env=env,
            # An interrupt of the notebook's terminal is not one of the ranks.
            start_new_session=True,
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._stdin = of_this_process(self._popen.stdin)
        self._stdout = of_this_process(self._popen.stdout)
        #: The process of this host: the program, the ssh or srun that leads to it, or
        #: its keeper.
        self.process = psutil.Process(self._popen.pid)
        #: The exit status of that process, once it has ended.
        self.exit_code: int | None = None
        #: The last lines that were on its stderr, once it has ended.
        self.last_output = ""
        #: Why it was given up, if it was.
        self.lost = ""
        #: Whether it heeds the end of its stdin by now.
        self.listens = False
        self._received = b""
        self._writing = threading.Lock()
        # Answers come in the order of the questions, also of those given up; each with
        # what it is about.
        self._replies: deque[tuple[asyncio.Future[dict[str, Any]], Any]] = deque()
        self._loop.add_reader(self._stdout, self._receive)

    @property
    def is_open(self) -> bool:
        """Whether the process was not closed, and did not end."""
        return not self._stdin.closed

    async def reply(self, about: Any = None) -> dict[str, Any]:
        """Wait for the next answer."""
        if not self.is_open:
            raise ProcessEnd(self.why)
        future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._replies.append((future, about))
        return await future

    async def ask(self, message: dict[str, Any], about: Any = None) -> dict[str, Any]:
        self.send(message)
        return await self.reply(about)

    @property
    def owes_answer(self) -> bool:
        """Whether a question was asked that the process has not answered."""
        return bool(self._replies)

    def send(self, message: dict[str, Any]) -> None:
        with self._writing:
            try:
                self._stdin.write(json.dumps(message).encode() + b"\n")
            except (OSError, ValueError):
                # The process has ended: the end of file can be read, or was.
                pass

    def _receive(self) -> None:
        chunk = os.read(self._stdout.fileno(), 65536)
        if not chunk:
            self._close(CLOSE_TIMEOUT)
            self._on_end(self)
            return
        *lines, self._received = (self._received + chunk).split(b"\n")
        for line in lines:
            # What the login on another host prints is no message.
            if line.startswith(b'{"'):
                with contextlib.suppress(ValueError):
                    self._handle(json.loads(line))

    def _handle(self, message: dict[str, Any]) -> None:
        if self._replies:
            self._answer(message, *self._replies.popleft())

    def _answer(
        self, message: dict[str, Any], reply: asyncio.Future[dict[str, Any]], about: Any
    ) -> None:
        if not reply.done():
            reply.set_result(message)

    @property
    def output(self) -> str:
        if self._log.closed:
            return self.last_output
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    @property
    def why(self) -> str:
        """How the process ended, and the last lines of its output."""
        return f"ended with {self.exit_code}{self.last_lines()}"

    def last_lines(self) -> str:
        """Return the last lines of the output, as they stand below an error."""
        return f"\n--- its last output\n{self.last_output}" if self.last_output else ""

    def keep(self, controller: int | None) -> None:
        """Have it end with the process `controller`; ``None``: with this one."""
        self.send({"keep": controller})

    def release(self) -> None:
        """Let go of a process that is kept, on the loop's thread."""
        if self._stdout.closed:
            return
        self._close_pipes()
        self._log.close()
        # It runs on, of which Popen would warn.
        self._popen.returncode = 0
        _released.append(self._popen.pid)

    def give_up(self, why: str) -> None:
        """End what leads to a host that cannot be reached, as if it had ended."""
        self.lost = why
        self._popen.terminate()

    def end_input(self) -> None:
        """End the stdin of the process, which ends it."""
        with self._writing:
            self._stdin.close()

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """End the process; on the loop's thread, or with the loop stopped."""
        if not (self._stdout.closed or self.listens):
            self._popen.terminate()
        self._close(timeout)

    def _close(self, timeout: float) -> None:
        if self._stdout.closed:
            return
        self._close_pipes()
        self._wait(timeout)
        lines = self.output.strip().splitlines()
        self.last_output = "\n".join(lines[-OUTPUT_LINES:])
        self._log.close()
        for reply, _ in self._replies:
            if not reply.done():
                reply.set_exception(ProcessEnd(self.why))

    def _close_pipes(self) -> None:
        self.end_input()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._stdout)
        self._stdout.close()

    def _wait(self, timeout: float) -> None:
        try:
            self.exit_code = self._popen.wait(timeout)
        except TimeoutExpired:
            self._popen.kill()
            self.exit_code = self._popen.wait()
