"""Launchers of engines that fork servers start, on this host or on others: `hosts`."""

from __future__ import annotations

import asyncio
import json
import signal
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from ipyparallel.cluster.launcher import LocalEngineLauncher, LocalEngineSetLauncher
from traitlets import Any as AnyTrait

from ..errors import ClusterStartError
from .fork_servers import ForkServer
from .host_options import kept_hosts
from .hosts import Hosts

__all__ = ["ForkedEngineLauncher", "ForkedEngineSetLauncher"]


class ForkedEngineLauncher(LocalEngineLauncher):  # type: ignore[misc]
    """One engine of a `ForkedEngineSetLauncher`, on the host of its fork server."""

    _hosts: Hosts
    _server: ForkServer
    # Asks why the engine has ended.
    _asking: asyncio.Task[None] | None = None

    def place(self, hosts: Hosts, name: str) -> None:
        self._hosts, self._server = hosts, hosts.servers[name]
        #: What that calls itself.
        self.host = hosts.descriptions[name]["name"]
        self._ended = asyncio.Event()

    def start(self) -> None:
        """Do nothing: the set forks all its engines at once."""

    def forked(self, pid: int) -> None:
        """Take over the engine that was forked: its pid is one of its own host."""
        self.pid = pid
        self.notify_start(pid)

    def ended(
        self, exit_code: int | None, output: str = "", why: str | None = None
    ) -> None:
        """Report the end of the engine: its last lines; `why`, without a code."""
        # That of an engine with a log file is read there.
        self._output = output or None
        if self._hosts.job is None or self._hosts.closing:
            self._report(exit_code, why)
        else:
            self._asking = asyncio.ensure_future(self._report_with(exit_code, why))

    async def _report_with(self, exit_code: int | None, why: str | None) -> None:
        """Report the end of the engine once it is known whether it is the job's."""
        if cause := await self._hosts.why_ended():
            exit_code, why = None, cause
        self._report(exit_code, why)

    def _report(self, exit_code: int | None, why: str | None) -> None:
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

    def signal(self, sig: int) -> None:
        """Send a signal by the fork server, which is the engine's parent."""
        if self.pid > 0:
            self._server.send({"signal": [self.pid, int(sig)]})

    async def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the engine, if one was forked."""
        if self.pid <= 0:
            return
        try:
            await asyncio.wait_for(self._ended.wait(), timeout)
        except asyncio.TimeoutError as error:
            raise TimeoutError(f"pid {self.pid} did not end in {timeout} s") from error


class ForkedEngineSetLauncher(LocalEngineSetLauncher):  # type: ignore[misc]
    """Engines that the fork servers of `hosts` start, as the ranks `ranks`.

    What ipyparallel makes out of a cluster file has no fork servers: those are of the
    process that started them, with which its engines end, unless they are kept.
    """

    #: In cluster files: how ipyparallel imports this class.
    entrypoint_name = f"{__name__}.ForkedEngineSetLauncher"

    launcher_class = ForkedEngineLauncher

    hosts = AnyTrait()
    ranks = AnyTrait()

    #: Whether another process has started these engines.
    found = False

    async def start(self, n: int) -> None:
        """Fork `n` engines, each on the host of its rank."""
        hosts: Hosts | None = self.hosts
        if hosts is None:
            raise ClusterStartError(
                "the notebook that started these ranks has the connections to their "
                "hosts: only it can start others there"
            )
        await hosts.connect_again({hosts.names[rank] for rank in self.ranks})
        info = json.loads(self.environment["IPP_CONNECTION_INFO"])
        await hosts.check_reach(
            urlsplit(info["interface"]).hostname or "", int(info["registration"])
        )
        super().start(n)
        hosts.engine_args = hosts.engine_args or self.engine_args
        engines: dict[str, dict[Any, dict[str, Any]]] = {}
        for rank, launcher in zip(self.ranks, self.launchers.values(), strict=True):
            name = hosts.names[rank]
            launcher.place(hosts, name)
            launcher.engine_args = hosts.engine_args
            engines.setdefault(name, {})[launcher] = {
                "output": launcher.output_file if hosts.is_local else None,
                "arguments": launcher.engine_args,
                "command": launcher.args if hosts.by_command else None,
                # Here ranks are in the order of ipyparallel's numbers.
                "job_rank": None if hosts.is_local else rank,
            }
        environment = {
            **hosts.environment(),
            "IPP_CLUSTER_ID": self.cluster_id,
            **self.environment,
        }
        if hosts.is_local:
            # Its path is none of the other hosts.
            environment["IPP_PROFILE_DIR"] = self.profile_dir
        fork = partial(
            ForkServer.fork,
            environment=environment,
            torch=hosts.torch and not hosts.by_command,
            stay=None if hosts.is_local else hosts.lost_after,
        )
        try:
            await asyncio.gather(
                *(
                    hosts.answer_of(name, fork(hosts.servers[name], each))
                    for name, each in engines.items()
                )
            )
        except BaseException:
            for launcher in self.launchers.values():
                launcher.signal(signal.SIGKILL)
            raise
        self.notify_start([one.pid for each in engines.values() for one in each])

    def to_dict(self) -> dict[str, Any]:
        hosts: Hosts | None = self.hosts
        known = hosts is not None and (hosts.kept or hosts.is_local)
        record = hosts.record() if hosts is not None and known else None
        return {**super().to_dict(), "engines": {}, "hosts": record}

    @classmethod
    def from_dict(cls, d: dict[str, Any], **kwargs: Any) -> ForkedEngineSetLauncher:
        """Return a set of engines that cannot be reached from here."""
        launcher = cls(**kwargs)
        launcher.state, launcher.found = "running", True
        if d.get("hosts"):
            launcher.hosts = kept_hosts(d["hosts"])
        return launcher
