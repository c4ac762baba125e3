"""``python -m rankscope.conformance``: the command line of the suite."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence

from ..did_you_mean import did_you_mean
from ..interface.registry import known_backends
from ..rank_sets import parse_runs
from .calls import OPS
from .report import Printer, Report
from .session import Setup
from .suite import LAUNCHERS, LEVELS, RULES, check_backend
from .trial import Options

__all__ = ["main"]

_DESCRIPTION = """
Try a backend on what Rankscope requires of every backend. Level "exact": each op
with each dtype, reduction and size against numpy. Level "contract": ops return at
once, run in order, end when they are aborted, write nothing afterwards and leave
nothing behind. Level "recover": a rank dies in each op, the group is made anew, and
works. What the backend does not claim (NotImplementedError, reduce_ops, a dtype that
its check() refuses) is skipped, by name.
"""

_EXIT = """
exit status: 0 every rule held or was skipped, 1 a rule failed, 2 the backend could
not be tried, 130 interrupted (Ctrl-C), 143 terminated.
examples:
  python -m rankscope.conformance tcp
  python -m rankscope.conformance mine --module my_package -n 1-4
  python -m rankscope.conformance mine --levels contract --ops all_reduce,barrier
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m rankscope.conformance",
        description=_DESCRIPTION,
        epilog=_EXIT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rules = tuple(dict.fromkeys(rule.name for rule in RULES))
    add = made.add_argument
    add("backend", help="the name that the backend is registered by")
    about = "numbers of ranks: 2 (the default), 1,2,4 or 1-4"
    add("-n", dest="ranks", metavar="RANKS", type=_ranks, default=(2,), help=about)
    for flag, known, default, about in (
        ("--levels", LEVELS, LEVELS, f"of {', '.join(LEVELS)}; all by default"),
        (
            "--rules",
            rules,
            (),
            "names of rules, as the report has them; all by default",
        ),
        ("--ops", (*OPS, "send"), (), "ops to try; all by default"),
    ):
        what = flag.strip("-").removesuffix("s")
        kind, metavar = _names(known, what), f"{what.upper()},..."
        add(flag, type=kind, default=default, metavar=metavar, help=about)
    add(
        "--devices",
        type=lambda text: tuple(text.split(",")),
        default=("cpu",),
        metavar="DEVICE,...",
        help="types of devices that arrays are on: cpu (the default), cuda, ext",
    )
    about = (
        "module that registers the backend when it is imported, or its function "
        "that does; not needed for a backend with an entry point"
    )
    metavar = "MODULE[:FUNCTION]"
    add("--module", action="append", default=[], metavar=metavar, help=about)
    about = (
        "class that makes arrays of the device type (see "
        "rankscope.conformance.Arrays); by default numpy's, and cupy's for cuda"
    )
    add("--arrays", default="", metavar="MODULE:CLASS", help=about)
    for flag, seconds, about in (
        ("--timeout", 20.0, "how long an op may take"),
        ("--abort-within", 1.0, "how soon after an abort every wait has to end"),
    ):
        about = f"{about} (default: {seconds:g})"
        add(flag, type=float, default=seconds, metavar="SECONDS", help=about)
    add(
        "--launcher",
        choices=sorted(LAUNCHERS),
        default="processes",
        help="what starts the ranks: processes (the default), mpi (mpiexec), threads "
        "of one process (fast, for a debugger; no rank can die)",
    )
    return made


def _ranks(text: str) -> tuple[int, ...]:
    try:
        found = tuple(count for run in parse_runs(text, "number") for count in run)
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected e.g. 2, 1,2,4 or 1-4")
    return found


def _names(known: Sequence[str], what: str) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"no {what} {name!r}{did_you_mean(name, known)} (known: "
                    f"{', '.join(known)})"
                )
        return names

    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    # SIGTERM as Ctrl-C: the ranks end with this process.
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        return _run(arguments)
    except KeyboardInterrupt as error:
        print("interrupted; every rank was ended", file=sys.stderr)
        return 143 if isinstance(error, _Terminated) else 130
    finally:
        signal.signal(signal.SIGTERM, before)


class _Terminated(KeyboardInterrupt):
    """SIGTERM has arrived."""


def _terminated(*_: object) -> None:
    raise _Terminated


def _run(arguments: Sequence[str] | None) -> int:
    given = parser().parse_args(arguments)
    options = Options(
        timeout=given.timeout, abort_seconds=given.abort_within, ops=given.ops
    )
    failed = False
    for device in given.devices:
        setup = Setup(given.backend, device, tuple(given.module), given.arrays, options)
        try:
            report: Report = check_backend(
                setup,
                given.ranks,
                levels=given.levels,
                rules=given.rules,
                session=LAUNCHERS[given.launcher],
                printer=Printer(),
            )
        except ValueError as error:
            hint = "" if given.module else _hint(given.backend)
            print(f"{error}{hint}", file=sys.stderr)
            return 2
        if not report.held and not report.failed:
            return 2
        failed = failed or bool(report.failed)
    return 1 if failed else 0


def _hint(backend: str) -> str:
    if backend in known_backends():
        return ""
    return "; give --module MODULE, which registers the backend when it is imported"
