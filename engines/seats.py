"""Which engine sits where: ranks stay, engines come and go."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import ClusterError
from .gpus import Gpus
from .status import GroupStatus, RankStatus
from .summary import parse_summary

__all__ = ["Seat", "check_ranks", "death_of", "environment", "how_it_ended", "members"]

#: A rank that was not heard for so many seconds is shown as unreachable.
SILENCE = 5.0


@dataclass
class Seat:
    """A rank and the engine that holds it now."""

    rank: int
    engine_id: int
    uuid: str
    pid: int
    host: str
    address: str
    #: A port that was free on the engine's host, for MASTER_PORT.
    port: int
    #: Why the engine is about to go, where it is we who end it.
    leaving: str | None = None
    #: Why the engine is gone; ``None`` while it lives.
    death: str | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    #: When the summary came, ``time.monotonic()``.
    heard: float | None = None

    @property
    def alive(self) -> bool:
        """Whether the engine lives, as far as is known."""
        return self.death is None

    @property
    def name(self) -> str:
        """The engine as messages have it."""
        return (
            f"engine of rank {self.rank} (engine {self.engine_id}, pid {self.pid} "
            f"on {self.host})"
        )

    def status(self, now: float) -> RankStatus:
        """What is known about the rank at `now` (``time.monotonic()``)."""
        age = None if self.heard is None else now - self.heard
        groups, cell, busy_for, gpu, reason = self._read()
        if self.death is not None:
            state = "dead"
        elif age is None or age > SILENCE:
            state = "unreachable"
        else:
            state = "busy" if self.summary.get("busy") else "idle"
        return RankStatus(
            rank=self.rank,
            engine_id=self.engine_id,
            host=self.host,
            pid=self.pid,
            state=state,
            reason=self.death or reason,
            heartbeat_age=age,
            cell=cell if self.alive else None,
            busy_for=busy_for if self.alive else None,
            gpu=gpu,
            groups=groups,
            summary=self.summary,
        )

    def _read(
        self,
    ) -> tuple[tuple[GroupStatus, ...], int | None, float | None, str, str | None]:
        """The summary, and why it cannot be read: it comes from another process."""
        try:
            return *parse_summary(self.summary), None
        except (KeyError, ValueError) as error:
            why = f"what it says of itself cannot be read ({error})"
            return (), None, None, "", why


def death_of(seat: Seat, exit_code: int | None) -> str:
    """Why an engine is gone, from what its exit code says (``None``: unknown)."""
    return seat.leaving or f"{seat.name} {how_it_ended(exit_code)}"


def how_it_ended(exit_code: int | None) -> str:
    """``died: killed by SIGKILL`` and the like (``None``: it is not known how)."""
    if exit_code is None:
        return "died"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"died: killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"died: killed by signal {-exit_code}"


def environment(seats: Sequence[Seat], gpus: Gpus) -> dict[int, dict[str, str]]:
    """The variables by which other frameworks know their rank, for each rank."""
    hosts: dict[str, list[int]] = {}
    for seat in seats:
        hosts.setdefault(seat.host, []).append(seat.rank)
    first = seats[0]
    return {
        seat.rank: {
            "RANK": str(seat.rank),
            "WORLD_SIZE": str(len(seats)),
            "LOCAL_RANK": str(hosts[seat.host].index(seat.rank)),
            "LOCAL_WORLD_SIZE": str(len(hosts[seat.host])),
            "MASTER_ADDR": "127.0.0.1" if len(hosts) == 1 else first.address,
            "MASTER_PORT": str(first.port),
            **gpus.environment(seat.rank),
        }
        for seat in seats
    }


def check_ranks(ranks: Iterable[int] | int | None, size: int) -> list[int]:
    """Return `ranks` (``None``: all) as a sorted list without repeats.

    Raises `ClusterError` for an empty list and for a rank that there is not.
    """
    if ranks is None:
        return list(range(size))
    chosen = [ranks] if isinstance(ranks, int) else list(ranks)
    wrong = [rank for rank in chosen if not _is_rank(rank, size)]
    if wrong:
        raise ClusterError(
            f"no rank {', '.join(map(str, wrong))}: this cluster has ranks "
            f"0 to {size - 1}"
        )
    if not chosen:
        raise ClusterError("ranks is empty: name at least one rank, or None for all")
    return sorted(set(chosen))


def _is_rank(rank: object, size: int) -> bool:
    return isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < size


def members(
    summaries: Mapping[int, Mapping[str, Any]], name: str
) -> dict[tuple[int, ...], list[Mapping[str, Any]]]:
    """Groups called `name` → what their ranks say: disjoint groups may share it."""
    found: dict[tuple[int, ...], list[Mapping[str, Any]]] = {}
    for summary in summaries.values():
        for group in summary.get("groups", ()):
            if group["name"] == name:
                found.setdefault(tuple(group["ranks"]), []).append(group)
    return found
