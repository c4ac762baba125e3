"""This host alone: its ranks are started as those of others, without a question."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from . import fork_servers
from .fork_servers import ForkServer
from .hosts import Hosts

__all__ = ["LocalHost"]


class LocalHost(Hosts):
    """This host, with `n` ranks; each start has a fork server, which imports anew."""

    is_local = True

    def __init__(self, n: int = 1, by_command: bool = False) -> None:
        self.name = socket.gethostname()
        super().__init__({self.name: n})
        self.by_command = by_command
        self.descriptions = {self.name: {"name": self.name}}
        # Fork servers of earlier starts that have engines.
        self._earlier: list[ForkServer] = []

    def leash(self, name: str) -> str:
        return "the process that forks the ranks"

    def silent_hosts(self, names: Sequence[str]) -> str:
        pid = self.servers[self.name].process.pid
        return f"{self.leash(self.name)} (pid {pid}) is stopped, or gets no CPU"

    def command(self, name: str) -> list[str]:
        imports = ["plain"] if self.by_command else []
        return [sys.executable, "-m", fork_servers.MODULE, *imports]

    async def connect(self, name: str) -> dict[str, Any]:
        """Start a fork server, which is not waited for: it has to import."""
        before = self.servers.get(name)
        if before is not None and before.is_open:
            self._earlier.append(before)
        self.servers[name] = self._start_server(name)
        return self.descriptions[name]

    async def connect_again(self, names: Iterable[str]) -> None:
        """Start a fork server, unless there is one that has forked nothing."""
        server = self.servers.get(self.name)
        if server is None or not server.is_open or server.listens:
            await self.connect(self.name)

    async def check_reach(self, address: str, port: int) -> None:
        """Do nothing: the ranks connect to their own host."""

    def environment(self) -> dict[str, str]:
        """Return nothing: the fork server has the environment of this process."""
        return {}

    def _all_servers(self) -> list[ForkServer]:
        self._earlier = [one for one in self._earlier if one.is_open]
        return [*self._earlier, *super()._all_servers()]

    def record(self) -> dict[str, Any]:
        # Nothing that changes with a start, and would be written anew.
        return {"local": sum(self.ranks.values()), "by_command": self.by_command}
