"""Report of the rules that held, failed or were skipped, by level and rule."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TextIO

from .trial import Outcome, Rule

__all__ = ["Printer", "Report", "Result"]

_WIDTH = 24
# Reasons of skipped cases that one rule shows in full.
_REASONS = 3


@dataclass(frozen=True)
class Result:
    """One rule, tried on all ranks."""

    level: str
    name: str
    promise: str
    device: str
    ranks: int
    #: ``"held"``, ``"failed"`` or ``"skipped"``.
    status: str
    seconds: float
    #: Why it failed or was skipped.
    text: str = ""
    cases: int = 0
    #: Case that was skipped → reason.
    skipped: dict[str, str] = field(default_factory=dict)
    #: Name → measured value, the largest of all ranks.
    notes: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        rule: Rule,
        device: str,
        ranks: int,
        outcomes: Sequence[Outcome],
        seconds: float,
    ) -> Result:
        """Combine what the ranks found."""
        failed = {r: one for r, one in enumerate(outcomes) if one.status == "failed"}
        if failed:
            status, text = "failed", _causes(failed)
        elif all(one.status == "skipped" for one in outcomes):
            status, text = "skipped", outcomes[0].text
        else:
            status, text = "held", ""
        notes: dict[str, float] = {}
        for one in outcomes:
            for key, value in one.notes.items():
                notes[key] = max(value, notes.get(key, value))
        return cls(
            rule.level,
            rule.name,
            rule.promise,
            device,
            ranks,
            status,
            seconds,
            text,
            max(one.cases for one in outcomes),
            {key: why for one in outcomes for key, why in one.skipped.items()},
            notes,
        )

    def lines(self) -> list[str]:
        """Return the rule in the report: one line, then any details."""
        count = f"{self.cases} cases" if self.cases > 1 else ""
        measured = ", ".join(_note(*note) for note in sorted(self.notes.items()))
        first = f"  {self.status:8} {self.name:{_WIDTH}} {self.seconds:6.1f} s"
        rest = "  ".join(part for part in (count, measured) if part)
        lines = [f"{first}  {rest}".rstrip()]
        if self.status == "failed":
            lines.append(f"             promise: {self.promise}")
        lines += [f"             {line}" for line in self.text.splitlines()]
        if self.status != "skipped":
            reasons = Counter(self.skipped.values())
            for why, times in reasons.most_common(_REASONS):
                case = next(key for key, value in self.skipped.items() if value == why)
                more = f" and {times - 1} more" if times > 1 else ""
                lines.append(f"             skipped {case}{more}: {why}")
            if len(reasons) > _REASONS:
                left = sum(times for _, times in reasons.most_common()[_REASONS:])
                lines.append(f"             skipped {left} cases for other reasons")
        return lines


def _causes(failed: dict[int, Outcome]) -> str:
    """Return the errors of the ranks, without effects of another rank's error."""
    causes = {r: one for r, one in failed.items() if not one.consequence} or failed
    by_text: dict[str, list[int]] = {}
    for rank, one in causes.items():
        by_text.setdefault(one.text, []).append(rank)
    lines = []
    for text, ranks in by_text.items():
        who = "rank" if len(ranks) == 1 else "ranks"
        lines.append(f"{who} {', '.join(map(str, ranks))}: {text}")
    return "\n".join(lines)


def _note(name: str, value: float) -> str:
    """``abort 0.05 s``: a measured value."""
    words, _, unit = name.rpartition("_")
    if unit == "s" and words:
        return f"{words.replace('_', ' ')} {value:.2f} s"
    if unit == "mib" and words:
        return f"{words.replace('_', ' ')} {value:.1f} MiB"
    return f"{name.replace('_', ' ')} {value:g}"


@dataclass
class Report:
    """All results of a run."""

    backend: str
    results: list[Result] = field(default_factory=list)

    @property
    def failed(self) -> list[Result]:
        """The rules that failed."""
        return [result for result in self.results if result.status == "failed"]

    @property
    def held(self) -> list[Result]:
        """The rules that held."""
        return [result for result in self.results if result.status == "held"]

    @property
    def skipped(self) -> list[Result]:
        """The rules that were skipped."""
        return [result for result in self.results if result.status == "skipped"]

    def summary(self) -> str:
        """One line for each level, and the verdict."""
        lines = []
        for level in dict.fromkeys(result.level for result in self.results):
            counts = Counter(
                result.status for result in self.results if result.level == level
            )
            words = ", ".join(
                f"{counts[status]} {status}" for status in ("held", "failed", "skipped")
            )
            lines.append(f"{level:10} {words}")
        seconds = sum(result.seconds for result in self.results)
        if self.failed:
            names = dict.fromkeys(f"{one.level}: {one.name}" for one in self.failed)
            verdict = f"does not conform ({'; '.join(names)})"
        elif not self.held:
            verdict = "was not tried: every rule was skipped"
        else:
            verdict = "conforms"
        lines.append(f"backend {self.backend!r} {verdict}; {seconds:.0f} s")
        return "\n".join(lines)


class Printer:
    """Writes the report while the rules are tried."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._heading = ""

    def begin(self, rule: Rule, device: str, ranks: int) -> None:
        """Write the name of the rule that is being tried."""
        many = "1 rank" if ranks == 1 else f"{ranks} ranks"
        heading = f"{rule.level}, {many}, arrays on {device!r}"
        if heading != self._heading:
            self._heading = heading
            self._write(f"{heading}\n")
        if self._live:
            self._write(f"  ...      {rule.name:{_WIDTH}}")

    def progress(self, rule: Rule, cases: int) -> None:
        """Show how far a long rule is."""
        if self._live:
            self._write(f"\r  ...      {rule.name:{_WIDTH}}           {cases} cases")

    def end(self, result: Result) -> None:
        """Write the result of one rule."""
        if self._live:
            self._write("\r\x1b[K")
        self._write("\n".join(result.lines()) + "\n")

    def close(self, report: Report) -> None:
        """Write the verdict."""
        self._write(f"\n{report.summary()}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
