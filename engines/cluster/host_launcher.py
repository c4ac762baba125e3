"""Launchers of engines that the fork servers of several hosts start: `hosts`."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any
from urllib.parse import urlsplit

from ipyparallel.cluster.launcher import LocalEngineSetLauncher
from traitlets import Any as AnyTrait

from ..errors import ClusterStartError
from .fork_launcher import ForkedEngineLauncher
from .fork_servers import ForkServer
from .host_options import kept_hosts
from .hosts import Hosts

__all__ = ["HostEngineLauncher", "HostEngineSetLauncher"]


class HostEngineLauncher(ForkedEngineLauncher):
    """One engine of a `HostEngineSetLauncher`, on the host of its fork server."""

    _hosts: Hosts
    _server: ForkServer
    _output = ""
    # Asks why the engine has ended.
    _asking: asyncio.Task[None] | None = None

    def place(self, hosts: Hosts, name: str) -> None:
        """Note on which of the hosts the engine is to run."""
        self._hosts, self._server = hosts, hosts.servers[name]
        # What that calls itself.
        self.host = hosts.descriptions[name]["name"]

    def forked(self, pid: int) -> None:
        """Take over the engine that was forked."""
        # Its pid is another process here.
        self._ended = asyncio.Event()
        self.pid = pid
        self.notify_start(pid)

    def ended(
        self, exit_code: int | None, output: str = "", why: str | None = None
    ) -> None:
        """Report the end of the engine, with the last lines that it has printed."""
        self._output = output
        if self._hosts.job is None or self._hosts.closing:
            super().ended(exit_code, output, why)
        else:
            self._asking = asyncio.ensure_future(self._ended_with(exit_code, why))

    async def _ended_with(self, exit_code: int | None, why: str | None) -> None:
        """Report the end of the engine once it is known whether it is the job's."""
        if cause := await self._hosts.why_ended():
            exit_code, why = None, cause
        super().ended(exit_code, self._output, why)

    def signal(self, sig: int) -> None:
        """Send a signal by the fork server, which is the engine's parent."""
        self._server.send({"signal": [self.pid, int(sig)]})

    def get_output(self, remove: bool = False) -> str:
        """Return the last lines of an engine that has failed."""
        return self._output


class HostEngineSetLauncher(LocalEngineSetLauncher):  # type: ignore[misc]
    """Engines that the fork servers of `hosts` start, as the ranks `ranks`.

    What ipyparallel makes out of a cluster file has no fork servers: those are of the
    process that started them, with which its engines end, unless they are kept.
    """

    #: In cluster files: how ipyparallel imports this class.
    entrypoint_name = f"{__name__}.HostEngineSetLauncher"

    launcher_class = HostEngineLauncher

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
            engines.setdefault(name, {})[launcher] = {
                "output": None,
                "arguments": hosts.engine_args,
                "job_rank": rank,
            }
        # The paths of this host's profile are none of the others.
        environment = {
            **hosts.environment(),
            "IPP_CLUSTER_ID": self.cluster_id,
            **self.environment,
        }
        try:
            await asyncio.gather(
                *(
                    hosts.answer_of(
                        name, hosts.servers[name].fork(each, environment, stay=True)
                    )
                    for name, each in engines.items()
                )
            )
        except BaseException:
            for launcher in self.launchers.values():
                if launcher.pid > 0:
                    launcher.signal(signal.SIGKILL)
            raise
        self.notify_start([one.pid for each in engines.values() for one in each])

    def to_dict(self) -> dict[str, Any]:
        """Return what a cluster file has: no pids, which are those of other hosts."""
        hosts = self.hosts.record() if self.hosts and self.hosts.kept else None
        return {**super().to_dict(), "engines": {}, "hosts": hosts}

    @classmethod
    def from_dict(cls, d: dict[str, Any], **kwargs: Any) -> HostEngineSetLauncher:
        """Return a set of engines that cannot be reached from here."""
        launcher = cls(**kwargs)
        launcher.state, launcher.found = "running", True
        if d.get("hosts"):
            launcher.hosts = kept_hosts(d["hosts"])
        return launcher
