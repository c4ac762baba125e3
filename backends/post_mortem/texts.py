"""Files that are no dumps: stacks, logs, error files, reports of RAS."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ..groups.key import GroupKey
from ..observe.evidence import Evidence, Group, RankEvidence
from ..observe.verdicts import Fault, Verdict
from ..rank_sets import group_by, name_ranks, tell_ranks
from .evidence_file import EvidenceFile, RawFile, Reader, UnreadableError
from .log import KIND, Log, looks_like_log, read_log
from .log_groups import LogGroups
from .rank_facts import (
    FactsReader,
    ResultReader,
    absences,
    ended_with_store,
)
from .ras_report import RasReader
from .stacks import FaulthandlerReader, PySpyReader
from .torchelastic import ErrorFileReader
from .tracebacks import Raised, late_at_barrier, may_be_consequence
from .user_frames import position, rank_in_name

__all__ = ["KINDS", "Texts"]

#: A log in the folder of a local rank, as torchrun names it.
_LOCAL = re.compile(r"(.*(?:^|/)attempt_\d+)/(\d{1,5})/[^/]*$")
#: The files ``fr_trace_*.txt`` and ``torchcomms_fr_trace_*.txt``.
_FR_TABLES = re.compile(rb"^=== (?:TorchComms )?FR Trace(?: NCCL)? ===$", re.MULTILINE)
#: Bytes before which they begin: there is a line of each rank that has not answered.
_BEGINNING = 1 << 16
#: Characters by which two sentences on one cause are alike.
_ALIKE = 100
#: Clauses on ranks that ended in different ways.
_MOST = 8

_ERRORS = ErrorFileReader()
_RAS = RasReader()
_FIRST: tuple[Reader, ...] = (_RAS, _ERRORS, PySpyReader())
#: The last one: a log may have stacks in it, those of several ranks.
_STACKS = FaulthandlerReader()
#: The kinds of files, for a message that none was found.
KINDS = (KIND, *(one.kind for one in (*_FIRST, _STACKS)))
_RESULTS = ResultReader()


class _Tables:
    """Refuses the tables that torch's debug server makes of Flight Recorder dumps."""

    kind = "tables of torch's debug server"

    def recognises(self, file: RawFile) -> bool:
        return _FR_TABLES.search(file.data[:_BEGINNING]) is not None

    def read(self, file: RawFile) -> list[RankEvidence]:
        """Raise `UnreadableError`: the dumps themselves tell more."""
        raise UnreadableError(
            "torch's own comparison of dumps, which is not read: put the dumps "
            "themselves here, which a job writes with TORCH_FR_DUMP_TEMP_FILE set, and "
            "the server's stacks_*.txt; while the job runs, rankscope diagnose --jobs "
            "on the host of rank 0 asks the server for the dumps"
        )


_TABLES = _Tables()


class Texts:
    """The texts of one job; the logs of its hosts and ranks are read as one."""

    def __init__(self) -> None:
        #: What files tell of single ranks, and when each file was written.
        self._found: list[tuple[int, str, RankEvidence]] = []
        self._logs: dict[str, Log] = {}
        #: Error files whose names have no rank.
        self._errors: list[RawFile] = []
        #: Logs that have no line of a rank.
        self._unranked: list[RawFile] = []
        #: Where ranks gave up.
        self._gave_up: dict[int, RankEvidence] = {}
        #: What a log tells of no rank.
        self._notes: dict[str, list[str]] = {}
        #: Ranks that were alive when the launcher ended them.
        self._alive: set[int] = set()
        self._absent: list[int] = []
        #: What ranks have told of themselves, and others of them.
        self.facts = FactsReader()
        #: What each file was, by its path; after `evidence`.
        self.files: dict[str, EvidenceFile] = {}

    @property
    def is_of_counts(self) -> bool:
        """Whether reports of RAS alone tell of ops."""
        kinds = {one.kind for one in self.files.values()}
        return _RAS.kind in kinds and not self._logs

    def add(self, file: RawFile) -> bool:
        """Read a file; return whether its kind is known."""
        first: tuple[Reader, ...] = (self.facts, _RESULTS, _TABLES, *_FIRST)
        if any(self._read(one, file) for one in first):
            return True
        if looks_like_log(file.data):
            log = read_log(io.BytesIO(file.data), rank_in_name(file.path))
            self._logs[file.path] = log
            if not log.present:
                self._unranked.append(file)
            return True
        return self._read(_STACKS, file)

    def _read(self, reader: Reader, file: RawFile) -> bool:
        if not reader.recognises(file):
            return False
        try:
            found = reader.read(file)
        except UnreadableError as error:
            self.files[file.path] = EvidenceFile(
                file.path, reader.kind, problem=str(error)
            )
            if reader is _ERRORS:
                self._errors.append(file)
        else:
            written = file.modified_ns or 0
            self._found += [(written, file.path, one) for one in found]
            ranks = tuple(sorted({one.rank for one in found}))
            self.files[file.path] = EvidenceFile(file.path, reader.kind, ranks)
        return True

    def evidence(
        self, groups: Collection[Group], world_size: int | None
    ) -> tuple[list[RankEvidence], int | None]:
        """Return what all texts tell, and the world size; other files tell the rest."""
        self._place_logs()
        joined = LogGroups()
        present: set[int] = set()
        ends: list[RankEvidence] = []
        reasons: dict[int | None, str] = {}
        for log in self._logs.values():
            reasons.update(log.reasons)
        for path, log in self._logs.items():
            joined.join(log.groups, path)
            world_size = world_size or log.groups.world_size or log.world_size
            ends += log.evidence(path, reasons)
            self._gave_up.update(log.gave_up)
            present |= log.present | log.table.failures.keys()
            self._alive |= {
                rank for rank, one in log.table.failures.items() if one.was_ended
            }
        world_size = world_size or self.facts.world_size
        self._place_errors()
        ends = [*self._gpu_errors(ends), *ends]
        last = max([-1, *present, *(one.rank for *_, one in self._found)])
        self._absent = sorted(set(range(world_size or last + 1)) - present)
        counters = list(joined.evidence(present, world_size, groups))
        self._note(present)
        # A stack is of the time when the job hung: a traceback, of its end.
        newest = sorted(self._found, key=lambda one: one[:2], reverse=True)
        return _one_place([*(one for *_, one in newest), *ends, *counters]), world_size

    def _gpu_errors(self, ends: Iterable[RankEvidence]) -> list[RankEvidence]:
        """Return whose GPUs have failed, as their driver tells of processes."""
        processes: dict[int | None, set[int]] = {}
        for one in (*ends, *(one for *_, one in self._found)):
            processes.setdefault(one.pid, set()).add(one.rank)
        for log in self._logs.values():
            for rank, failure in log.table.failures.items():
                processes.setdefault(failure.pid, set()).add(rank)
        found = []
        for path, log in self._logs.items():
            for process, error in log.xids.items():
                ranks = processes.get(process, ())
                if len(ranks) != 1:
                    told = f"process {process} had an error of its GPU: {error}"
                    self._notes.setdefault(path, []).append(told)
                    continue
                (rank,) = ranks
                death = f"rank {rank} ended with an error of its GPU: {error}"
                found.append(RankEvidence(rank, death=death, source=path))
                # What it waited for could not end.
                self._gave_up.pop(rank, None)
        return found

    def _place_logs(self) -> None:
        """Read the logs of folders of local ranks: one of a host tells the others."""
        first: dict[str, set[int]] = {}
        for path, log in self._logs.items():
            if (found := _LOCAL.match(path)) and len(log.present) == 1:
                (rank,) = log.present
                first.setdefault(found[1], set()).add(rank - int(found[2]))
        for file in self._unranked:
            found = _LOCAL.match(file.path)
            bases = first.get(found[1], set()) if found else set()
            if found and len(bases) == 1:
                rank = min(bases) + int(found[2])
                self._logs[file.path] = read_log(io.BytesIO(file.data), rank)

    def _place_errors(self) -> None:
        """Read error files beside a log of one rank: torchrun gives each a folder."""
        folders = {
            os.path.dirname(path): next(iter(log.present))
            for path, log in self._logs.items()
            if len(log.present) == 1
        }
        for file in self._errors:
            rank = folders.get(os.path.dirname(file.path))
            if rank is None:
                continue
            try:
                found = _ERRORS.read(file, rank)
            except UnreadableError:
                # Its problem is told already.
                continue
            else:
                self._found += [(file.modified_ns or 0, file.path, found[0])]
                if found[0].exception is None:
                    self._gave_up[rank] = found[0]
                self.files[file.path] = EvidenceFile(file.path, _ERRORS.kind, (rank,))

    def _note(self, present: Collection[int]) -> None:
        # In a report a stack that tells of a crash is a log, and no other is cut.
        is_cut = self._absent and present and not self.facts.found
        absent = [self._no_line()] if is_cut else []
        for path, log in self._logs.items():
            ranks = tuple(sorted(log.present | log.table.failures.keys()))
            own = [*absent, *log.notes, *self._notes.get(path, ())]
            own += [log.slurm_ended] if log.slurm_ended else []
            causes = _causes(log.unplaced())
            own += [f"{one}: it does not say on which rank" for one in causes]
            for (op, seq), places in log.of_groups.items():
                who = tell_ranks(sorted(places), f"gave up {op} #{seq}")
                own.append(f"{who}: these are ranks in a group, which it does not name")
            self.files[path] = EvidenceFile(path, KIND, ranks, "; ".join(own))
            # What is said of all logs is said once.
            absent = []

    def _no_line(self) -> str:
        it = "it may be cut" if len(self._logs) == 1 else "one may be missing"
        has = "the log has" if len(self._logs) == 1 else "the logs have"
        return f"{has} no line of {name_ranks(self._absent)}: {it}"

    def said(self, found: Sequence[Verdict]) -> Verdict | None:
        """Return what the job said of itself, unless `found` says it, or its report.

        The last of it: a stall may have come to its end. A report tells more than the
        error of an op.
        """
        said = [text for log in self._logs.values() for text in log.said]
        if not said or self.facts.found:
            return None
        last = next(
            (one for one in reversed(said) if "; the report is " in one), said[-1]
        )
        texts = [str(one) for one in found]
        # Each cuts a long one at another place.
        if any(text.partition("; ")[0][:_ALIKE] in last for text in texts):
            return None
        size = max([*self._absent, 0, *self._gave_up, *self._alive]) + 1
        key = GroupKey("default_pg", tuple(range(size)))
        text = f"the job itself said: {last}"
        return Verdict(
            Fault.UNDECIDED, key, (), (), "", 0, text, consequences=tuple(texts)
        )

    def verdict(self, evidence: Evidence) -> Verdict | None:
        """Return why ranks gave up, if no op of theirs has a number to judge by."""
        missing_ones = absences(self.facts.rendezvous, evidence, self.facts.unseen)
        if missing_ones is not None:
            return missing_ones
        without_store = ended_with_store(self.facts.store_lost, evidence)
        if without_store is not None:
            return without_store
        logs = self._logs.values()
        awaited = {rank for log in logs for rank in log.awaited()}
        unplaced = [
            one for log in logs for _, one in log.unplaced() if one.is_consequence
        ]
        ended = {
            rank: one
            for rank, one in evidence.ranks.items()
            if rank not in self._gave_up and (one.exception or one.death)
        }
        unsure = {
            rank
            for rank, one in ended.items()
            if one.death is None and may_be_consequence(one.exception or "")
        }
        # The others have ended by themselves.
        ended = dict(sorted(ended.items(), key=lambda item: item[0] in unsure))
        waits: dict[tuple[str, str], list[int]] = {}
        for rank, one in sorted(self._gave_up.items()):
            place = str(one.location or ""), one.called or ""
            waits.setdefault(place, []).append(rank)
        for raised in unplaced:
            at, call = position(raised.frames)
            waits.setdefault((str(at or ""), call or ""), [])
        if not waits and not ended:
            return None
        told = _ends(ended)
        if not ended:
            causes = _causes(one for log in logs for one in log.unplaced())
            told += [f"{one}, on a rank that the log does not name" for one in causes]
        missing = sorted(awaited - ended.keys() - self._gave_up.keys())
        if missing:
            told.append(tell_ranks(missing, "has not joined the group of all ranks"))
        placed = [one for log in logs for one in log.placed()]
        late = late_at_barrier(placed, evidence.world_size)
        if late := late - ended.keys() - self._gave_up.keys():
            told.append(tell_ranks(sorted(late), "has not come to the barrier"))
            missing = sorted({*missing, *late})
        for (line, called), ranks in waits.items():
            who = name_ranks(ranks) if ranks else "others"
            told.append(f"{who} gave up waiting{_at(line)}{called and f' in {called}'}")
        seen = {
            rank: one
            for rank, one in evidence.ranks.items()
            if one.location is not None
            and rank not in self._gave_up
            and rank not in ended
        }
        told += _places(seen)
        alive = sorted(self._alive - self._gave_up.keys() - ended.keys())
        if alive:
            them = "it" if len(alive) == 1 else "them"
            told.append(f"{name_ranks(alive)} lived until the launcher ended {them}")
        if not ended and not missing and not seen.keys() >= set(self._absent):
            told.append(self._no_line())
        fault = Fault.MISSING_RANKS if missing else Fault.UNDECIDED
        culprits = tuple(ended) or tuple(missing)
        if ended:
            culprits = tuple(rank for rank in ended if rank not in unsure)
            fault = Fault.RANK_DEAD if culprits else Fault.UNDECIDED
        if ended and ended.keys() <= {rank for log in logs for rank in log.too_long}:
            # Which rank has the wrong size, it does not tell.
            fault, culprits = Fault.SIZE_MISMATCH, ()
        known = [0, *evidence.ranks, *missing, *alive]
        line, called = next(iter(waits), ("", ""))
        return Verdict(
            fault,
            GroupKey("default_pg", tuple(range(evidence.world_size or max(known) + 1))),
            culprits,
            tuple(sorted(self._gave_up)),
            called.partition(" ")[0],
            0,
            "; ".join(told),
            line=line,
        )


def _one_place(found: list[RankEvidence]) -> list[RankEvidence]:
    """Return `found` with one place of each rank, the first: a line and its call.

    A rank that runs no cell has none: its stack is that of the engine.
    """
    placed = {one.rank for one in found if one.last_cell_exit}
    kept = []
    for one in found:
        if one.location is not None and one.rank in placed:
            one = replace(one, location=None, called=None)
        elif one.location is not None:
            placed.add(one.rank)
        kept.append(one)
    return kept


def _causes(unplaced: Iterable[tuple[str, Raised]]) -> list[str]:
    """Return the exceptions that are no consequences, of ranks that are not known."""
    found: dict[str, list[str]] = {}
    for label, raised in unplaced:
        if not raised.is_consequence:
            line, _ = position(raised.frames)
            labels = found.setdefault(f"{raised.text}{_at(line)}", [])
            labels += [label] if label and label not in labels else []
    return [
        f"{', '.join(labels[:_MOST]) or 'a process'} raised {text}"
        for text, labels in list(found.items())[-_MOST:]
    ]


def _at(line: object) -> str:
    return f" at {line}" if line else ""


def _places(seen: Mapping[int, RankEvidence]) -> list[str]:
    """Return where ranks were by their stacks, which may be older than the end."""

    def place(rank: int) -> str:
        one = seen[rank]
        return f"{_at(one.location)}{f' in {one.called}' if one.called else ''}"

    return [
        f"{tell_ranks(ranks, f'was{where}')}, by "
        f"{'its stack' if len(ranks) == 1 else 'their stacks'}"
        for where, ranks in list(group_by(seen, place).items())[:_MOST]
    ]


def _ends(ended: Mapping[int, RankEvidence]) -> list[str]:
    """Return how ranks ended, those that are alike together: a job may have many."""

    def how(rank: int) -> str:
        one = ended[rank]
        if one.death is not None:
            return one.death.removeprefix(f"rank {rank} ")
        return f"ended with {one.exception}{_at(one.exception_line)}"

    told = [tell_ranks(ranks, fact) for fact, ranks in group_by(ended, how).items()]
    if len(told) > _MOST:
        told[_MOST:] = [f"and {len(told) - _MOST} more ended otherwise"]
    return told
