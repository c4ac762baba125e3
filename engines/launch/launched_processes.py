"""The processes of a cluster: whose they are, how they end, signals to them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterable
from typing import Any

import ipyparallel
import psutil
from ipyparallel.cluster.launcher import (
    LocalEngineLauncher,
    LocalEngineSetLauncher,
    MPIEngineSetLauncher,
)

from ..errors import ClusterError
from ..wire import ipyparallel_private as private
from .engine_launcher import ForkedEngineLauncher, ForkedEngineSetLauncher
from .files import files_of
from .hosts import Hosts
from .processes import lives, send_signal, with_descendants

__all__ = ["LaunchedProcesses"]

#: Launchers whose processes of this machine are all that has to be ended.
_LOCAL = (LocalEngineSetLauncher, ForkedEngineSetLauncher, MPIEngineSetLauncher)

OnExit = Callable[[int, int | None], None]
#: Called with pid, exit code (negative for a signal, ``None``: not known), the name of
#: the host (``None``: not known), and why the engine has ended where that is known.
OnEngineExit = Callable[[int, int | None, str | None, str | None], None]


class LaunchedProcesses:
    """The processes that the launchers of a `cluster` have started."""

    cluster: ipyparallel.Cluster

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        #: The hosts that engines are started on, by their fork servers; ``None``:
        #: ipyparallel starts them.
        self.hosts: Hosts | None = None
        self._on_exit: OnEngineExit | None = None
        self._on_controller_exit: OnExit | None = None
        # What `_on_exit` was called with, by identity: pids are given again.
        self._reported: dict[int, dict[str, Any]] = {}
        # Engines that another process started, which end with the others.
        self._adopted: list[psutil.Process] = []

    def watch(self, on_exit: OnEngineExit, on_controller_exit: OnExit) -> None:
        """Call ``on_exit(pid, exit_code, host, why)`` when an engine ends.

        Of an engine with a launcher of its own. The callback runs on this object's
        thread. Call `watch` again after engines were added.
        """
        self._on_exit = on_exit

        def watch() -> None:
            for engine_set in self.cluster.engines.values():
                # The launcher of an engine that ended is gone.
                ended = (engine_set.stop_data or {}).get("engines", {})
                for stop_data in ended.values():
                    if id(stop_data) not in self._reported:
                        self._on_engine_stop(stop_data)
            for launcher in self._engine_launchers():
                if self._on_engine_stop not in launcher.stop_callbacks:
                    launcher.on_stop(self._on_engine_stop)
            if self._on_controller_exit is None:
                self._on_controller_exit = on_controller_exit
                self.cluster.controller.on_stop(self._on_controller_stop)

        self._loop.call_soon_threadsafe(watch)

    def _on_engine_stop(self, stop_data: dict[str, Any]) -> None:
        assert self._on_exit is not None
        self._reported[id(stop_data)] = stop_data
        self._on_exit(
            stop_data["pid"],
            _exit_code(stop_data),
            stop_data.get("host"),
            stop_data.get("why"),
        )

    def _on_controller_stop(self, stop_data: dict[str, Any]) -> None:
        assert self._on_controller_exit is not None
        self._on_controller_exit(stop_data.get("pid", -1), _exit_code(stop_data))

    def _engine_launchers(self) -> list[Any]:
        return [
            launcher
            for engine_set in list(self.cluster.engines.values())
            # A copy: the loop's thread removes the launcher of an engine that ended.
            for launcher in list(getattr(engine_set, "launchers", {}).values())
            if isinstance(launcher, LocalEngineLauncher)
        ]

    def fork_servers(self) -> list[psutil.Process]:
        """The processes that engines were forked from, or that lead to them."""
        return [] if self.hosts is None else self.hosts.processes()

    def _launchers(self) -> list[Any]:
        cluster = getattr(self, "cluster", None)
        if cluster is None:
            return []
        controller = [] if cluster.controller is None else [cluster.controller]
        return [*controller, *cluster.engines.values(), *self._engine_launchers()]

    @property
    def controller_pid(self) -> int | None:
        process = private.process_of(self.cluster.controller)
        return None if process is None else process.pid

    def check_controller(self) -> None:
        """Raise `ClusterError` if the controller, which is on this machine, ended."""
        process = private.process_of(self.cluster.controller)
        if process is not None and not lives(process):
            raise ClusterError(
                f"the controller (pid {process.pid}) has ended, and engines cannot "
                "start without it: %dist_shutdown, then %dist_init starts others"
            )

    def _launcher_of(self, pid: int, host: str) -> Any:
        """Return the launcher of one engine; ``None`` if there is none."""
        here = socket.gethostname()
        for launcher in self._engine_launchers():
            if launcher.pid == pid and getattr(launcher, "host", here) == host:
                return launcher
        return None

    def has_engine(self, pid: int, host: str) -> bool:
        """Whether `pid` is an engine whose exit code `watch` will report."""
        return self._launcher_of(pid, host) is not None

    def signal_engine(self, pid: int, host: str, signum: int) -> bool:
        """Send a signal to an engine by its launcher; return whether it has one."""
        launcher = self._launcher_of(pid, host)
        if launcher is not None:
            _signal(launcher, signum)
        return launcher is not None

    def kill_engines(self, but: Iterable[tuple[int, str]]) -> bool:
        """Kill the engines, `but` some; return whether each has a launcher."""
        launchers = self._engine_launchers()
        spared = [self._launcher_of(*one) for one in but]
        for launcher in launchers:
            if launcher not in spared:
                _signal(launcher, signal.SIGKILL)
        return bool(launchers)

    @property
    def has_lost_engines(self) -> bool:
        """Whether another process has the fork servers of engines."""
        return any(
            isinstance(one, ForkedEngineSetLauncher) and one.found
            for one in self.cluster.engines.values()
        )

    @property
    def uses_mpi(self) -> bool:
        return self.cluster.engine_launcher_class is MPIEngineSetLauncher

    @property
    def is_local(self) -> bool:
        """Whether everything that was started runs on this machine."""
        return (
            self._has_controller_here and self.cluster.engine_launcher_class in _LOCAL
        )

    @property
    def _has_controller_here(self) -> bool:
        kind = self.cluster.controller_launcher_class
        return kind.__name__ == "LocalControllerLauncher"

    def processes(self) -> list[psutil.Process]:
        """The present processes of the cluster on this machine."""
        return [*with_descendants(self._leaders()).values()]

    def _leaders(self) -> list[psutil.Process]:
        """The processes of the cluster on this machine, without their descendants."""
        found = map(private.process_of, self._launchers())
        started = [process for process in found if process is not None]
        return [*started, *self.fork_servers(), *self._adopted]

    def adopt(self, pids: Iterable[int]) -> None:
        """End these engines of this machine, too, when the cluster ends."""
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._adopted.append(psutil.Process(pid))

    def files(self) -> list[str]:
        return files_of(self.cluster.profile_dir, self.cluster.cluster_id)


def _exit_code(stop_data: dict[str, Any]) -> int | None:
    code = stop_data.get("exit_code")
    return code if isinstance(code, int) else None


def _signal(launcher: Any, signum: int) -> None:
    """Send a signal to the engine of a launcher, which may have ended."""
    if isinstance(launcher, ForkedEngineLauncher):
        launcher.signal(signum)
    else:
        send_signal(private.process_of(launcher), signum)
