"""Launchers of engines that are forked from one process: `agent.fork_server`."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import Any

import psutil
from ipyparallel.cluster.launcher import LocalEngineLauncher, LocalEngineSetLauncher

from ..errors import ClusterStartError
from ..wire import ipyparallel_private as private
from . import fork_servers
from .fork_servers import ForkServer
from .leashed import ProcessEnd

__all__ = ["ForkedEngineLauncher", "ForkedEngineSetLauncher"]


class ForkedEngineLauncher(LocalEngineLauncher):  # type: ignore[misc]
    """One engine of a `ForkedEngineSetLauncher`.

    An engine that a cluster file names has no fork server here: such a launcher is
    what its base class is.
    """

    #: The name of the host that the engine runs on.
    host = socket.gethostname()

    _ended: asyncio.Event | None = None

    def start(self) -> None:
        """Do nothing: the set forks all its engines at once."""

    def forked(self, pid: int) -> None:
        """Take over the engine that was forked."""
        self._ended = asyncio.Event()
        self.pid = pid
        self.process = psutil.Process(pid)
        self.notify_start(pid)

    def ended(
        self, exit_code: int | None, output: str = "", why: str | None = None
    ) -> None:
        """Report the end of the engine, and `why` where there is no exit code."""
        assert self._ended is not None
        self._ended.set()
        self.notify_stop(
            {
                "exit_code": exit_code,
                "pid": self.pid,
                "host": self.host,
                "why": why,
                "identifier": self.identifier,
            }
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

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # It imports while the controller starts, which `start` is called after.
        self.server = ForkServer(
            [sys.executable, "-m", fork_servers.MODULE],
            self._server_ended,
            env={**os.environ, **self.get_env()},
            cwd=self.work_dir,
        )
        self.process = self.server.process

    async def start(self, n: int) -> None:
        """Fork `n` engines."""
        super().start(n)
        engines = {
            one: {
                "output": one.output_file,
                "arguments": one.engine_args,
                "job_rank": None,
            }
            for one in self.launchers.values()
        }
        try:
            await self.server.fork(engines, self.get_env())
        except ProcessEnd as error:
            raise ClusterStartError(
                f"the process that forks the engines {error}"
            ) from None
        except BaseException:
            self.server.close()
            raise
        self.notify_start([one.pid for one in engines])

    def _server_ended(self, server: ForkServer) -> None:
        for launcher in server.take_engines():
            launcher.watch_process()

    def release(self) -> None:
        """End the fork server, and leave its engines running.

        On the loop's thread, or with the loop stopped.
        """
        self.server.send({"keep": True})
        self.server.close()
