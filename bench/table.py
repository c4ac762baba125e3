"""Measured samples, and the table of results."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import psutil

__all__ = ["Row", "Sample", "machine", "markdown"]


@dataclass
class Sample:
    """All timings of one contender, in seconds, round by round."""

    rounds: list[list[float]]

    @property
    def median(self) -> float:
        return median(self._sorted())

    @property
    def p99(self) -> float:
        """The timing that 99 of 100 do not exceed (of fewer than 100: the longest)."""
        times = self._sorted()
        return times[-(-99 * len(times) // 100) - 1]

    def __str__(self) -> str:
        return f"{duration(self.median)} ({duration(self.p99)})"

    def _sorted(self) -> list[float]:
        return sorted(time for times in self.rounds for time in times)

    def ratio(self, reference: Sample) -> float:
        """Return how many times as long as `reference`: the median over the rounds.

        Both sides of a round ran within seconds of each other, so what slows
        the machine down for a while slows both.
        """
        pairs = zip(self.rounds, reference.rounds, strict=True)
        return median(median(ours) / median(theirs) for ours, theirs in pairs)


@dataclass
class Row:
    """One comparison; `reference` and `budget` may be missing."""

    what: str
    ours: str
    reference: str = ""
    ratio: str = ""
    budget: str = ""
    passed: bool | None = None

    @classmethod
    def compare(
        cls, what: str, ours: Sample, reference: Sample, budget: float | None
    ) -> Row:
        """Return a row with both medians, their ratio and the budget."""
        ratio = ours.ratio(reference)
        return cls(
            what,
            str(ours),
            str(reference),
            f"{ratio:.2f}×",
            "" if budget is None else f"≤ {budget:.2f}×",
            None if budget is None else ratio <= budget,
        )

    @classmethod
    def compare_extra(
        cls, what: str, ours: Sample, reference: Sample, budget: float | None
    ) -> Row:
        """Return a row with both medians and their difference; `budget` in seconds."""
        row = cls.compare(what, ours, reference, None)
        extra = ours.median - reference.median
        row.ratio = f"+{duration(max(extra, 0.0))}"
        if budget is not None:
            row.budget = f"≤ +{duration(budget)}"
            row.passed = extra <= budget
        return row

    @classmethod
    def within(cls, what: str, took: Sequence[float], budget: float) -> Row:
        """Return a row of the median and the longest time, which has the budget."""
        worst = max(took)
        return cls(
            what,
            f"{duration(median(took))} ({duration(worst)})",
            budget=f"≤ {duration(budget)}",
            passed=worst <= budget,
        )

    @classmethod
    def share(cls, what: str, busy: float, budget: float, more: str = "") -> Row:
        return cls(
            what,
            f"{100 * busy:.1f} % of a core{more}",
            budget=f"≤ {100 * budget:.0f} %",
            passed=busy <= budget,
        )

    @property
    def verdict(self) -> str:
        """``pass``, ``over``, or nothing where there is no budget."""
        return {None: "", True: "pass", False: "**over**"}[self.passed]


def duration(seconds: float) -> str:
    """Return `seconds` as text: three significant digits, in s, ms or µs."""
    units = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
    unit, factor = next((one for one in units if seconds * one[1] >= 1), units[-1])
    value = seconds * factor
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"


def size_name(nbytes: int) -> str:
    """Return `nbytes` as text, such as ``64 KiB`` for 65536."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def markdown(rows: Sequence[Row]) -> str:
    """Return the table, its columns padded so that it reads in a terminal too."""
    head = ("Measured", "Rankscope", "Reference", "Ratio", "Budget", "")
    cells = [
        head,
        *((r.what, r.ours, r.reference, r.ratio, r.budget, r.verdict) for r in rows),
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    lines = [
        "| "
        + " | ".join(
            cell.ljust(width) for cell, width in zip(line, widths, strict=True)
        )
        + " |"
        for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def machine(extra_versions: dict[str, str], load: float) -> str:
    """Return the machine, the versions and the `load` at the start, as a paragraph."""
    names = ("numpy", "pygloo", "xoscar", "ipyparallel", "ipykernel", "pyzmq")
    versions = {"Python": platform.python_version()}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions |= extra_versions
    memory = psutil.virtual_memory().total / 2**30
    cores = len(os.sched_getaffinity(0))
    return (
        f"{_processor()}, {cores} cores, {memory:.0f} GiB, "
        f"{platform.system()} {platform.release()}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f". Load average at the start: {load:.1f}."
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
