"""What a rank of a watched job has written of itself, and what is made of it.

`rankscope.backends.hang_report` writes these files; the rank's dump and its stacks are
beside them, in forms that others write, too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..groups.key import GroupKey
from ..observe.evidence import Evidence, RankEvidence, SourceLine
from ..observe.root_cause import STALL
from ..observe.verdicts import Fault, Verdict
from ..rank_sets import group_by, name_ranks, tell_ranks
from .evidence_file import RawFile, UnreadableError, parse_json
from .tracebacks import Raised, evidence_of
from .user_frames import MOST, Frame

__all__ = [
    "FORM",
    "TITLE",
    "FactsReader",
    "Rendezvous",
    "ResultReader",
    "absences",
    "ended_with_store",
]

#: The first key of a file of facts; its value is the version of the form.
FORM = "rankscope_hang_report"
#: The first line of a verdict that was written as text.
TITLE = "Rankscope verdict"

#: Bytes of a file of facts at most.
_LARGEST = 1 << 20
#: Characters of an exception that are told.
_LONGEST = 200
_RESULTS = (TITLE.encode(), b'{\n "version": 1,\n "verdicts": ', b"<!doctype html>")
_PAGE_TITLE = b"<title>Rankscope report"
#: Variables that are equal on all ranks of one start of a job.
_OF_START = "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
#: It ends one rank where somebody has sent it a signal: no error of its program.
_INTERRUPT = re.compile("KeyboardInterrupt$|KeyboardInterrupt:")
#: Nanoseconds in which the ranks of one report write theirs.
_ONE_REPORT = 60 * 10**9
#: What an error of ours says where the process that serves the store has ended.
STORE_LOST = re.compile(
    r"the connection to the store at \S+ was lost: the process of rank (\d{1,6}) ended"
    r"|rank (\d{1,6}) left group .{1,200}: its process, which serves the store, ends"
)


@dataclass(frozen=True)
class Rendezvous:
    """A rank waits for others in a call that makes a group."""

    #: ``init_process_group``
    call: str
    #: ``127.0.0.1:29500``; empty where it is not known.
    address: str
    line: SourceLine | None = None
    world_size: int | None = None
    #: How many ranks the launcher has started, where the call was given another number.
    started: int | None = None


class FactsReader:
    """Reads the facts of one rank."""

    kind = "facts of a rank"

    def __init__(self) -> None:
        #: What the ranks wait for that make a group.
        self.rendezvous: dict[int, Rendezvous] = {}
        #: Ranks that run and are not seen → why not.
        self.unseen: dict[int, str] = {}
        #: Ranks that ended because they lost the store → the rank that served it.
        self.store_lost: dict[int, int] = {}
        self.world_size: int | None = None
        #: Of each start of the job, ranks → the size that ``WORLD_SIZE`` gave them.
        self.started_with: dict[tuple[Any, ...], dict[int, int]] = {}
        #: ``MASTER_PORT`` of each rank, and when it has told of itself.
        self._ports: dict[int, str] = {}
        self._written: dict[int, int] = {}
        #: The job has come to its end: the youngest op in flight hangs, too.
        self.final = False
        #: Whether a rank has such a file: then each rank of its host has one.
        self.found = False

    def recognises(self, file: RawFile) -> bool:
        return f'"{FORM}"'.encode() in file.data[:64]

    def read(self, file: RawFile) -> list[RankEvidence]:
        facts = parse_json(file.text(_LARGEST))
        if not isinstance(facts, dict):
            raise UnreadableError("it is no object")
        rank = facts.get("rank")
        if type(rank) is not int or rank < 0:
            raise UnreadableError("it does not say of which rank it is")
        self._note(rank, facts)
        found = RankEvidence(rank, source=file.path)
        exception, ended = facts.get("exception"), facts.get("has_ended") is True
        raised, ended_by = _raised(exception), _culprits(exception)
        if raised is not None:
            # Where what is kept of the text ends before that.
            if lost := STORE_LOST.search(str(exception)):
                self.store_lost[rank] = int(lost[1] or lost[2])
                ended_by = ended_by or (self.store_lost[rank],)
            # An op fails in an `except` or `finally`: that exception comes first. It
            # has not ended a rank that ends with the error of an op.
            handled = [] if ended else _handled(exception)
            found = evidence_of(rank, [*handled, raised], file.path)
        left_at, has_left = _text(facts, "left_at"), facts.get("has_left") is True
        if raised is not None and _INTERRUPT.match(raised.text) and ended:
            has_left, left_at = True, f"{found.location} (KeyboardInterrupt)"[:300]
            found = replace(found, location=None, called=None)
        elif raised is not None and facts.get("has_ended") is False:
            # Its stack is newer than a consequence that it handles.
            found = replace(found, location=None, called=None)
        death = _text(facts, "death")
        if facts.get("death") is None and found.exception and ended:
            at = f" at {found.exception_line}" if found.exception_line else ""
            death = f"rank {rank} ended with {found.exception}{at}"[:300]
        ended_with = None
        if raised is not None and raised.is_consequence and ended:
            ended_with = raised.text.partition("; ")[0][:300]
        pid = facts.get("pid")
        return [
            replace(
                found,
                groups_ended_at=_text(facts, "groups_ended_at"),
                thread_exception=_text(facts, "thread_exception"),
                death=death,
                silence=_text(facts, "silence"),
                has_left=has_left or None,
                left_at=left_at,
                last_cell_exit=_text(facts, "last_cell_exit"),
                ended_by=ended_by if ended else None,
                ended_with=ended_with,
                process=f"pid {pid} on {facts.get('host')}"
                if type(pid) is int
                else None,
            )
        ]

    def _note(self, rank: int, facts: Mapping[str, Any]) -> None:
        """Keep what explains a hang together with what other ranks have told."""
        self.found = True
        size = facts.get("world_size")
        world_size = size if type(size) is int and size > 0 else None
        self.world_size = self.world_size or world_size
        env, making = facts.get("environment"), facts.get("rendezvous")
        # One that has ended its groups, and makes none, has met the others before.
        has_met = facts.get("groups_ended_at") is not None and making is None
        if isinstance(env, Mapping) and not has_met:
            # Not where the program gave another one, or has shrunk its groups since.
            if env.get("WORLD_SIZE") == str(world_size):
                start = tuple(str(env.get(name)) for name in _OF_START)
                self.started_with.setdefault(start, {})[rank] = world_size or 0
            if (port := _text(env, "MASTER_PORT", 20)) is not None:
                self._ports[rank] = port
        written = facts.get("written_ns")
        if type(written) is int:
            self._written[rank] = written
        self.final |= facts.get("final") is True
        if isinstance(making, Mapping):
            given = making.get("world_size")
            differs = type(given) is int and given != world_size
            self.rendezvous[rank] = Rendezvous(
                str(making.get("call"))[:100],
                str(making.get("address"))[:100],
                _line(making.get("line")),
                given if differs else world_size,
                world_size if differs else None,
            )
        if (unseen := _text(facts, "unseen")) is not None:
            self.unseen[rank] = unseen

    def cause(self) -> Verdict | None:
        """Return what explains any hang of the job: a variable that differs."""
        if len(self.started_with) == 1:
            (sizes,) = self.started_with.values()
            found = _differs("WORLD_SIZE", sizes, Fault.SIZE_MISMATCH)
            if found is not None:
                return found
        # Not of the reports of two jobs, nor where the program gives another address.
        written = self._written.values()
        at_once = max(written, default=0) - min(written, default=0)
        making = {
            rank: one.address.rpartition(":")[2]
            for rank, one in self.rendezvous.items()
            if one.call == "init_process_group"
        }
        if at_once < _ONE_REPORT and making and making.items() <= self._ports.items():
            return _differs("MASTER_PORT", self._ports, Fault.MISSING_RANKS)
        return None

    def unless_late(self, verdict: Verdict, evidence: Evidence) -> Verdict:
        """Return what a hang in an op is to which a rank has come only now: none."""
        if verdict.fault is not Fault.EXECUTION_HANG or self.final:
            return verdict
        late = [
            rank
            for rank, written in self._written.items()
            for found in evidence.rank(rank).groups.values()
            for op in found.ops
            if op.in_flight
            and (op.op, op.number) == (verdict.op, verdict.seq)
            and written - (op.created_ns or 0) < STALL * 10**9
        ]
        if not late:
            return verdict
        text = (
            f"{name_ranks(late)} came to {verdict.op} #{verdict.seq} ({verdict.line}) "
            "only when this report was written: the job may go on"
        )
        return replace(verdict, fault=Fault.UNDECIDED, culprits=(), text=text)


def _culprits(exception: Any) -> tuple[int, ...]:
    """Return the ranks that an error of ours names as its cause."""
    found = exception.get("culprits") if isinstance(exception, Mapping) else None
    ranks = found if isinstance(found, list) else []
    return tuple(one for one in ranks if type(one) is int)


class ResultReader:
    """Knows the verdict and the page that were written beside the evidence."""

    kind = "report"

    def recognises(self, file: RawFile) -> bool:
        start = file.data[:4096]
        return start.startswith(_RESULTS) and (
            not start.startswith(b"<") or _PAGE_TITLE in start
        )

    def read(self, file: RawFile) -> list[RankEvidence]:
        """Return nothing: it tells what its neighbours tell."""
        return []


def ended_with_store(lost: Mapping[int, int], evidence: Evidence) -> Verdict | None:
    """Return that a rank left the program, and with it the store that others need."""
    found = {one for one in lost.values() if evidence.rank(one).has_left}
    if len(found) != 1:
        return None
    (server,) = found
    ranks = tuple(sorted(lost))
    size = evidence.world_size or max([server, *ranks]) + 1
    verb = "needs" if len(ranks) == 1 else "need"
    return Verdict(
        Fault.MISSING_RANKS,
        GroupKey("default_pg", tuple(range(size))),
        (server,),
        ranks,
        "",
        0,
        f"rank {server} has left the program, and with it the store, which "
        f"{name_ranks(ranks)} still {verb}",
    )


def _differs(name: str, values: Mapping[int, Any], fault: Fault) -> Verdict | None:
    """Return that ranks, but for most of them, have other values of a variable."""
    by_value = group_by(sorted(values), values.__getitem__)
    if len(by_value) < 2:
        return None
    most = max(by_value.values(), key=len)
    usual = most if 2 * len(most) > len(values) else []
    told = sorted(by_value.items(), key=lambda one: one[1] == usual)
    return Verdict(
        fault,
        GroupKey("default_pg", tuple(range(max(values) + 1))),
        tuple(rank for rank in sorted(values) if rank not in usual) if usual else (),
        tuple(usual or sorted(values)),
        "init_process_group",
        0,
        f"{name} differs between ranks that meet: "
        + ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in told),
    )


def absences(
    waiting: Mapping[int, Rendezvous], evidence: Evidence, unseen: Mapping[int, str]
) -> Verdict | None:
    """Return who is missing where ranks wait for others to make a group."""
    if not waiting:
        return None
    first = next(iter(waiting.values()))
    size = first.world_size or evidence.world_size or max(evidence.ranks) + 1
    ranks = sorted(waiting)
    missing = [
        one
        for one in evidence.ranks.values()
        # In the group of all ranks a rank with records is already, while it lives.
        if one.rank not in waiting
        and one.rank not in unseen
        and (one.has_ended or not (one.recorded and first.call == "init_process_group"))
    ]
    unknown = sorted(set(range(size)) - evidence.ranks.keys())
    verb = "waits" if len(ranks) == 1 else "wait"
    line = "" if first.line is None else str(first.line)
    told = [
        f"{name_ranks(ranks)} of {size} {verb} in {first.call}"
        f"{f' ({line})' if line else ''}"
        f"{f', where ranks meet at {first.address}' if first.address else ''}"
    ]
    told += _where(missing)
    told += [
        f"rank {rank} runs ({evidence.rank(rank).process}), and where is not known: "
        f"{why}"
        for rank, why in sorted(unseen.items())
        if rank not in waiting
    ]
    # The launcher has started all others.
    is_wrong = bool(unknown) and not missing and first.started == size - len(unknown)
    if is_wrong:
        told.append(f"the launcher has started {first.started} ranks, not {size}")
    elif unknown:
        told.append(f"nothing is known of {name_ranks(unknown)}")
    elif not missing and not unseen:
        told.append("nothing tells who is missing")
    fault = Fault.MISSING_RANKS if missing else Fault.UNDECIDED
    return Verdict(
        Fault.SIZE_MISMATCH if is_wrong else fault,
        GroupKey("default_pg", tuple(range(size))),
        tuple(one.rank for one in missing),
        tuple(ranks),
        first.call,
        0,
        "; ".join(told),
        line=line,
    )


def _where(ranks: Collection[RankEvidence]) -> list[str]:
    """Return where ranks are, those that are at one place together."""
    told = []
    for place, found in group_by(ranks, _place).items():
        text = tell_ranks([one.rank for one in found], place)
        if len(found) > 1:
            text = text.replace(": it is at", ": they are at")
        told.append(text)
    return told


def _place(one: RankEvidence) -> str:
    if one.death is not None:
        return one.death.removeprefix(f"rank {one.rank} ")
    if one.exception is not None:
        at = f" at {one.exception_line}" if one.exception_line else ""
        return f"ended with {one.exception}{at}"
    if one.departure is not None:
        return one.departure
    if one.location is not None:
        called = f" in {one.called}" if one.called else ""
        return f"has not come to it: it is at {one.location}{called}"
    return "is missing"


def _text(facts: Mapping[str, Any], key: str, most: int = 300) -> str | None:
    value = facts.get(key)
    return value[:most] if isinstance(value, str) else None


def _raised(given: Any) -> Raised | None:
    if not isinstance(given, Mapping) or not isinstance(given.get("text"), str):
        return None
    frames = [
        Frame(line.file, line.line, line.function)
        for line in map(_line, _items(given.get("frames")))
        if line is not None
    ]
    frames[-1:] = [one._replace(outermost=True) for one in frames[-1:]]
    text = given["text"].partition("\n")[0]
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    return Raised(text, tuple(frames))


def _handled(exception: Any) -> list[Raised]:
    """Return the exceptions that were handled when one was raised, the first first."""
    told = map(_raised, _items(exception.get("handled")))
    return [one for one in told if one is not None][::-1]


def _items(given: Any) -> Iterable[Any]:
    return given[:MOST] if isinstance(given, list) else ()


def _line(given: Any) -> SourceLine | None:
    if not isinstance(given, list) or len(given) != 3:
        return None
    file, line, function = given
    if isinstance(file, str) and type(line) is int and isinstance(function, str):
        return SourceLine(file, line, function)
    return None
