"""Clusters that are not there: their statuses, verdicts and rings, of any size."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from rankscope.backends.groups.key import GroupKey
from rankscope.backends.observe.verdicts import Fault, Verdict
from rankscope.engines import ClusterStatus, OpStatus, RankStatus
from tests.widgets import statuses

__all__ = ["Simulation", "hang", "ring"]

MIB = 1 << 20


class Simulation:
    """`size` ranks that all_reduce in step, one after the other, for ever."""

    def __init__(self, size: int, seed: int = 1) -> None:
        self.size = size
        self.seq = 100
        self._random = random.Random(seed)

    def step(self, ranks: Sequence[int] | None = None) -> ClusterStatus:
        """Let every rank get on; return the status of `ranks` (default: all)."""
        self.seq += self._random.randint(1, 30)
        chosen = range(self.size) if ranks is None else ranks
        return statuses.cluster(*(self.running(number) for number in chosen))

    def running(self, number: int) -> RankStatus:
        """A rank in the middle of a fast loop."""
        seq = self.seq - self._random.randint(0, 2)
        done = op(seq - 1, duration=self._random.uniform(1e-3, 3e-3))
        now = op(seq, state="started", elapsed=self._random.uniform(0, 2e-3))
        one = statuses.group(
            ranks=range(self.size),
            enqueued=now,
            started=now,
            completed=done,
            oldest=now,
            in_flight=1,
            issued=seq,
            timeout=300.0,
        )
        return statuses.rank(
            number,
            one,
            state="busy",
            cell=7,
            busy_for=12.0,
            heartbeat_age=self._random.uniform(0, 0.2),
        )


def op(seq: int, **fields: Any) -> OpStatus:
    """An all_reduce of 4 MiB from line 5 of cell 7."""
    values: dict[str, Any] = {
        "sizes": ((1024, 1024),),
        "dtypes": ("float32",),
        "nbytes": 4 * MIB,
        "timeout": 300.0,
        "source": "cell 7 line 5",
    }
    return statuses.op("all_reduce", seq, **{**values, **fields})


def hang(
    size: int, absent: int, elapsed: float = 6.2
) -> tuple[ClusterStatus, list[Verdict]]:
    """All ranks but `absent` are in all_reduce #14, which it never entered."""
    ranks = []
    for number in range(size):
        done = op(13, duration=2.1e-3)
        if number == absent:
            one = statuses.group(
                ranks=range(size), completed=done, issued=13, timeout=300.0
            )
            ranks.append(statuses.rank(number, one))
            continue
        now = op(14, state="started", elapsed=elapsed)
        one = statuses.group(
            ranks=range(size),
            enqueued=now,
            started=now,
            completed=done,
            oldest=now,
            in_flight=1,
            issued=14,
            timeout=300.0,
        )
        ranks.append(
            statuses.rank(number, one, state="busy", cell=7, busy_for=elapsed + 0.1)
        )
    waiting = tuple(number for number in range(size) if number != absent)
    names = (
        f"ranks 0–{size - 1} but {absent}"
        if size > 8
        else ("ranks " + ", ".join(map(str, waiting)))
    )
    verdict = Verdict(
        Fault.MISSING_RANKS,
        GroupKey("default", tuple(range(size))),
        (absent,),
        waiting,
        "all_reduce",
        14,
        f"rank {absent} has not entered all_reduce #14 (cell 7 line 5): it runs no "
        f"cell; {names} wait in it",
    )
    return statuses.cluster(*ranks), [verdict]


def ring(
    rank: int,
    size: int,
    late: int | None = None,
    count: int = 40,
    absent: bool = False,
) -> dict[str, Any]:
    """The ring of a rank that did `count` all_reduces; `late` comes 8 ms late.

    Where `absent` is given, there is one more, in flight, that it is not in.
    """
    noise = random.Random(rank)
    records = []
    at = 1_000_000_000
    for seq in range(1, count + 1):
        arrivals = [
            at + random.Random(seq * 1000 + r).randrange(400_000) for r in range(size)
        ]
        if late is not None:
            arrivals[late] += 8_000_000
        created = arrivals[rank]
        end = max(arrivals) + 2_000_000 + noise.randrange(100_000)
        records.append(record(seq, created, created + 20_000, end))
        at = max(arrivals) + 2_400_000
    if absent is not False:
        records.append(record(count + 1, at, at + 20_000, 0, state="started"))
    groups = {"default": {"name": "default", "ranks": list(range(size))}}
    return {"rank": rank, "groups": groups, "records": records}


def record(
    seq: int, created: int, started: int, ended: int, state: str = "completed"
) -> dict[str, Any]:
    """One entry, as `Record.as_dict` makes it."""
    return {
        "record_id": seq,
        "group": "default",
        "group_id": "default",
        "generation": 0,
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "op": "all_reduce",
        "backend": "tcp",
        "is_p2p": False,
        "state": state,
        "sizes": [[1024, 1024]],
        "dtypes": ["float32"],
        "peer": None,
        "timeout": 300.0,
        "time_created_ns": created,
        "time_started_ns": started,
        "time_ended_ns": ended,
        "time_waited_ns": created,
        "splits": None,
        "duration_ns": ended - started if ended else None,
        "frame": {"file": "x", "line": 5, "function": "f", "source": "cell 7 line 5"},
        "error": None,
    }
