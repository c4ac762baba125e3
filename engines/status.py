"""The status of a cluster at one moment: plain data, no I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from rankscope.backends.groups.key import GroupKey
from rankscope.backends.groups.summary import GroupStatus, OpStatus, check_bytes
from rankscope.backends.observe.verdicts import Verdict
from rankscope.backends.rank_sets import name_ranks

from .errors import ClusterError

__all__ = [
    "NOTHING_REPORTED",
    "ClusterStatus",
    "GroupStatus",
    "Groups",
    "OpStatus",
    "RankStatus",
    "Summary",
    "advice_of",
    "decode",
    "encode",
    "find_groups",
    "name_groups",
    "no_hang",
]

#: An argument that chooses groups: a name, an id, a key, or keys.
Groups: TypeAlias = str | GroupKey | Collection[GroupKey]

#: Completed ops that differed between ranks of which each has a clause.
MOST = 3
#: Groups that a sentence names.
NAMED = 3


def find_groups(group: Groups, known: Iterable[GroupKey]) -> list[GroupKey]:
    """Return those of the `known` groups that `group` means: keys, an id or a name.

    A name means all groups that have it if no rank is in two of them, as those that
    ranks make by the same line of a cell, each of them for the ranks it belongs to.
    """
    groups = list(dict.fromkeys(known))
    if not isinstance(group, (str, GroupKey)):
        return [one for key in group for one in find_groups(key, groups)]
    if isinstance(group, GroupKey):
        found = [one for one in groups if one == group]
        wanted = group.id
    else:
        found = [one for one in groups if one.id == group]
        found = found or [one for one in groups if one.name == group]
        wanted = group
    if not found:
        names = dict.fromkeys(one.name for one in groups)
        raise ClusterError(
            f"no group called {wanted!r}; there is "
            f"{', '.join(map(repr, names)) or 'none'}"
        )
    members = [rank for one in found for rank in one.ranks]
    if len(set(members)) < len(members):
        listed = "; ".join(f"{one.id!r} ({name_ranks(one.ranks)})" for one in found)
        raise ClusterError(
            f"{len(found)} groups are called {wanted!r}, and some ranks are in more "
            f"than one of them: give the id of the group that is meant: {listed}"
        )
    return found


def name_groups(names: str | Iterable[str] | None) -> str:
    """Return ``group 'a'``, ``groups 'a', 'b' and 18 more``, or ``all groups``."""
    if names is None:
        return "all groups"
    once = list(dict.fromkeys([names] if isinstance(names, str) else names))
    most = NAMED if len(once) > NAMED + 1 else len(once)
    more = f" and {len(once) - most} more" if len(once) > most else ""
    return f"group{'s' * (len(once) > 1)} {', '.join(map(repr, once[:most]))}{more}"


@dataclass(frozen=True)
class Summary:
    """What a rank reports about itself, a record on the wire; see `decode`.

    All has a default: nothing is known of a rank that has reported nothing yet.
    """

    #: The number of the summary among those of its process. What a summary with a
    #: higher number leaves out happened later.
    number: int = 0
    #: The pid of its process, on that host.
    pid: int = -1
    #: The name of its host.
    host: str = ""
    #: The native id of the thread that publishes status.
    status_thread: int | None = None
    #: Whether its main thread runs a cell, or a script.
    busy: bool = False
    #: The number of the cell that runs.
    cell: int | None = None
    #: Client → the numbers of the cells that no other one has sent since: ``3-5,7``.
    senders: Mapping[str, str] = field(default_factory=dict)
    #: Seconds since that cell began.
    busy_for: float | None = None
    #: Where the main thread of a busy rank was, e.g. ``cell 7 line 3``.
    line: str = ""
    #: Seconds for which it has been seen there, nowhere else, and has issued no op.
    line_for: float | None = None
    #: Seconds for which the main thread has waited in `init_process_group`.
    joining_for: float | None = None
    #: How the last cell of a notebook ended: ``left cell 7 with ValueError …``; empty
    #: while one runs.
    last_cell_exit: str = ""
    #: The group, the op and the sequence number whose error ended it, if one did; 0:
    #: the op was refused before it had one.
    last_cell_op: tuple[str, str, int] | None = None
    #: Whether it failed, and none runs now.
    last_cell_failed: bool = False
    #: ``GPU 0 · NVIDIA H200 · 1.2 of 139.8 GiB``, empty where there is none.
    gpu: str = ""
    #: Bytes of resident memory of the rank's process, ``None`` where it is not known.
    memory: int | None = None
    #: The cores that the rank's process has kept busy lately, ``None`` at first.
    cpu: float | None = None
    #: Bytes of its GPU's memory that the process holds, ``None`` where there is no GPU,
    #: or it is not known.
    gpu_memory: int | None = None
    #: Its groups.
    groups: tuple[GroupStatus, ...] = ()
    #: What a person should change so that all that the rank does is shown.
    advice: tuple[str, ...] = ()
    #: Whether the client that has the rank for itself is to yield it to another one.
    wanted: bool = False
    #: Why the rank is dead, for subscribers alone; empty while it lives.
    dead: str = ""

    def __post_init__(self) -> None:
        check_bytes(self.memory)
        check_bytes(self.gpu_memory)


#: The summary of a rank before its first one.
NOTHING_REPORTED = Summary()

# A limit that is infinite is encoded as null.
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Summary)


def encode(summary: Summary) -> str:
    return _encoder.encode(summary).decode()


def decode(text: str | bytes) -> Summary:
    """Return a summary of another process; the `ValueError` names a wrong field."""
    return _decoder.decode(text)


@dataclass(frozen=True, kw_only=True)
class RankStatus(Summary):
    """One rank: its engine, and what it reported last."""

    #: The rank.
    rank: int
    #: The id of its engine, ``None`` where the rank is a script's.
    engine_id: int | None
    #: ``idle``, ``busy``, ``unreachable`` (alive, but silent) or ``dead``.
    state: str
    #: Why the rank is dead, a sentence that names it; or why its summary cannot be
    #: read.
    reason: str | None = None
    #: How a dead rank died; `reason` has also why, where that was found.
    death: str | None = None
    #: What ranks issued unlike, because of which a library ended it.
    crash_causes: tuple[Verdict, ...] = ()
    #: Seconds since the last summary, ``None`` before the first one.
    heartbeat_age: float | None = None

    @property
    def alive(self) -> bool:
        """Whether the engine lives (it may still be busy or silent)."""
        return self.state != "dead"

    def group(self, name: str) -> GroupStatus | None:
        """Return the group called `name` if this rank is in it."""
        return next((one for one in self.groups if one.name == name), None)


def advice_of(ranks: Iterable[RankStatus]) -> list[str]:
    """Return the advice of `ranks`, each sentence once, with the ranks that gave it."""
    given: dict[str, list[int]] = {}
    for one in ranks:
        for sentence in one.advice:
            given.setdefault(sentence, []).append(one.rank)
    return [f"{name_ranks(those)}: {text}" for text, those in given.items()]


@dataclass(frozen=True)
class ClusterStatus:
    """All ranks of a cluster at one moment."""

    cluster_id: str
    profile: str
    launcher: str
    backend: str
    #: ``running`` or ``stopped``.
    state: str
    #: The ranks, in order.
    ranks: tuple[RankStatus, ...]
    #: The script that the ranks run; empty where they are engines.
    script: str = ""
    #: The job of Slurm that has their nodes, and how much time is left of it.
    allocation: str = ""
    #: What this notebook cannot do to them (``abort``, ``rebuild``, ``restart``) → why.
    refused: Mapping[str, str] = field(default_factory=dict)
    #: The numbers of the cells that this client was the last to send, as ``3-5,7``:
    #: others are of another notebook. ``None``: not known.
    cells: str | None = None

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def dead(self) -> list[int]:
        """The ranks whose engine is gone."""
        return [one.rank for one in self.ranks if not one.alive]

    @property
    def failed(self) -> list[int]:
        """The living ranks whose last cell failed, while no other runs there."""
        return [one.rank for one in self.ranks if one.alive and one.last_cell_failed]

    @property
    def aborted(self) -> list[str]:
        """The names of the groups that are aborted on a living rank."""
        return list(
            dict.fromkeys(
                group.name
                for rank in self.ranks
                for group in rank.groups
                if rank.alive and group.state == "aborted"
            )
        )

    @property
    def group_keys(self) -> list[GroupKey]:
        """Every group that a rank reports, the default group first."""
        return list(
            dict.fromkeys(group.key for rank in self.ranks for group in rank.groups)
        )

    @property
    def groups(self) -> dict[str, list[int]]:
        """Group name → the ranks of all groups that have it, the default group first.

        As any member reports it: the others may not have reported it yet.
        """
        found: dict[str, set[int]] = {}
        for key in self.group_keys:
            found.setdefault(key.name, set()).update(key.ranks)
        return {name: sorted(ranks) for name, ranks in found.items()}

    def find_groups(self, group: Groups) -> list[GroupKey]:
        """Return the groups that `group` means; see `find_groups`."""
        return find_groups(group, self.group_keys)

    def library_of(self, key: GroupKey) -> str:
        """Return the library that made a group, e.g. ``torch``; empty for our own."""
        return next(
            (
                group.library
                for rank in self.ranks
                for group in rank.groups
                if group.key == key
            ),
            "",
        )


def no_hang(
    status: ClusterStatus,
    unlike: Sequence[Verdict] = (),
    failed: Mapping[GroupKey, str] | None = None,
) -> str:
    """Return what a diagnosis without a verdict says, of aborted groups too."""
    said, names = "nothing hangs: no op is stuck, every rank answers", status.aborted
    remedy = "%dist_rebuild, or rankscope rebuild,"
    if "rebuild" in status.refused:
        remedy = ""
    for key, ops in (failed or {}).items():
        if key.name not in names:
            said += f"; the last op of {name_groups(key.name)} failed: {ops}"
            said += f" (if others fail, {remedy} makes it usable)" if remedy else ""
    if unlike:
        texts = [str(one) for one in unlike[:MOST]]
        if len(unlike) > MOST:
            texts.append(f"and {len(unlike) - MOST} more")
        said += f"; but completed ops differed between ranks: {'; '.join(texts)}"
    if not names:
        return said
    verb, them = ("is", "it") if len(names) == 1 else ("are", "them")
    said += f"; {name_groups(names)} {verb} aborted"
    return f"{said}: {remedy} makes {them} usable" if remedy else said
