"""``rankscope diagnose PATH``: say why a job hung, from the files that it has left.

It needs nothing of what the commands for running clusters import.
"""

from __future__ import annotations

import argparse
import os
import sys

from rankscope.backends.post_mortem.report import Report, examine
from rankscope.backends.post_mortem.texts import KINDS
from rankscope.backends.post_mortem.trace import trace
from rankscope.backends.printable import printable
from rankscope.command_output import DONE, FAILED, HANGS, fail, say
from rankscope.widgets.lateness_text import late_tables
from rankscope.widgets.report.page import write_page

__all__ = ["run"]


def run(values: argparse.Namespace) -> int:
    """Diagnose what a job has left in files; return the exit status."""
    missing = [path for path in values.paths if not os.path.lexists(path)]
    if missing:
        names = ", ".join(map(repr, missing))
        return fail("diagnose", f"no such file or folder: {names}")
    report = examine(values.paths, times=values.trace is not None)
    try:
        _write(report, values)
    except OSError as error:
        return fail("diagnose", error)
    if values.json:
        print(report.as_json())
    else:
        say(report.as_text())
        if report.late and not report.verdicts:
            say(printable(late_tables(report.late)))
    if report.verdicts:
        return HANGS
    if not any(one.recorded for one in report.evidence.ranks.values()):
        return FAILED if values.json else fail("diagnose", _found_nothing(report))
    return DONE


def _write(report: Report, values: argparse.Namespace) -> None:
    if values.html is not None:
        write_page(report, ", ".join(values.paths), values.html)
    if values.trace is not None:
        with open(values.trace, "w", encoding="utf-8") as file:
            file.writelines(trace(report.evidence))
    for path, what in ((values.html, "browser"), (values.trace, "ui.perfetto.dev")):
        if path is not None:
            say(f"{path} written, for {what}", file=sys.stderr)


def _found_nothing(report: Report) -> str:
    if report.evidence.ranks:
        return "the files do not tell in which ops the ranks were: no verdict"
    looked = f"Flight Recorder dumps, {', '.join(KINDS)}"
    if any(one.kind in KINDS and one.problem for one in report.files):
        return "no verdict: the lines above are all that the files tell"
    if not report.files:
        return f"no file is there; looked for {looked}"
    return f"no file of {len(report.files)} tells of a rank; looked for {looked}"
