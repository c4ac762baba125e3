"""Runs of ranks that are not there: when each enters and leaves its collectives.

Times are ms here, and ns in the records. The noise is that of four busy ranks on two
cores: most steps take a little longer, and some many milliseconds.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["START", "Run", "noise"]

START = 1_700_000_000_000_000_000
_MS = 1_000_000

#: ms that a rank works before step `n` of `rank`.
Work = Callable[[int, int], float]


def noise(rng: random.Random, heavy: float = 1.0) -> float:
    """Return ms that the scheduler takes: heavy-tailed, as on two loaded cores."""
    late = rng.lognormvariate(-1.0, 0.8)
    if rng.random() < 0.25:
        # Another process had the core for a slice.
        late += rng.choice((3, 4, 4, 8)) * rng.random()
    if rng.random() < 0.02:
        late += min(40.0, 5 * rng.paretovariate(1.2))
    return heavy * late


@dataclass
class Run:
    """Ranks in a loop of joint collectives, which record what they do."""

    ranks: int = 4
    seed: int = 0
    #: A factor of `noise`.
    heavy: float = 1.0
    #: Rank → ms by which its clock is ahead.
    clocks: Mapping[int, float] = field(default_factory=dict)
    op: str = "all_reduce"
    backend: str = "tcp"
    #: ms after all have entered until a rank leaves, of its own.
    leave: Callable[[int, int], float] = lambda n, rank: 0.0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.now = dict.fromkeys(range(self.ranks), 0.0)
        self.counts: Counter[tuple[int, str, bool]] = Counter()
        self.records: dict[int, list[dict[str, Any]]] = {r: [] for r in self.now}
        self.groups = {"default": tuple(range(self.ranks))}

    def steps(
        self,
        count: int,
        work: Work = lambda n, rank: 1.0,
        *,
        line: str = "cell 7 line 9",
        late_line: Mapping[int, str] | None = None,
        group: str = "default",
        waited: Callable[[int], float | None] = lambda rank: 0.0,
    ) -> Run:
        """Let all ranks of `group` work and then enter a collective, `count` times.

        ``waited(rank)`` is how many ms after its entry a rank begins to wait; ``None``:
        it never does.
        """
        members = self.groups[group]
        for n in range(count):
            for rank in members:
                self.now[rank] += work(n, rank) + noise(self.rng, self.heavy)
            everyone = max(self.now[rank] for rank in members)
            for rank in members:
                entered, left = self.now[rank], everyone + 0.05
                left += 0.1 * noise(self.rng, self.heavy) + self.leave(n, rank)
                after = waited(rank)
                self.add(
                    rank,
                    self.op,
                    entered,
                    left,
                    (late_line or {}).get(rank, line),
                    group=group,
                    waited=None if after is None else entered + after,
                )
                self.now[rank] = max(left, entered + (after or 0.0))
        return self

    def bursts(self, count: int, size: int, work: Work) -> Run:
        """Let ranks work, issue `size` ops while they compute, and wait, `count` times.

        As DDP does; each op is issued a ms after the one before.
        """
        for n in range(count):
            issued: dict[int, list[float]] = {}
            for rank, now in self.now.items():
                at = now + work(n, rank)
                issued[rank] = []
                for _ in range(size):
                    at += 1 + noise(self.rng, self.heavy)
                    issued[rank].append(at)
            self.now = {rank: times[-1] for rank, times in issued.items()}
            for one in range(size):
                everyone = max(times[one] for times in issued.values())
                for rank, times in issued.items():
                    left = max(everyone, self.now[rank]) + 0.05
                    left += 0.1 * noise(self.rng, self.heavy)
                    waited = self.now[rank]
                    self.add(
                        rank, self.op, times[one], left, "cell 7 line 9", waited=waited
                    )
                    self.now[rank] = left
        return self

    def add(
        self,
        rank: int,
        op: str,
        entered: float,
        left: float,
        line: str = "cell 7 line 2",
        *,
        group: str = "default",
        waited: float | None = 0.0,
        **fields: Any,
    ) -> None:
        """Record an op of a rank; `waited` is when it began to wait."""

        def at(ms: float) -> int:
            return START + int((ms + self.clocks.get(rank, 0.0)) * _MS)

        is_p2p = op in ("send", "recv")
        self.counts[rank, group, is_p2p] += 1
        seq = self.counts[rank, group, is_p2p]
        self.records[rank].append(
            {
                "group": group,
                "group_id": group,
                "generation": 0,
                "collective_seq_id": 0 if is_p2p else seq,
                "p2p_seq_id": seq if is_p2p else 0,
                "op": op,
                "backend": self.backend,
                "is_p2p": is_p2p,
                "state": "completed",
                "sizes": [] if op == "barrier" else [[1024]],
                "dtypes": [] if op == "barrier" else ["float32"],
                "splits": None,
                "time_created_ns": at(entered),
                "time_started_ns": at(entered),
                "time_ended_ns": at(left),
                "time_waited_ns": 0 if waited is None else at(max(waited, entered)),
                "frame": {"source": line},
                **fields,
            }
        )

    def dumps(self, last: int | None = None) -> dict[int, dict[str, Any]]:
        """Return what `local_dump` returns on each rank, of the `last` records."""
        groups = {
            name: {"name": name, "ranks": list(members)}
            for name, members in self.groups.items()
        }
        return {
            rank: {
                "rank": rank,
                "groups": {k: v for k, v in groups.items() if rank in v["ranks"]},
                "records": records[-(last or len(records)) :],
            }
            for rank, records in self.records.items()
        }
