"""Who kept the others waiting, by the dumps of ranks that note since when they wait.

Those are ours: torch's own recorder does not note it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from ..observe.joint_ops import share_of
from ..observe.lateness import Lateness
from ..observe.records import Record
from .flight_dump import Dump
from .flight_entry import Entry

__all__ = ["LAST", "late_records", "lateness_of"]

#: The newest records of each rank that are judged: fewer where there are many ranks.
LAST = 200


def late_records(entries: Sequence[Entry]) -> list[Record]:
    """Return what tells of the last ops, oldest first; nothing of torch's own dumps."""
    told = [one for one in entries if one.ours and "time_waited_ns" in one.ours]
    told.sort(key=attrgetter("created_ns"))
    return [found for one in told[-LAST:] if (found := _record(one)) is not None]


def _record(entry: Entry) -> Record | None:
    """Return the keys that `Lateness` needs; ``None`` where one has another type."""
    ours = entry.ours or {}
    waited = ours["time_waited_ns"]
    sizes = [ours.get("input_sizes"), ours.get("output_sizes")]
    texts = [ours.get(name) for name in ("op", "backend", "state")]
    if (
        not all(type(one) is str for one in texts)
        or not all(isinstance(one, list) for one in sizes)
        or not all(isinstance(one, list) for side in sizes for one in side or ())
        or not (waited is None or type(waited) is int)
    ):
        return None
    op, backend, state = texts
    splits: Any = ours.get("splits")
    return {
        "group_id": entry.kind.group[0],
        # Each generation of a group is a process group of its own there.
        "generation": 0,
        "collective_seq_id": entry.collective_seq_id,
        "op": op,
        "backend": backend,
        "is_p2p": entry.kind.is_p2p,
        "state": state,
        "sizes": [size for side in sizes for size in side or ()],
        "splits": splits if isinstance(splits, list) else None,
        "time_created_ns": entry.created_ns,
        "time_ended_ns": entry.ended_ns or 0,
        "time_waited_ns": waited,
        "frame": {"source": str(entry.line or "")},
    }


def lateness_of(
    records: Mapping[int, Sequence[Record]], dumps: Mapping[int, Dump]
) -> Lateness:
    """Return what the records of ranks tell together.

    Of a rank whose dump does not name its host, the clock is its own.
    """
    lateness = Lateness(ended=True)
    last = share_of(len(records), LAST)
    lateness.take(
        {
            rank: {
                "groups": {
                    name: {"name": _shown(name, text), "ranks": ranks}
                    for name, (text, ranks) in dumps[rank].config.items()
                    if ranks
                },
                "records": some[-last:],
            }
            for rank, some in records.items()
            if some
        },
        hosts={rank: one.host or f"rank {rank}" for rank, one in dumps.items()},
    )
    return lateness


def _shown(name: str, text: str) -> str:
    """Return what people call a group: torch's tools have another word for ours."""
    return "default" if text == "default_pg" and name.startswith("default") else text
