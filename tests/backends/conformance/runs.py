"""What the tests of the conformance suite share: options, and the report."""

from __future__ import annotations

from dataclasses import replace

from rankscope.conformance import Options, Report

__all__ = ["SMALL", "impatient", "text"]

#: Little of everything: what a rule says is tried, not how often. A rule that holds
#: holds on a loaded machine, too: limits are waited for by rules that fail alone.
SMALL = Options(
    timeout=20,
    report_seconds=10,
    abort_seconds=5,
    leak_seconds=10,
    sizes=(0, 7),
    reducible=("uint8", "float64"),
    movable=("uint8", "complex64"),
    cycles=4,
    running_bytes=2 << 20,
    running_times=2,
)


def impatient(options: Options) -> Options:
    """Return `options` with short limits, for a rule that has to fail."""
    return replace(
        options, timeout=6, report_seconds=1, abort_seconds=1, leak_seconds=1
    )


def text(report: Report) -> str:
    """Return what failed, as the report has it."""
    return "\n".join(line for result in report.failed for line in result.lines())
