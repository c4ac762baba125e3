"""Report of the rules that held, failed or were skipped, by level and rule."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TextIO

from ..rank_sets import group_by, name_ranks
from .trial import Outcome, Rule

__all__ = ["Printer", "Report", "Result"]

_WIDTH = 24
_INDENT = " " * 13
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
            lines.append(f"{_INDENT}promise: {self.promise}")
        lines += [f"{_INDENT}{line}" for line in self.text.splitlines()]
        if self.status != "skipped":
            reasons = Counter(self.skipped.values())
            for why, times in reasons.most_common(_REASONS):
                case = next(key for key, value in self.skipped.items() if value == why)
                more = f" and {times - 1} more" if times > 1 else ""
                lines.append(f"{_INDENT}skipped {case}{more}: {why}")
            if len(reasons) > _REASONS:
                left = sum(times for _, times in reasons.most_common()[_REASONS:])
                lines.append(f"{_INDENT}skipped {left} cases for other reasons")
        return lines


def _causes(failed: dict[int, Outcome]) -> str:
    """Return the errors of the ranks, without effects of another rank's error."""
    causes = {r: one for r, one in failed.items() if not one.consequence} or failed
    # Texts that differ in the rank that they name, in no more, are one.
    texts = group_by(
        causes, lambda rank: causes[rank].text.replace(f"rank {rank}", "this rank")
    )
    return "\n".join(
        f"{name_ranks(ranks)}: {causes[ranks[0]].text}" for ranks in texts.values()
    )


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
    #: Whether the run ended before the last rule.
    interrupted: bool = False

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.status == "failed"]

    @property
    def held(self) -> list[Result]:
        return [result for result in self.results if result.status == "held"]

    @property
    def skipped(self) -> list[Result]:
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
        lines.append(f"backend {self.backend!r} {self._verdict()}; {seconds:.0f} s")
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.failed:
            names = dict.fromkeys(f"{one.level}: {one.name}" for one in self.failed)
            return f"does not conform ({'; '.join(names)})"
        if self.interrupted:
            return "was not tried to the end"
        if not self.held:
            return "was not tried: every rule was skipped"
        return "conforms"


class Printer:
    """Writes the report while the rules are tried."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._heading = ""
        self._skipped: dict[str, list[str]] = {}
        self._began = 0.0

    def begin(self, rule: Rule, device: str, ranks: int) -> None:
        """Write the name of the rule that is being tried."""
        many = "1 rank" if ranks == 1 else f"{ranks} ranks"
        heading = f"{rule.level}, {many}, arrays on {device!r}"
        if heading != self._heading:
            self._flush_skipped()
            self._heading = heading
            self._write(f"{heading}\n")
        self._began = time.monotonic()
        self.progress(rule, 0)

    def progress(self, rule: Rule, cases: int) -> None:
        """Show, on a terminal, how long a rule has taken, and how far it is."""
        if self._live:
            seconds = time.monotonic() - self._began
            count = f"  {cases} cases" if cases else ""
            self._write(f"\r  ...      {rule.name:{_WIDTH}} {seconds:6.0f} s{count}")

    def end(self, result: Result) -> None:
        """Write the result of one rule."""
        self.clear()
        if result.status == "skipped":
            self._skipped.setdefault(result.text, []).append(result.name)
        else:
            self._write("\n".join(result.lines()) + "\n")

    def clear(self) -> None:
        """Remove the name of the rule that was being tried."""
        if self._live:
            self._write("\r\x1b[K")

    def close(self, report: Report) -> None:
        """Write the verdict."""
        self.clear()
        self._flush_skipped()
        self._write(f"\n{report.summary()}\n")

    def _flush_skipped(self) -> None:
        for reason, names in self._skipped.items():
            first, *more = reason.splitlines() or [""]
            lines = [f"  skipped  {', '.join(names)}: {first}"]
            self._write("\n".join(lines + [f"{_INDENT}{line}" for line in more]) + "\n")
        self._skipped.clear()

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
