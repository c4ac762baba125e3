"""What is known of a job that may hang: its groups, ranks and their ops, as plain data.

Readers of files, and adapters of live records, make these objects; `root_cause` judges
them. They know nothing of where a fact is from.

**None means "not known"**, and a rule must treat it so: it is neither zero nor "no".
Ranks are global ranks everywhere. Times are nanoseconds of the clock of the rank that
wrote them: those of two ranks must not be compared.

A reader makes one `RankEvidence` for each rank that it knows something about; several
readers may do so for one rank, and `combine` joins what they know::

    evidence = combine([*from_dumps, *from_stacks, *from_logs], world_size=8)
    causes = find_root_causes(evidence)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, NamedTuple

from ..groups.inquiry import AT_ITS_END

__all__ = [
    "UNKNOWN_ARRAYS",
    "Arrays",
    "Evidence",
    "Group",
    "GroupEvidence",
    "IssuedOp",
    "Progress",
    "RankEvidence",
    "SourceLine",
    "State",
    "combine",
]

#: The state of an op. ``unknown``: its source does not tell (torch's gloo leaves all
#: ops ``scheduled``). Only ``completed`` says that it did what it should.
State = Literal["scheduled", "started", "completed", "unknown"]


class Group(NamedTuple):
    """A group of ranks. Two groups may have the same name, and also the same ranks."""

    #: What people call it, e.g. ``tp``: torch's ``group_desc`` where there is one.
    name: str
    #: Its global ranks, in the order of the group.
    ranks: tuple[int, ...]
    #: What its source calls it, where names are not unique.
    id: str = ""
    #: Whether `ranks` are all of its ranks: else only those that are known.
    complete: bool = True


class SourceLine(NamedTuple):
    """A line of the user's program."""

    #: The path of the file, or ``cell 7``.
    file: str
    line: int
    function: str = ""
    #: The user's lines that called its function, the innermost first, as far as known.
    callers: tuple[SourceLine, ...] = ()
    #: What a library did at the line, such as ``DistributedDataParallel.backward``.
    issuer: str = ""

    @classmethod
    def of(cls, text: str) -> SourceLine | None:
        """Return the line that ``cell 7 line 3`` or ``train.py:88 in f`` names."""
        found = _LINE.fullmatch(text)
        if found is not None:
            line = int(found["line"])
            return cls(found["file"], line, issuer=found["issuer"] or "")
        return cls(text, 0) if text else None

    def __str__(self) -> str:
        """``train.py:88``; ``cell 7 line 3``; the file where the line is not known."""
        name = self.file.replace("\\", "/").rpartition("/")[2]
        if not self.line:
            return name
        issuer = f" in {self.issuer}" if self.issuer else ""
        separator = " line " if name.startswith("cell ") else ":"
        return f"{name}{separator}{self.line}{issuer}"


#: A line of a cell, and one of a file as the ranks and as stacks name it.
_LINE = re.compile(r"(?P<file>.+?)(?: line |:)(?P<line>\d+)(?: in (?P<issuer>.+))?")


class Arrays(NamedTuple):
    """The arrays of one op: shapes and dtypes, inputs and outputs apart.

    Each of the four is None if it is not known; the dtypes have the names of their
    source (``Float``), so that only names of one source are compared.
    """

    inputs: tuple[tuple[int, ...], ...] | None = None
    outputs: tuple[tuple[int, ...], ...] | None = None
    input_dtypes: tuple[str, ...] | None = None
    output_dtypes: tuple[str, ...] | None = None


#: The arrays of an op of which nothing is known.
UNKNOWN_ARRAYS = Arrays()


# Not frozen, which costs a microsecond an op; nobody changes one.
@dataclass(slots=True, eq=False)
class IssuedOp:
    """One op that one rank has issued in one group."""

    #: The name of its c10d function, e.g. ``all_reduce``, ``send``; the source's own
    #: name if it is none of those.
    op: str
    #: Its number in the group: of a send or receive the p2p number, else the
    #: collective's. P2p numbers count per group and rank, not per pair of ranks. An op
    #: that its library does not count has a number here, too.
    seq: int
    #: Its place among all ops of the rank, over all groups: ascending, with gaps.
    order: int
    state: State
    #: The rank does not track it any more: it has completed or failed.
    retired: bool | None = None
    is_p2p: bool = False
    #: The global rank of the other side of a send or receive; None: any, or not known.
    peer: int | None = None
    arrays: Arrays = UNKNOWN_ARRAYS
    #: The global rank of the root. Torch's records do not hold it.
    root: int | None = None
    #: Torch's records do not hold it.
    reduce_op: str | None = None
    tag: int | None = None
    #: The user's innermost line that issued it.
    line: SourceLine | None = None
    created_ns: int | None = None
    started_ns: int | None = None
    ended_ns: int | None = None
    #: Seconds.
    timeout: float | None = None
    #: A number that the ops of one coalesced batch have in common.
    batch: int | None = None
    #: The number that its library shows, where it is another one than `seq`.
    shown: int | None = None
    #: Whether its library counts it.
    counted: bool = True
    #: The elements of the arrays that have the same sizes on all ranks, where its
    #: source tells which ones those are.
    equal_sizes: tuple[int, ...] | None = None
    #: Whether it may be over although its source lists it as in flight.
    may_be_over: bool = False
    #: What it receives from and sends to each rank of the group, in elements or rows.
    splits: tuple[Sequence[int], Sequence[int]] | None = None

    @property
    def number(self) -> int:
        """The number that people know it by."""
        return self.seq if self.shown is None else self.shown

    def __str__(self) -> str:
        """``all_reduce #13``; ``monitored_barrier`` if it is not counted."""
        return f"{self.op} #{self.number}" if self.counted else self.op

    @property
    def lacks_peer(self) -> bool:
        """Whether a log has it as a send or receive, and does not name its peer."""
        return self.is_p2p and self.peer is None and self.state == "unknown"

    @property
    def in_flight(self) -> bool:
        """Whether the rank has issued it, and it is not over as far as is known."""
        return not self.retired and self.state != "completed"


@dataclass(frozen=True, slots=True)
class Progress:
    """The numbers of a rank's last collectives in a group; 0: there was none.

    None: not known. They are numbers of collectives only: a source that counts sends
    and receives in them, too, leaves them out where a group has such ops.
    """

    enqueued: int | None = None
    started: int | None = None
    #: Completed with success, not only retired.
    completed: int | None = None


@dataclass(frozen=True, slots=True)
class GroupEvidence:
    """What is known of one rank's ops in one group."""

    #: Ops that the source lists, in the order of issue.
    ops: tuple[IssuedOp, ...] = ()
    progress: Progress = Progress()
    #: Whether `ops` has every op of this rank and group that is in flight: an op that
    #: is not there was not issued, or is over.
    lists_all_in_flight: bool = False
    #: Whether `ops` has every op that the rank ever issued in the group.
    lists_all: bool = False
    #: Whether `ops` has every send and receive that it ever issued in the group.
    lists_all_p2p: bool = False
    #: Whether a collective that was issued and is not in flight has completed, unless
    #: its own state says that it has not. Not of torch's gloo: it may have failed.
    over_is_completed: bool = False
    #: Whether a send in flight has not been received yet. Not of gloo, whose sends stay
    #: in flight until somebody waits for them.
    ends_sends: bool = False


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """What is known of one rank."""

    rank: int
    groups: Mapping[Group, GroupEvidence] = field(default_factory=dict)
    #: Whether its records were read: without them nothing it has issued is known.
    #: (A stack or a line of a log alone does not make a rank "recorded".)
    recorded: bool = False
    #: Ops that it has in flight are left out: its records have no room for all.
    overrun: bool = False
    #: Whether the `order` of an op is the number of all ops that it had issued before,
    #: listed or not.
    counts_all: bool = False
    #: The user's innermost line where its main thread is.
    location: SourceLine | None = None
    #: The function of a library that was called there, e.g. ``wait of threading.py``.
    called: str | None = None
    #: An exception that it is handling or that has ended it: ``ValueError: …``.
    exception: str | None = None
    #: The line that raised it.
    exception_line: SourceLine | None = None
    #: The exception that ended another thread of it, with the line that raised it.
    thread_exception: str | None = None
    #: How its process ended: a clause with the rank, e.g. ``rank 2 was killed by
    #: signal 9``.
    death: str | None = None
    #: Why it does not answer: a clause without the rank, e.g. ``has not answered since
    #: 16:39:10: its process is stopped``.
    silence: str | None = None
    #: How it left the cell that it ran, or that it runs none: a clause without the
    #: rank, e.g. ``left cell 7 with ValueError at line 4``.
    last_cell_exit: str | None = None
    #: The group whose op failed with the error that ended that cell.
    failed_in: Group | None = None
    #: The ranks that the error which ended it names as the cause.
    ended_by: tuple[int, ...] | None = None
    #: The failure of an op that has ended it, where others may be the cause.
    ended_with: str | None = None
    #: Its main thread has left the program without an error.
    has_left: bool | None = None
    #: The line with which it has left, where it is known: ``train.py:88``.
    left_at: str | None = None
    #: The line with which it has destroyed all of its groups.
    groups_ended_at: str | None = None
    #: Its process, e.g. ``pid 4711 on node1``.
    process: str | None = None
    #: When its records were read, on its own clock.
    read_ns: int | None = None
    #: When it has issued an op last, or one has ended, on that clock.
    active_ns: int | None = None
    #: The file it is from, for a text.
    source: str | None = None

    @property
    def pid(self) -> int | None:
        """The number of its process, where it is known."""
        found = re.search(r"\bpid (\d+)", self.process or "")
        return None if found is None else int(found[1])

    @property
    def has_ended(self) -> bool:
        """Whether its program is known to have ended, whatever ended it."""
        return self.death is not None or self.has_left is True

    @property
    def has_ended_well(self) -> bool:
        """Whether its program, or its last cell, has come to its end without error."""
        return self.has_left is True or (self.last_cell_exit or "").endswith(AT_ITS_END)

    @property
    def fate(self) -> str | None:
        """What has become of it where it does not run its program any more."""
        return self.death or self.silence or self.exception or self.departure

    @property
    def departure(self) -> str | None:
        """How it has left the program: a clause without the rank; None: it has not."""
        at = f" at {self.left_at}" if self.left_at else ""
        return f"has left the program{at}{self.after_groups}" if self.has_left else None

    @property
    def after_groups(self) -> str:
        """`` after destroy_process_group() at train.py:88``; empty: it has groups."""
        at = self.groups_ended_at
        return f" after destroy_process_group() at {at}" if at else ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a job."""

    ranks: Mapping[int, RankEvidence]
    #: Every group that a source names, also those without an op.
    groups: tuple[Group, ...] = ()
    #: None: no source tells.
    world_size: int | None = None
    #: Whether all ranks were read at one moment: none is known as it was earlier.
    at_one_moment: bool = False
    #: Whether ranks of which nothing is known are rather on hosts that were not read.
    may_lack_hosts: bool = False
    #: Whether nothing but the number of collectives that each rank has issued is known:
    #: not what it waits in, and no sends and receives.
    is_of_counts: bool = False
    #: The ranks that have written their records, which cannot be read.
    unread: frozenset[int] = frozenset()
    #: Whether the job has come to its end: a young op hangs, too, if a rank is not in
    #: it that will not come.
    final: bool = False

    def rank(self, rank: int) -> RankEvidence:
        return self.ranks.get(rank) or RankEvidence(rank)


def combine(
    found: Iterable[RankEvidence],
    world_size: int | None = None,
    groups: Iterable[Group] = (),
) -> Evidence:
    """Return what all of `found` tell; several may be about one rank.

    Where two tell the same fact of a rank, the first one counts: a caller passes the
    better source first. The order of ranks changes nothing.
    """
    ranks: dict[int, RankEvidence] = {}
    for one in found:
        known = ranks.get(one.rank)
        ranks[one.rank] = one if known is None else _join(known, one)
    named = {*groups, *(group for one in ranks.values() for group in one.groups)}
    return Evidence(
        dict(sorted(ranks.items())),
        tuple(sorted(named, key=lambda one: (one.name, one.id, one.ranks))),
        world_size,
    )


def _join(first: RankEvidence, second: RankEvidence) -> RankEvidence:
    facts = {
        one.name: getattr(second, one.name)
        for one in fields(RankEvidence)
        if getattr(first, one.name) is None
    }
    if first.death and second.death and second.death.startswith(first.death):
        # It tells where, too.
        facts["death"] = second.death
    return replace(
        first,
        **facts,
        groups={**second.groups, **first.groups},
        recorded=first.recorded or second.recorded,
        overrun=first.overrun or second.overrun,
        counts_all=first.counts_all or second.counts_all,
    )
