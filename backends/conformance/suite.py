"""Try the rules on a backend, and report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from ..interface.registry import resolve, unavailable_reason
from .launch import MPI, Processes, Session, Setup, Threads
from .ranks import RankFailure
from .report import Printer, Report, Result
from .rules import LEVELS, select
from .trial import Outcome, Rule

__all__ = ["LAUNCHERS", "check_backend", "problem_with", "try_on"]

LAUNCHERS: dict[str, Callable[[Setup, int], Session]] = {
    "processes": Processes,
    "mpi": MPI,
    "threads": Threads,
}


def problem_with(setup: Setup) -> str | None:
    """Why the backend cannot be tried at all; ``None`` if it can."""
    try:
        setup.register()
    except (ImportError, AttributeError) as error:
        return f"{', '.join(setup.modules)} cannot be imported: {error}"
    reason = unavailable_reason(setup.backend)
    if reason is not None:
        return reason
    devices = resolve(setup.backend).devices
    if setup.device not in devices:
        return (
            f"backend {setup.backend!r} serves {', '.join(devices)} and not "
            f"{setup.device!r}"
        )
    return None


def check_backend(
    setup: Setup,
    ranks: Sequence[int] = (2,),
    *,
    levels: Sequence[str] = LEVELS,
    rules: Sequence[str] = (),
    skip: Mapping[str, str] | None = None,
    session: Callable[[Setup, int], Session] = Processes,
    printer: Printer | None = None,
) -> Report:
    """Try the rules of `levels` on a backend, on each number of `ranks`.

    `rules`: names of the rules to try, all if empty. `skip` gives a reason for each
    rule that is not to be tried. `session` launches the ranks: `Processes`, `MPI`
    or `Threads`. `printer` shows the results as they come.

    Raises `ValueError` if the backend cannot be tried at all: it is not known, or
    does not serve the device type.
    """
    problem = problem_with(setup)
    if problem is not None:
        raise ValueError(problem)
    report = Report(setup.backend)
    for size in ranks:
        made = session(setup, size)
        try:
            for rule in select(levels, rules):
                if printer is not None:
                    printer.begin(rule, setup.device, size)
                reason = (skip or {}).get(rule.name)
                result = try_on(made, setup, rule, reason, printer)
                report.results.append(result)
                if printer is not None:
                    printer.end(result)
        finally:
            made.close()
    if printer is not None:
        printer.close(report)
    return report


def try_on(
    session: Session,
    setup: Setup,
    rule: Rule,
    reason: str | None = None,
    printer: Printer | None = None,
) -> Result:
    """Try `rule` on the ranks of `session`; skip it if there is a `reason`."""

    def progress(cases: int) -> None:
        if printer is not None:
            printer.progress(rule, cases)

    began = time.monotonic()
    if reason is None and session.size < rule.ranks:
        reason = f"needs {rule.ranks} ranks"
    if reason is not None:
        outcomes = [Outcome("skipped", reason)]
    else:
        try:
            outcomes = session.run(rule, progress)
        except RankFailure as error:
            outcomes = [Outcome("failed", str(error))]
    took = time.monotonic() - began
    return Result.of(rule, setup.device, session.size, outcomes, took)
