"""Group: one tab of the board, with a row for each of its ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rankscope.backends.groups.key import GroupKey
from rankscope.backends.observe.verdicts import Fault, Verdict
from rankscope.backends.rank_sets import name_ranks
from rankscope.engines import GroupStatus, OpStatus
from rankscope.engines.observe.crash import differences_between

from ..units import elapsed_text
from .rows import NOT_BUILT, Cells, text
from .transports import Connections, transports_text

__all__ = ["NO_GROUP", "Group", "blamed"]

#: The name of the tab with the ranks that have no group.
NO_GROUP = "no group"

#: Seconds without progress after which a rank's lag behind the others is shown.
STANDSTILL = 1.0

#: The moods of ranks, the worst first → what a group with such a rank does.
_STATES = {
    "error": "error",
    "warning": "no answer",
    "working": "in flight",
    "busy": "running",
    "calm": "idle",
}
_MOODS = tuple(_STATES)


def blamed(verdict: Verdict) -> list[int]:
    """Return the ranks at fault: in a deadlock all that wait for each other."""
    return sorted({*verdict.culprits}.union(*(one.ranks for one in verdict.cycle)))


#: Completed ops of one kind that count, the last ones.
_LAST = 64

#: Ops that take about equally long: the name, and the bytes that it moves.
_Kind = tuple[str, int | None]


class Durations:
    """The durations of completed ops, and the median for one that is in flight."""

    def __init__(self) -> None:
        self._seen: dict[int, OpStatus] = {}
        self._known: dict[_Kind, deque[float]] = {}
        self._medians: dict[_Kind, float] = {}

    def add(self, rank: int, completed: OpStatus | None) -> None:
        """Take in the op that `rank` reports as its last one completed."""
        if completed is None or completed == self._seen.get(rank):
            return
        self._seen[rank] = completed
        # Below 0: the clock was set back.
        if completed.duration is not None and completed.duration >= 0:
            kind = completed.op, completed.nbytes
            self._known.setdefault(kind, deque(maxlen=_LAST)).append(completed.duration)
            self._medians.pop(kind, None)

    def median(self, op: OpStatus) -> float | None:
        """Return the median of the ops of this name and size; None: none is known."""
        kind = op.op, op.nbytes
        if kind in self._known and kind not in self._medians:
            self._medians[kind] = median(self._known[kind])
        return self._medians.get(kind)


@dataclass
class Group:
    """A tab of the board: one group, with a row for each of its ranks."""

    id: str
    #: The name as it is shown.
    name: str
    key: GroupKey
    #: What is less of the groups with a tab before this one.
    place: tuple[Any, ...]
    backend: str = ""
    timeout: float | None = None
    #: The library that made it; empty for Rankscope's own.
    library: str = ""
    #: Rank → the cells made of its own status.
    base: dict[int, Cells] = field(default_factory=dict)
    #: Rank → the cells from comparing ranks: ``lag``, ``verdict``, ``blame``.
    extra: dict[int, Cells] = field(default_factory=dict)
    #: Rank that is behind → its number of collectives, and since when it has that one.
    late: dict[int, tuple[int, float]] = field(default_factory=dict)
    #: The last verdict on it, and the generation that hung.
    hang: tuple[Verdict, int] | None = None
    durations: Durations = field(default_factory=Durations)
    #: Rank → the status that its row was made of.
    statuses: dict[int, GroupStatus] = field(default_factory=dict)
    # What the transports were last written of, and the text.
    _connected: tuple[Connections, dict[int, str]] = field(default=({}, {}), repr=False)
    _transports: str = field(default="", repr=False)
    # The ops that were compared last, and the result.
    _compared: tuple[dict[int, OpStatus | None], list[Verdict]] = field(
        default=({}, []), repr=False
    )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the group, also those that did not report it yet."""
        return self.key.ranks

    @property
    def aborted(self) -> bool:
        """Whether the group is aborted on any rank."""
        return any(row["state"] == "aborted" for row in self.base.values())

    @property
    def aborts(self) -> dict[int, GroupStatus]:
        """The status of each rank on which the group is aborted."""
        return {r: one for r, one in self.statuses.items() if one.state == "aborted"}

    @property
    def uneven(self) -> bool:
        """Whether its ranks are idle, after unequal numbers of collectives."""
        rows = self.base.values()
        idle = all(row["mood"] == "calm" for row in rows)
        return idle and len({row.get("issued") for row in rows}) > 1

    @property
    def generation(self) -> int:
        """The newest generation that a rank reports."""
        rows = self.base.values()
        return max((int(row.get("generation", 0)) for row in rows), default=0)

    def keep_hang(self, verdicts: Sequence[Verdict]) -> None:
        """Keep the first of `verdicts`, which hold, until the group has another op."""
        hangs = [one for one in verdicts if one.fault is not Fault.RANK_DEAD]
        if hangs:
            self.hang = (hangs[0], self.generation)
        elif self.hang is not None:
            same = self.generation == self.hang[1]
            rows = self.base.values()
            gone = {row["generation"] for row in rows if row["state"] == "aborted"}
            if not gone:
                # The op has ended after all, or there was another.
                over = same or any("op" in row for row in rows)
            else:
                # The group has ended once more since.
                over = not same and self.generation in gone
            if over:
                self.hang = None

    @property
    def last_hang(self) -> Verdict | None:
        """Why the generation before this one hung, while there is no op in this one."""
        if self.hang is None or self.aborted or self.generation == self.hang[1]:
            return None
        return self.hang[0]

    @property
    def differences(self) -> list[Verdict]:
        """How the op differs between the ranks in which it was aborted, if it does."""
        if not self.aborted or self.hang is not None:
            return []
        ops = {rank: status.started for rank, status in self.statuses.items()}
        if ops != self._compared[0]:
            self._compared = ops, differences_between(self.statuses)
        return self._compared[1]

    def row(self, rank: int) -> Cells:
        """Return all cells of a rank."""
        return {**self.base[rank], **self.extra.get(rank, {})}

    def rows(self) -> dict[int, Cells]:
        """Return all rows, in the order of the ranks."""
        return {rank: self.row(rank) for rank in sorted(self.base)}

    def info(self, label: str, verdicts: Sequence[Verdict] = ()) -> dict[str, Any]:
        """Return the data of the group's tab, which is called `label`."""
        rows = self.base.values()
        moods = {str(row["mood"]) for row in rows}
        mood = next((mood for mood in _MOODS if mood in moods), "calm")
        dead = sorted(r for r, row in self.base.items() if row["state"] == "dead")
        why = [*verdicts[:1], *([self.hang[0]] if self.aborted and self.hang else [])]
        if self.aborted:
            state = "aborted"
        elif dead:
            state = "rank dead"
        else:
            state = "hung" if verdicts else _STATES[mood]
        facts = []
        if self.name != NO_GROUP:
            facts = [name_ranks(self.ranks), text(self.backend, 60)]
            if self.timeout is not None:
                facts.append(f"timeout {elapsed_text(self.timeout)}")
            if connections := self._connections():
                facts.append(text(connections))
        if self.generation:
            facts.append(f"generation {self.generation}")
        return {
            "id": self.id,
            "name": self.name,
            "label": label,
            "ranks": list(self.ranks),
            "size": len(self.base),
            "mood": "error" if verdicts else mood,
            "state": state,
            "verdict": self._told(why[0]) if why else "",
            "facts": facts,
            "last": "" if moods & {"busy", "working"} else self._last_op(),
            "aborted": self.aborted,
            "flight": sum(bool(row.get("queue")) for row in rows),
            "dead": dead,
        }

    def _told(self, verdict: Verdict) -> str:
        """Return a verdict in a few words: ``missing ranks: rank 2``."""
        if not self._shares(verdict):
            return text(f"because of group {verdict.group.name!r}", 60)
        who = f": {name_ranks(blamed(verdict))}" if verdict.culprits else ""
        return text(f"{verdict.fault.value}{who}")

    def _shares(self, verdict: Verdict) -> bool:
        """Return whether ranks wait in this group for those at fault, or one died."""
        if verdict.fault is Fault.RANK_DEAD:
            return not {*verdict.culprits}.isdisjoint(self.ranks)
        direct = {one.group for one in verdict.waits}
        direct |= {one.group for one in verdict.cycle}
        return verdict.group == self.key or self.key.name in direct

    def _connections(self) -> str:
        """Return which transports the ranks use, or that they are not connected yet."""
        size = len(self.ranks)
        devices = [
            backend
            for status in self.statuses.values()
            for backend in status.devices.values()
        ]
        if size > 1 and devices and all(one.endswith(NOT_BUILT) for one in devices):
            return "connects at the first op"
        known = {
            rank: status.transports
            for rank, status in self.statuses.items()
            if status.transports and status.generation == self.generation
        }
        hosts = {rank: str(row["host"]) for rank, row in self.base.items()}
        # Of 256 ranks they take 50 ms, and they hardly ever change.
        if (known, hosts) != self._connected:
            self._connected = known, hosts
            self._transports = transports_text(known, hosts, size) if known else ""
        return self._transports

    def connected(self, inside: Collection[int]) -> int:
        """Return how many ranks have connected while all others, `inside`, still do."""
        known = self.statuses.items()
        joined = {rank for rank, one in known if one.transports}
        left = set(self.ranks) - joined - {rank for rank, one in known if one.completed}
        connects = joined and left and left <= set(inside)
        return len(self.ranks) - len(left) if connects else 0

    def _last_op(self) -> str:
        """Return what was last on any rank: ``last all_reduce #14``."""
        done = [row for row in self.base.values() if "op" in row]
        if not done:
            return ""
        last = max(done, key=lambda row: int(row.get("issued", 0)))
        return f"last {last['op']} {last.get('seq', '')}".rstrip()

    def behind(self, now: float) -> dict[int, int]:
        """Return rank → the number of collectives it is behind the first rank.

        Only ranks without progress for `STANDSTILL` seconds: the statuses of ranks
        in step have different numbers too, since they arrive one by one.
        """
        issued = {
            rank: int(row["issued"])
            for rank, row in self.base.items()
            if "issued" in row and row["state"] not in ("dead", "aborted")
        }
        front = max(issued.values(), default=0)
        for rank in self.base:
            number = issued.get(rank, front)
            if number >= front:
                self.late.pop(rank, None)
            elif self.late.get(rank, (None,))[0] != number:
                self.late[rank] = (number, now)
        return {
            rank: front - number
            for rank, (number, since) in self.late.items()
            if now - since >= STANDSTILL
        }
