"""What a diagnosis gets and what it returns: the views of ranks, and verdicts."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..groups.key import GroupKey
from ..printable import printable
from .records import Record as Entry

__all__ = [
    "Absence",
    "ConfirmTwice",
    "Fault",
    "RankView",
    "Verdict",
    "Waiting",
    "in_one",
    "on_group",
    "on_groups",
]

#: What follows from a fault, in a text of one sentence.
TOLD = 3


class Fault(enum.Enum):
    """The kinds of faults that a verdict names."""

    RANK_DEAD = "rank dead"
    RANK_NOT_RESPONDING = "rank not responding"
    OP_MISMATCH = "op mismatch"
    ORDER_MISMATCH = "order mismatch"
    DEADLOCK = "deadlock"
    ROOT_MISMATCH = "root mismatch"
    REDUCE_OP_MISMATCH = "reduce op mismatch"
    DTYPE_MISMATCH = "dtype mismatch"
    SIZE_MISMATCH = "size mismatch"
    SPLIT_MISMATCH = "split mismatch"
    TAG_MISMATCH = "tag mismatch"
    RANK_BUSY_ELSEWHERE = "rank busy elsewhere"
    MISSING_RANKS = "missing ranks"
    EXECUTION_HANG = "execution hang"
    #: Ranks wait, and what is known does not tell for whom.
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class RankView:
    """State of one rank at one moment, with times of that rank's clock."""

    rank: int
    #: Its flight-recorder entries (`Record.as_dict`), oldest first; entries
    #: of other groups and generations are ignored.
    records: Sequence[Entry] = ()
    #: ``time.time_ns`` of that rank when the records were read.
    now_ns: int = 0
    #: Why the rank is dead, if it is dead: a sentence that names the rank.
    death: str | None = None
    #: Where a dead rank was by its last status: ``in all_reduce #3 (cell 7 line 3)``.
    last_seen: str = ""
    #: What ranks issued unlike, because of which a library ended its process.
    crash_causes: tuple[Verdict, ...] = ()
    #: Seconds since the rank's last answer, if the rank does not answer.
    silent_for: float | None = None
    #: Why the rank does not answer, and what to do, if it is known for certain.
    silence: str = ""
    #: The process that has the rank, e.g. ``engine 2, pid 4711 on node1``.
    process: str = ""
    #: Position of the rank's main thread, e.g. ``cell 7 line 3``; empty if idle.
    location: str = ""
    #: The function of a library that was called there, e.g.
    #: ``synchronize of torch/cuda/__init__.py``; empty if none is running.
    called: str = ""
    #: The exception that ended the rank's last cell, if any:
    #: ``left cell 7 with ValueError at line 4``.
    last_cell_exit: str = ""
    #: The group, the op and the sequence number whose error that was, if it was one's;
    #: 0: the op was refused before it had one.
    last_cell_op: tuple[str, str, int] | None = None
    #: The exception that the main thread handles, ``ValueError: no data``, and the
    #: line that raised it; empty without one.
    exception: str = ""
    exception_line: str = ""
    #: The last exception that ended another thread of it, with the line.
    thread_exception: str = ""
    #: Whether the records could be read: else nothing it has issued is known.
    recorded: bool = True


class Waiting(NamedTuple):
    """Ranks that are in one op, and wait there for ranks that are not in it."""

    ranks: tuple[int, ...]
    #: The op with its number: ``all_reduce #13``.
    op: str
    #: The name of its group.
    group: str
    #: The ranks at fault, or next in the cycle, among those that they wait for.
    awaited: tuple[int, ...] = ()


class Absence(NamedTuple):
    """Ranks that others wait for, and where they are: ``at data.py:77``, or empty."""

    ranks: tuple[int, ...]
    where: str


@dataclass(frozen=True)
class Verdict:
    """One explanation: ranks at fault, waiting ranks, and source lines."""

    #: The kind of fault: ``fault.value`` is ``"missing ranks"``, for example.
    fault: Fault
    #: Name and global ranks of the group.
    group: GroupKey
    #: The ranks at fault (for an execution hang, all ranks that wait).
    culprits: tuple[int, ...]
    #: The ranks that wait.
    waiting: tuple[int, ...]
    #: The name of the op that hangs.
    op: str
    #: Its sequence number.
    seq: int
    #: The explanation, a sentence.
    text: str
    #: Whether one diagnosis is enough: no later one is needed to confirm it.
    certain: bool = False
    #: A further sentence, which `str` adds: what the library itself reports.
    report: str = ""
    #: The source line of the op, e.g. ``train.py:88``; empty if it is not known.
    line: str = ""
    #: What follows from the fault in other ops, a clause each.
    consequences: tuple[str, ...] = ()
    #: The groups in which ranks wait because of it; none: `group`.
    groups: tuple[GroupKey, ...] = ()
    #: Of a deadlock those who wait for each other, each for the next one.
    cycle: tuple[Waiting, ...] = ()
    #: The ranks that a library ended because of it.
    dead: tuple[int, ...] = ()
    #: Of ranks that others wait for: who waits, the most ranks first.
    waits: tuple[Waiting, ...] = ()
    #: Of such ranks, those that are in one place together.
    absent: tuple[Absence, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """Return a key that is equal for two verdicts with the same meaning."""
        return self.fault, self.group, self.culprits, self.op, self.seq

    def concerns(self, group: GroupKey) -> bool:
        """Return whether ranks wait in `group` because of it."""
        return group == self.group or group in self.groups

    def __str__(self) -> str:
        told = [self.text, *self.consequences[:TOLD]]
        if len(self.consequences) > TOLD:
            told.append(f"and {len(self.consequences) - TOLD} more ops wait")
        text = "; ".join(told)
        return printable(f"{text}. {self.report}" if self.report else text)


def in_one(verdicts: Iterable[Verdict]) -> tuple[str, tuple[int, ...]]:
    """Return the text of all `verdicts`, ``""`` if there is none, and the culprits."""
    found = list(verdicts)
    culprits = {
        rank
        for one in found
        # There all ranks wait, and none is known to be the cause.
        if one.fault not in (Fault.EXECUTION_HANG, Fault.UNDECIDED)
        for rank in one.culprits
    }
    return "; ".join(dict.fromkeys(map(str, found))), tuple(sorted(culprits))


def on_group(verdicts: Iterable[Verdict], group: GroupKey) -> list[Verdict]:
    """Return the verdicts on a group, else those because of which ranks wait there."""
    found = list(verdicts)
    own = [one for one in found if one.group == group]
    return own or [one for one in found if one.concerns(group)]


def on_groups(verdicts: Iterable[Verdict], groups: Iterable[GroupKey]) -> list[Verdict]:
    """Return the verdicts that `on_group` returns for any of `groups`."""
    found = list(verdicts)
    wanted = {id(one) for key in groups for one in on_group(found, key)}
    return [one for one in found if id(one) in wanted]


class ConfirmTwice:
    """Filter: passes a verdict at its second call in a row, a certain one at once."""

    def __init__(self) -> None:
        self._before: set[tuple[Any, ...]] = set()

    def confirm(self, verdicts: Iterable[Verdict]) -> list[Verdict]:
        """Return those of `verdicts` that were also passed to the previous call."""
        seen = list(verdicts)
        before, self._before = self._before, {verdict.key for verdict in seen}
        return [verdict for verdict in seen if verdict.key in before or verdict.certain]
