"""Try the rules on a backend, and report."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence

from ..interface.registry import outdated, resolve, unavailable_reason
from . import aborts, contract, exact, recover, surface
from .processes import MPI, Processes
from .ranks import RankFailure
from .report import Printer, Report, Result
from .session import LaunchError, Session, Setup, load
from .threads import Threads
from .trial import Options, Outcome, Rule

__all__ = [
    "LAUNCHERS",
    "LEVELS",
    "RULES",
    "check_backend",
    "problem_with",
    "select",
    "try_on",
]

LEVELS = ("exact", "contract", "recover")

RULES: tuple[Rule, ...] = (
    *exact.RULES,
    *surface.RULES,
    *contract.RULES[:-1],
    *aborts.RULES,
    # Last of its level, so that leftovers of other rules are not counted.
    contract.RULES[-1],
    *recover.RULES,
)

LAUNCHERS: dict[str, Callable[[Setup, int], Session]] = {
    "processes": Processes,
    "mpi": MPI,
    "threads": Threads,
}


def select(
    levels: Sequence[str] = LEVELS,
    names: Sequence[str] = (),
    options: Options | None = None,
) -> list[Rule]:
    """Return the rules of `levels`, in order."""
    return [
        rule
        for rule in RULES
        if rule.level in levels
        and (not names or rule.name in names)
        and (options is None or rule.is_about(options))
    ]


def problem_with(setup: Setup) -> str | None:
    """Why the backend cannot be tried at all; ``None`` if it can."""
    try:
        setup.register()
        if setup.arrays:
            load(setup.arrays)
    except LaunchError as error:
        return str(error)
    reason = unavailable_reason(setup.backend)
    if reason is not None:
        return reason
    registration = resolve(setup.backend)
    if setup.device in registration.devices:
        return outdated(registration)
    return outdated(registration) or (
        f"backend {setup.backend!r} serves {', '.join(registration.devices)} and not "
        f"{setup.device!r}"
    )


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

    Raises `ValueError` if the backend cannot be tried at all: it is not known, cannot
    be made, or does not serve the device type.
    """
    problem = problem_with(setup)
    if problem is not None:
        raise ValueError(problem)
    printer = printer or Printer(io.StringIO())
    report = Report(setup.backend, interrupted=True)
    try:
        for size in ranks:
            made = session(setup, size)
            try:
                for rule in select(levels, rules, setup.options):
                    printer.begin(rule, setup.device, size)
                    reason = (skip or {}).get(rule.name)
                    result = try_on(made, setup, rule, reason, printer.progress)
                    report.results.append(result)
                    printer.end(result)
            finally:
                made.close()
        report.interrupted = False
    finally:
        printer.clear()
        if report.results or not report.interrupted:
            printer.close(report)
    return report


def try_on(
    session: Session,
    setup: Setup,
    rule: Rule,
    reason: str | None = None,
    progress: Callable[[Rule, int], None] = lambda rule, cases: None,
) -> Result:
    """Try `rule` on the ranks of `session`; skip it if there is a `reason`."""
    began = time.monotonic()
    if reason is None and session.size < rule.ranks:
        reason = f"needs {rule.ranks} ranks"
    if reason is not None:
        outcomes = [Outcome("skipped", reason)]
    else:
        try:
            outcomes = session.run(rule, lambda cases: progress(rule, cases))
        except RankFailure as error:
            outcomes = [Outcome("failed", str(error))]
    took = time.monotonic() - began
    return Result.of(rule, setup.device, session.size, outcomes, took)
