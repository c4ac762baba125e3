"""Read whatever a job has left, and say why it hung."""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..observe.callers import Callers
from ..observe.evidence import Evidence, combine
from ..observe.late_findings import late_lines
from ..observe.lateness import GroupLateness, findings_of
from ..observe.root_cause import find_root_causes
from ..observe.root_cause.facts import exceptions
from ..observe.verdicts import Fault, Verdict
from ..printable import printable
from ..rank_sets import group_by, name_ranks, tell_ranks
from .attempts import assign_ranks, newest_attempt
from .evidence_file import EvidenceFile, UnreadableError
from .files import find_files
from .flight_dump import is_cut_off, looks_like_dump, ranks_in, read_dump
from .flight_rank import RankDump, condense, end_batches_of_one, note_empty_ones
from .flight_recorder import KIND, evidence_of_dumps
from .late_ops import lateness_of
from .texts import Texts

__all__ = ["Report", "examine"]

#: The version of what `Report.as_json` returns.
VERSION = 1
#: Problems of files that a text leaves out: a stdout without output is none.
_QUIET = ("", "empty")
_NOTHING = "nothing hangs, as far as what was read tells"
_NO_OPS = (
    "the dumps list no op: none was in flight, or none was recorded; if the job hangs, "
    "the stacks of its ranks tell where"
)
_NO_TIMES = (
    "nothing tells when the dumps were written: if the job still ran then, it may be "
    "no hang"
)
_CUT_OFF = "damaged: it is cut off; what it tells before was used"
#: Ends of ranks that are told beside a cause.
_MOST_ENDS = 8


@dataclass(frozen=True)
class Report:
    """What files of a job tell: why it hung, and what each file was."""

    verdicts: tuple[Verdict, ...]
    files: tuple[EvidenceFile, ...]
    evidence: Evidence
    #: Who kept the others waiting in ops that are over, of each group where one had to.
    late: tuple[GroupLateness, ...] = ()

    @property
    def world_size(self) -> int | None:
        """The number of ranks of the job, None if no file tells."""
        return self.evidence.world_size

    def as_dict(self) -> dict[str, Any]:
        """Return the report as ``rankscope diagnose --json`` writes it."""
        return {
            "version": VERSION,
            "verdicts": [
                {
                    "kind": one.fault.value,
                    "culprits": list(one.culprits),
                    "group": one.group.name,
                    "op": one.op,
                    "sequence_number": one.seq,
                    "line": one.line,
                    "text": one.text,
                    "consequences": list(one.consequences),
                }
                for one in self.verdicts
            ],
            "files": [asdict(one) for one in self.files],
            "world_size": self.world_size,
            "late": [
                {
                    "kind": one.pattern.value,
                    "ranks": list(one.ranks),
                    "group": one.group.name,
                    "op": one.op,
                    "line": one.line,
                    "times": one.times,
                    "of": one.of,
                    "wait": one.wait,
                    "share": one.share,
                    "text": str(one),
                }
                for one in findings_of(self.late)
            ],
        }

    def as_text(self) -> str:
        """Return the verdicts, what follows from them, and files with a problem."""
        lines = []
        for one in self.verdicts:
            lines.append(f"{one.fault.value}: {one.text}")
            lines += [f"  {text}" for text in one.consequences]
        recorded = [rank for rank, one in self.evidence.ranks.items() if one.recorded]
        if not self.verdicts and recorded:
            lines.append(_NOTHING if self._has_ops() else _NO_OPS)
        if recorded:
            lines.append(self._read(recorded))
            lines += [_NO_TIMES] if self._may_have_run() else []
        elif not self.verdicts:
            lines += self.places()
        lines += late_lines(findings_of(self.late))
        lines += [
            f"{one.path}: {one.problem}"
            for one in self.files
            if one.problem not in _QUIET
        ]
        # What is printed; `as_dict` has it as it is.
        return printable("\n".join(lines))

    def _has_ops(self) -> bool:
        ranks = self.evidence.ranks.values()
        return any(found.ops for one in ranks for found in one.groups.values())

    def _may_have_run(self) -> bool:
        """Whether the job may have run on: dumps alone tell of it, and not when."""
        absent = Fault.MISSING_RANKS, Fault.EXECUTION_HANG, Fault.DEADLOCK
        return (
            any(one.fault in absent for one in self.verdicts)
            and any(one.kind == KIND for one in self.files)
            and all(one.kind in (KIND, "other") for one in self.files)
            and not any(one.read_ns for one in self.evidence.ranks.values())
        )

    def _read(self, recorded: list[int]) -> str:
        """Return ``read: ranks 0–3, 5–7 of 8; no records of rank 4``."""
        text = f"read: {name_ranks(recorded)}"
        if self.world_size is None:
            return text
        lacking = sorted(set(range(self.world_size)) - set(recorded))
        text += f" of {self.world_size}"
        return f"{text}; no records of {name_ranks(lacking)}" if lacking else text

    def places(self) -> list[str]:
        """Return ``ranks 0–2 are at train.py:88 in wait of threading.py``."""
        at: dict[str, list[int]] = {}
        callers = Callers(one.location for one in self.evidence.ranks.values())
        for rank, one in self.evidence.ranks.items():
            if one.location is not None:
                called = f" in {one.called}" if one.called else ""
                place = f"at {callers.named(one.location)}{called}"
                at.setdefault(place, []).append(rank)
        return [
            tell_ranks(ranks, f"is {place}")
            for place, ranks in sorted(at.items(), key=lambda one: len(one[1]))
        ]

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1, ensure_ascii=False)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Have no search for reference cycles: in a dump it takes as long as to read it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_collection()
def examine(paths: Iterable[str | os.PathLike[str]], *, times: bool = False) -> Report:
    """Read the files under `paths` and return why the job hung.

    These are folders (with all that is below them), files and archives, in any order.
    Those that are no evidence, or that cannot be used, are among the ``files`` of the
    report with their problem; the others are judged without them. With `times` those of
    completed ops are kept: a trace has them, and no rule needs them.
    """
    files: dict[str, EvidenceFile] = {}
    dumps: list[RankDump] = []
    texts, unread = Texts(), list[tuple[int, ...]]()
    _read(paths, files, dumps, texts, times, unread)
    ranks, problems = assign_ranks(dumps)
    placed = [one for one in dumps if one.dump.path in ranks]
    used, older = newest_attempt(placed, ranks)
    problems.update(older)
    note_empty_ones(used)
    end_batches_of_one(used)
    problems.update({one.dump.path: _CUT_OFF for one in used if one.dump.is_cut_off})
    problems.update({one.dump.path: one.problem for one in used if one.problem})
    for one in dumps:
        path = one.dump.path
        own = (ranks[path],) if path in ranks else ()
        files[path] = EvidenceFile(path, KIND, own, problems.get(path, ""))
    by_rank = {ranks[one.dump.path]: one for one in used}
    recorded, groups, world_size = evidence_of_dumps(by_rank)
    told, world_size = texts.evidence(groups, world_size)
    files.update(texts.files)
    evidence = combine([*recorded, *told], world_size, groups)
    evidence = replace(
        evidence,
        may_lack_hosts=texts.facts.found,
        is_of_counts=texts.is_of_counts and not by_rank,
        final=texts.facts.final,
        unread=frozenset(
            next((one for one in named if one not in by_rank), -1) for named in unread
        ).union(one.rank for one in recorded if not (one.recorded or one.groups)),
    )
    found = find_root_causes(evidence)
    verdicts = [texts.facts.unless_late(one, evidence) for one in found]
    if not verdicts and (verdict := texts.verdict(evidence)) is not None:
        verdicts = [verdict]
    if verdicts and (cause := texts.facts.cause()) is not None:
        verdicts = [cause]
    if not dumps and (said := texts.said(verdicts)) is not None:
        verdicts = [said]
    verdicts = _with_ends(verdicts, evidence)
    lateness = lateness_of(
        {rank: one.late for rank, one in by_rank.items()},
        {rank: one.dump for rank, one in by_rank.items()},
    )
    return Report(
        tuple(verdicts),
        tuple(files[path] for path in sorted(files)),
        evidence,
        tuple(one for one in lateness.groups() if not one.unknown),
    )


def _with_ends(verdicts: Sequence[Verdict], evidence: Evidence) -> list[Verdict]:
    """Return `verdicts`, the first one with ends of ranks that none of them tells."""
    if not verdicts:
        return []
    told = " ".join(" ".join([str(one), *one.consequences]) for one in verdicts)
    culprits = {rank for one in verdicts for rank in one.culprits}
    found = exceptions(culprits, evidence, told)
    for rank, one in evidence.ranks.items():
        if one.death and rank not in culprits and one.death not in told:
            found.append(one.death)
    gone = group_by(evidence.ranks, lambda rank: evidence.ranks[rank].departure or "")
    if "left the program" not in told:
        found += [tell_ranks(ranks, how) for how, ranks in gone.items() if how]
    first, *others = verdicts
    more = (*first.consequences, *found[:_MOST_ENDS])
    return [replace(first, consequences=more), *others]


def _read(
    paths: Iterable[str | os.PathLike[str]],
    files: dict[str, EvidenceFile],
    dumps: list[RankDump],
    texts: Texts,
    times: bool,
    unread: list[tuple[int, ...]],
) -> None:
    for found in find_files(paths):
        if isinstance(found, EvidenceFile):
            files[found.path] = found
        elif not looks_like_dump(found.data):
            if texts.add(found):
                continue
            problem = "empty" if not found.data else "nothing that is known"
            files[found.path] = EvidenceFile(found.path, "other", problem=problem)
        else:
            try:
                dumps.append(condense(read_dump(found), times))
                files[found.path] = EvidenceFile(found.path, KIND)
                continue
            except UnreadableError as error:
                problem = str(error)
            except RecursionError:
                problem = "damaged: lists within lists without end"
            files[found.path] = EvidenceFile(found.path, KIND, problem=problem)
            if not is_cut_off(found.data):
                unread.append(ranks_in(found.name))
