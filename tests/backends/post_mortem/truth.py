"""What is right to say about a case, and whether an answer is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.backends.post_mortem.training_job import Op

__all__ = [
    "CYCLE",
    "EXECUTION",
    "GONE",
    "MISMATCH",
    "MISSING",
    "RESULTS",
    "Answer",
    "Truth",
    "judge",
]

MISSING = frozenset({"missing ranks"})
GONE = MISSING | {"rank dead", "rank not responding", "no dump"}
MISMATCH = frozenset(
    {"op mismatch", "size mismatch", "dtype mismatch", "order mismatch"}
)
CYCLE = frozenset({"order mismatch", "rank busy elsewhere", "deadlock", "cycle"})
EXECUTION = frozenset({"execution hang"})
#: What an answer may be: "right" is one that the files allow beside the fault itself.
RESULTS = "exact", "right", "not known", "wrong"


@dataclass(frozen=True)
class Answer:
    """An answer that is right: culprits are at least `must` and at most `may`."""

    kinds: frozenset[str]
    must: frozenset[int]
    may: frozenset[int]

    def allows(self, kinds: set[str], culprits: set[int]) -> bool:
        return kinds <= self.kinds and self.must <= culprits <= self.may


@dataclass
class Truth:
    """The answers that the files of a case allow, the fault itself first.

    A healthy job has no answer.
    """

    answers: list[Answer] = field(default_factory=list)
    #: Whether "not known" is as good an answer.
    unknown: bool = False
    #: Ops and groups (by name or description) that a right answer may name.
    ops: set[str] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)

    def add(
        self, kinds: frozenset[str], must: Iterable[int], may: Iterable[int] = ()
    ) -> None:
        must = frozenset(must)
        self.answers.append(Answer(kinds, must, must | frozenset(may)))

    def name(self, ops: Iterable[Op]) -> None:
        """Accept these ops and their groups."""
        for op in ops:
            self.ops |= {op.name, *(part.kind for part in op.parts)}
            self.groups |= {op.group.name, op.group.desc}


def judge(truth: Truth, verdicts: Sequence[Mapping[str, Any]]) -> str:
    """Return which of `RESULTS` the verdicts on a case are.

    A verdict without culprits names nobody: it counts as none.
    """
    named = [verdict for verdict in verdicts if verdict["culprits"]]
    if not named:
        return "not known" if truth.answers and not truth.unknown else "exact"
    kinds = {verdict["kind"] for verdict in named}
    culprits = {rank for verdict in named for rank in verdict["culprits"]}
    for number, answer in enumerate(truth.answers):
        if answer.allows(kinds, culprits):
            return "right" if number else "exact"
    return "wrong"
