"""The notebook's end of a fork server, `agent.fork_server`: of this host or another."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import psutil

from ..errors import ClusterStartError

__all__ = ["MODULE", "ForkServer", "ServerEnd"]

MODULE = "rankscope.engines.agent.fork_server"

#: Lines of the output of a fork server that go into an error message.
OUTPUT_LINES = 20
#: Seconds that a fork server gets to end, with its engines where they are not kept.
CLOSE_TIMEOUT = 4.0


class ServerEnd(ClusterStartError):
    """A fork server has ended before it had done what it was asked for."""


class Forked(Protocol):
    """The launcher of an engine that a fork server has."""

    def forked(self, pid: int) -> None:
        """Take over the engine that was forked."""

    def ended(
        self, exit_code: int | None, output: str = "", why: str | None = None
    ) -> None:
        """Report the end of the engine, and `why` where there is no exit code."""


class ForkServer:
    """A process that forks engines, and the pipes to it.

    It is made, and calls back, on the thread of an event loop. The end of its stdin,
    which only this process holds, ends the server and its engines.

    Parameters
    ----------
    command : sequence of str
        Runs `MODULE`: with this Python, or by ssh with that of another host.
    on_end : callable
        Called with the server when it has ended, unless it was closed.
    """

    def __init__(
        self,
        command: Sequence[str],
        on_end: Callable[[ForkServer], None],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> None:
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - see `close`
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            env=None if env is None else {**os.environ, **env},
            cwd=cwd,
            # An interrupt of the notebook's terminal is not one of the ranks.
            start_new_session=True,
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._stdin, self._stdout = self._popen.stdin, self._popen.stdout
        #: The process of this host: the server's, or that of its ssh.
        self.process = psutil.Process(self._popen.pid)
        #: The exit status of that process, once it has ended.
        self.exit_code: int | None = None
        #: The last lines that were on its stderr, once it has ended.
        self.last_output = ""
        self._received = b""
        self._writing = threading.Lock()
        # Answers come in the order of the questions, also of those given up; each with
        # the launchers of the engines that it is to name.
        self._replies: deque[
            tuple[asyncio.Future[dict[str, Any]], Iterable[Forked]]
        ] = deque()
        self._by_pid: dict[int, Forked] = {}
        self._was_asked_to_fork = False
        self._loop.add_reader(self._stdout, self._receive)

    @property
    def is_open(self) -> bool:
        """Whether the server was not closed, and did not end."""
        return not self._stdin.closed

    async def reply(self, engines: Iterable[Forked] = ()) -> dict[str, Any]:
        """Wait for the next message that is no end of an engine."""
        if not self.is_open:
            raise ServerEnd(self.why)
        future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._replies.append((future, engines))
        return await future

    async def ask(
        self, message: dict[str, Any], engines: Iterable[Forked] = ()
    ) -> dict[str, Any]:
        """Send a message and return its answer, which has the pids of `engines`."""
        self.send(message)
        return await self.reply(engines)

    @property
    def owes_answer(self) -> bool:
        """Whether a question was asked that the server has not answered."""
        return bool(self._replies)

    async def fork(
        self,
        engines: Mapping[Forked, dict[str, Any]],
        environment: Mapping[str, str],
        *,
        stay: bool = False,
    ) -> None:
        """Fork an engine for each launcher, with what the server is to know of it."""
        self._was_asked_to_fork = True
        message = {
            "fork": [*engines.values()],
            "environment": {**environment},
            "stay": stay,
        }
        await self.ask(message, [*engines])

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, from any thread."""
        with self._writing:
            try:
                self._stdin.write(json.dumps(message).encode() + b"\n")
            except (OSError, ValueError):
                # The server has ended: the end of file can be read, or was.
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
            if line.startswith(b"{"):
                self._handle(json.loads(line))

    def _handle(self, message: dict[str, Any]) -> None:
        if "pid" in message:
            launcher = self._by_pid.pop(message["pid"], None)
            if launcher is not None:
                launcher.ended(message["exit_code"], message["output"])
        elif self._replies:
            reply, engines = self._replies.popleft()
            pids = message.get("pids", ())
            if reply.done():
                # Nobody waits any more for the engines that were forked so late.
                for pid in pids:
                    self.send({"signal": [pid, signal.SIGKILL]})
                return
            # Not by who waits: the next message may be the end of one of them.
            if "failed" in message:
                reply.set_exception(ClusterStartError(message["failed"]))
                return
            try:
                for launcher, pid in zip(engines, pids, strict=True):
                    self._by_pid[pid] = launcher
                    launcher.forked(pid)
            except Exception as error:  # noqa: BLE001 - raised by `fork`
                reply.set_exception(error)
            else:
                reply.set_result(message)

    @property
    def why(self) -> str:
        """How the process ended, and the last lines of its output."""
        return f"ended with {self.exit_code}{self.last_lines()}"

    def last_lines(self) -> str:
        """Return the last lines of the output, as they stand below an error."""
        return f"\n--- its last output\n{self.last_output}" if self.last_output else ""

    def take_engines(self) -> list[Any]:
        """Return the launchers of the engines whose ends it cannot report any more."""
        left = [*self._by_pid.values()]
        self._by_pid.clear()
        return left

    def end_input(self) -> None:
        """End the stdin of the server: it ends its engines, and itself."""
        with self._writing:
            self._stdin.close()

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """End the server and, if they are not to be kept, its engines.

        On the loop's thread, or with the loop stopped.
        """
        if not (self._stdout.closed or self._was_asked_to_fork):
            # It may be importing still, or its ssh connecting.
            self._popen.terminate()
        self._close(timeout)

    def _close(self, timeout: float) -> None:
        if self._stdout.closed:
            return
        self.end_input()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._stdout)
        self._stdout.close()
        self._wait(timeout)
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")
        self.last_output = "\n".join(text.strip().splitlines()[-OUTPUT_LINES:])
        self._log.close()
        for reply, _ in self._replies:
            if not reply.done():
                reply.set_exception(ServerEnd(self.why))

    def _wait(self, timeout: float) -> None:
        try:
            self.exit_code = self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self.exit_code = self._popen.wait()
