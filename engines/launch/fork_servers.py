"""The notebook's end of a fork server, `agent.fork_server`: of this host or another."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from ..errors import ClusterStartError
from .leashed import LeashedProcess

__all__ = ["MODULE", "ForkServer"]

MODULE = "rankscope.engines.agent.fork_server"
#: Each answer of a fork server has one of these; the first one, of whatever release,
#: has its version.
_ANSWERS = frozenset(("rankscope", "at", "refused", "pids", "failed"))


class Forked(Protocol):
    """The launcher of an engine that a fork server has."""

    def forked(self, pid: int) -> None: ...

    def ended(
        self, exit_code: int | None, output: str = "", why: str | None = None
    ) -> None: ...


class ForkServer(LeashedProcess):
    """A process that forks engines, which end with it."""

    def __init__(
        self,
        command: Sequence[str],
        on_end: Callable[[ForkServer], None],
        *,
        env: Mapping[str, str] | None = None,
        kept: bool = False,
    ) -> None:
        self._by_pid: dict[int, Forked] = {}
        super().__init__(command, on_end, env=env, kept=kept)

    async def fork(
        self,
        engines: Mapping[Forked, dict[str, Any]],
        environment: Mapping[str, str],
        *,
        torch: bool = False,
        stay: float | None = None,
    ) -> None:
        """Fork an engine for each launcher, with what the server is to know of it."""
        # Until then it may be importing, or its ssh connecting.
        self.listens = True
        message = {
            "fork": [*engines.values()],
            "environment": {**environment},
            "torch": torch,
            "stay": stay,
        }
        await self.ask(message, [*engines])

    def _handle(self, message: dict[str, Any]) -> None:
        if "pid" not in message:
            # What a login has printed may look like a message.
            if not _ANSWERS.isdisjoint(message):
                super()._handle(message)
            return
        launcher = self._by_pid.pop(message["pid"], None)
        if launcher is not None:
            launcher.ended(message["exit_code"], message["output"])

    def _answer(
        self,
        message: dict[str, Any],
        reply: asyncio.Future[dict[str, Any]],
        about: Iterable[Forked] | None,
    ) -> None:
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
            for launcher, pid in zip(about or (), pids, strict=True):
                self._by_pid[pid] = launcher
                launcher.forked(pid)
        except Exception as error:  # noqa: BLE001 - raised by `fork`
            reply.set_exception(error)
        else:
            reply.set_result(message)

    def take_engines(self) -> list[Any]:
        """Return the launchers of the engines whose ends it cannot report any more."""
        left = [*self._by_pid.values()]
        self._by_pid.clear()
        return left
