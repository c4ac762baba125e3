"""Launchers of engines that are forked from one process: `agent.fork_server`."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from typing import IO, Any

import psutil
from ipyparallel.cluster.launcher import LocalEngineLauncher, LocalEngineSetLauncher
from traitlets import Bool

from ..errors import ClusterStartError
from ..wire import ipyparallel_private as private

__all__ = ["ForkedEngineLauncher", "ForkedEngineSetLauncher"]

_SERVER = "rankscope.engines.agent.fork_server"

#: Lines of the fork server's output that go into an error message.
OUTPUT_LINES = 20
#: Seconds that a fork server gets to end, with its engines where they are not kept.
CLOSE_TIMEOUT = 4.0


class ForkedEngineLauncher(LocalEngineLauncher):  # type: ignore[misc]
    """One engine of a `ForkedEngineSetLauncher`.

    An engine that a cluster file names has no fork server here: such a launcher is
    what its base class is.
    """

    _ended: asyncio.Event | None = None

    def start(self) -> None:
        """Do nothing: the set forks all its engines at once."""

    def forked(self, pid: int) -> None:
        """Take over the engine that was forked."""
        self._ended = asyncio.Event()
        self.pid = pid
        self.process = psutil.Process(pid)
        self.notify_start(pid)

    def ended(self, exit_code: int | None) -> None:
        """Report the end of the engine."""
        assert self._ended is not None
        self._ended.set()
        self.notify_stop(
            {"exit_code": exit_code, "pid": self.pid, "identifier": self.identifier}
        )

    def watch_process(self) -> None:
        """Wait for the process, without its exit code: the fork server has ended."""
        self._ended = None
        private.start_waiting(self)

    async def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the engine."""
        if self._ended is None:
            await super().join(timeout)
            return
        try:
            await asyncio.wait_for(self._ended.wait(), timeout)
        except asyncio.TimeoutError as error:
            raise TimeoutError(f"pid {self.pid} did not end in {timeout} s") from error


class ForkedEngineSetLauncher(LocalEngineSetLauncher):  # type: ignore[misc]
    """Engines of this machine, forked from a process that has imported their modules.

    Everything else is as with ``LocalEngineSetLauncher``: each engine has its session,
    its log file and its exit code.
    """

    #: In cluster files: what is found there is a set of local processes.
    entrypoint_name = "local"

    launcher_class = ForkedEngineLauncher

    keep = Bool(
        True,
        config=True,
        help="Whether the engines outlive the process that owns them.",
    )

    #: The fork server, while it runs.
    server: subprocess.Popen[bytes] | None = None

    _socket: socket.socket | None = None
    _server_output: IO[bytes] | None = None
    _received = b""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._by_pid: dict[int, ForkedEngineLauncher] = {}
        # It imports while the controller starts, which `start` is called after.
        self._start_server()

    async def start(self, n: int) -> None:
        """Fork `n` engines."""
        super().start(n)
        engines = [
            {"output": one.output_file, "arguments": one.engine_args}
            for one in self.launchers.values()
        ]
        self._send({"engines": engines, "environment": self.get_env()})
        try:
            await self._started
        except BaseException:
            if self.server is not None:
                self._close()
            raise
        if self.keep:
            self._send({"keep": True})

    def _start_server(self) -> None:
        self._socket, its = socket.socketpair()
        self._server_output = tempfile.TemporaryFile()  # noqa: SIM115 - see `_close`
        with its, open(os.devnull, "rb") as nothing:
            self.server = subprocess.Popen(
                [sys.executable, "-m", _SERVER, str(its.fileno())],
                stdin=nothing,
                stdout=self._server_output,
                stderr=subprocess.STDOUT,
                pass_fds=[its.fileno()],
                env={**os.environ, **self.get_env()},
                cwd=self.work_dir,
                start_new_session=True,
            )
        self.process = psutil.Process(self.server.pid)
        self._loop.add_reader(self._socket, self._receive)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._socket is not None
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            # The server has ended: the end of file can be read.
            pass

    def _receive(self) -> None:
        assert self._socket is not None
        try:
            chunk = self._socket.recv(65536)
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            self._server_ended()
            return
        *lines, self._received = (self._received + chunk).split(b"\n")
        for line in lines:
            message: dict[str, Any] = json.loads(line)
            if "pids" in message:
                self._forked(message["pids"])
            else:
                self._by_pid.pop(message["pid"]).ended(message["exit_code"])

    def _forked(self, pids: list[int]) -> None:
        for launcher, pid in zip(list(self.launchers.values()), pids, strict=True):
            self._by_pid[pid] = launcher
            launcher.forked(pid)
        self.notify_start(pids)
        if not self._started.done():
            self._started.set_result(None)

    def _server_ended(self) -> None:
        assert self.server is not None
        exit_code, output = self.server.wait(), self._last_output()
        self._close()
        if not self._started.done():
            # `start` raises it.
            self._started.set_exception(
                ClusterStartError(
                    f"the process that forks the engines ended with {exit_code}{output}"
                )
            )
        for launcher in self._by_pid.values():
            launcher.watch_process()
        self._by_pid.clear()

    def _last_output(self) -> str:
        assert self._server_output is not None
        self._server_output.seek(0)
        text = self._server_output.read().decode(errors="replace")
        lines = text.strip().splitlines()[-OUTPUT_LINES:]
        return "\n--- its last output\n" + "\n".join(lines) if lines else ""

    def release(self) -> None:
        """End the fork server, and leave its engines running.

        On the loop's thread, or with the loop stopped.
        """
        if self.server is not None:
            self._send({"keep": True})
            self._close()

    def _close(self) -> None:
        """End the fork server and, if they are not to be kept, its engines."""
        assert self.server is not None
        assert self._socket is not None
        assert self._server_output is not None
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._server_output.close()
        # Ends a server that has not forked yet; the others heed the end of file.
        self.server.terminate()
        try:
            self.server.wait(CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()
        self.server = None
