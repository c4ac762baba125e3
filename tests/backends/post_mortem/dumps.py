"""Flight Recorder dumps that the tests write themselves, as torch does."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["START_NS", "Rank", "write"]

START_NS = 1_790_000_000_000_000_000


@dataclass
class Rank:
    """The recorder of one rank: issue ops, then write what it has recorded."""

    rank: int
    #: Description → global ranks; the default group is the first.
    groups: dict[str, Sequence[int]]
    entries: list[dict[str, Any]] = field(default_factory=list)
    clock_ns: int = START_NS
    library: str = "nccl"

    def issue(
        self,
        op: str = "all_reduce",
        group: str = "default_pg",
        *,
        done: bool = True,
        size: int = 64,
        dtype: str = "Float",
        line: int = 10,
        peer: int | None = None,
        called: Sequence[int] = (),
    ) -> dict[str, Any]:
        """Record an op; a send or receive has a `peer`, a global rank.

        The function of its `line` was called at the lines `called`.
        """
        number = list(self.groups).index(group)
        members = list(self.groups[group])
        earlier = [one for one in self.entries if one["pg_id"] == number]
        p2p = peer is not None
        last = earlier[-1] if earlier else {}
        collective = last.get("collective_seq_id", 0) + (not p2p)
        seq = last.get("p2p_seq_id", 0) + p2p
        if peer is not None:
            way = "->" if op == "send" else "<-"
            op = f"{op} {members.index(self.rank)}{way}{members.index(peer)}"
        created = self.clock_ns + len(self.entries) * 1_000_000
        entry = {
            "frames": [
                {
                    "name": "all_reduce",
                    "filename": "/env/lib/python3.12/site-packages/torch/d.py",
                    "line": 1,
                },
                *(
                    {"name": "step", "filename": "/job/train.py", "line": one}
                    for one in (line, *called)
                ),
            ],
            "record_id": len(self.entries),
            "pg_id": number,
            "process_group": (str(number), group),
            "collective_seq_id": collective,
            "p2p_seq_id": seq,
            "op_id": collective + seq,
            "profiling_name": f"{self.library}:{op}",
            "time_created_ns": created,
            "input_sizes": [[size]],
            "input_dtypes": [dtype],
            "output_sizes": [[size]],
            "output_dtypes": [dtype],
            "state": "completed" if done else "started",
            "time_discovered_started_ns": created + 1,
            "time_discovered_completed_ns": created + 2 if done else None,
            "retired": done,
            "timeout_ms": 600_000,
            "is_p2p": p2p,
        }
        if self.library == "gloo":
            entry.update(state="scheduled", time_discovered_completed_ns=None)
        self.entries.append(entry)
        return entry

    def issue_many(self, count: int, **how: Any) -> None:
        """Record so many ops of one kind."""
        for _ in range(count):
            self.issue(**how)

    def issue_batch(
        self, *ops: str, done: bool = True, closing: str = "coalesced"
    ) -> None:
        """Record collectives of one number; the last entry alone has their state."""
        first = len(self.entries)
        for op in ops:
            entry = self.issue(op, done=False)
            entry.update(state="scheduled", time_discovered_started_ns=None)
        entry = self.issue(closing, done=done)
        for key in ("input_sizes", "output_sizes", "input_dtypes", "output_dtypes"):
            entry[key] = []
        for one in self.entries[first:]:
            one["collective_seq_id"] = self.entries[first]["collective_seq_id"]

    def dump(self, active_only: bool = False) -> dict[str, Any]:
        """Return the content of the file."""
        status = {}
        for number in {one["pg_id"] for one in self.entries}:
            own = [one for one in self.entries if one["pg_id"] == number]
            done = [one for one in own if one["retired"]]
            status[str(number)] = {
                "last_enqueued_collective": _number(own),
                "last_started_collective": -1,
                "last_completed_collective": _number(done),
            }
        return {
            "version": "2.10",
            "pg_config": {
                str(number): {
                    "name": str(number),
                    "desc": name,
                    "ranks": str(list(ranks)),
                }
                for number, (name, ranks) in enumerate(self.groups.items())
            },
            "pg_status": status,
            "entries": [
                one for one in self.entries if not (active_only and one["retired"])
            ],
        }


def _number(entries: list[dict[str, Any]]) -> int:
    if not entries:
        return -1
    last = entries[-1]
    number: int = last["p2p_seq_id" if last["is_p2p"] else "collective_seq_id"]
    return number


def write(
    folder: Path,
    ranks: Iterable[Rank],
    name: str = "nccl_trace_rank_{}",
    *,
    as_json: bool = False,
    active_only: bool = False,
) -> Path:
    """Write the dumps of `ranks` into `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in ranks:
        content = one.dump(active_only)
        data = json.dumps(content).encode() if as_json else pickle.dumps(content, 2)
        (folder / name.format(one.rank)).write_bytes(data)
    return folder
