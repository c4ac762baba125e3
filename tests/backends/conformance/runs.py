"""What the tests of the conformance suite share: a small extent, and the report."""

from __future__ import annotations

from rankscope.conformance import Options, Report

__all__ = ["SMALL", "text"]

#: Little of everything: what a rule says is tried, not how often.
SMALL = Options(
    timeout=6,
    report_seconds=2,
    leak_seconds=1,
    sizes=(0, 7),
    reducible=("uint8", "float64"),
    movable=("uint8", "complex64"),
    cycles=4,
    running_bytes=2 << 20,
    running_times=2,
)


def text(report: Report) -> str:
    """Return what failed, as the report has it."""
    return "\n".join(line for result in report.failed for line in result.lines())
