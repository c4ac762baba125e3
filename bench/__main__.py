"""Measure everything and print one table: ``python -m bench``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rankscope.backends import is_gloo_available, unavailable_reason
from rankscope.backends.ucx import library
from tools.other_environments import TORCH, torch_python
from tools.support_table import put

from . import (
    all_reduce,
    board,
    coalescing,
    dispatch,
    mpi,
    nccl,
    notebook,
    publishing,
    recovery,
    top,
    training,
)
from .table import Row, machine, markdown, size_name

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
CHOICE_PAGE = ROOT / "docs" / "which_backend.md"
PARTS = (
    "all_reduce",
    "coalescing",
    "training",
    "mpi",
    "nccl",
    "cell",
    "start",
    "dispatch",
    "publishing",
    "recovery",
    "board",
    "top",
)
EXPLANATION = (
    "Medians, with the 99th percentile in parentheses. All contenders take turns, "
    "round by round; a ratio is the median over the rounds, so that what slows the "
    "machine down for a while slows both sides. all_reduce is in place on float32; "
    "its time is the mean over the ranks. The main thread of every rank is bound to "
    "one core, in turn: otherwise the kernel at times puts both of two ranks on the "
    "same one. Of the times to a verdict, an end and a "
    "new start the worst is in parentheses, and is what the budget is for."
)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


CHOICE_HEAD = (
    "| all_reduce | torch's gloo | tcp | UCX | MPI | gloo |",
    "|---|---|---|---|---|---|",
)


def _side_by_side(rows: Sequence[Row]) -> str:
    """Return the medians of ordinary arrays, a line for each size and number of ranks.

    Lines that lack a backend are left out.
    """
    known = {row.what: row for row in rows}
    return "\n".join([*CHOICE_HEAD, *_lines(known)])


def _lines(known: dict[str, Row]) -> Iterator[str]:
    for ranks in (2, 4):
        for size in map(size_name, all_reduce.BLOCKS):
            place = f"{size}, {ranks} ranks"
            tcp, ucx, gloo = (
                known.get(f"all_reduce {place}, {over}, against torch.distributed gloo")
                for over in ("over tcp", "over UCX", "over gloo")
            )
            mpi = known.get(f"MPI all_reduce {place}, against bare mpi4py")
            if tcp and ucx and mpi and gloo:
                times = (tcp.reference, tcp.ours, ucx.ours, mpi.ours, gloo.ours)
                medians = (time.partition(" (")[0] for time in times)
                yield f"| {place} | {' | '.join(medians)} |"


def _publish(text: str, page: Path) -> None:
    content = put(page.read_text(encoding="utf-8"), "make bench", text)
    page.write_text(content, encoding="utf-8")
    _say(f"Written into {page.name}.")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, rougher")
    parser.add_argument("--only", choices=PARTS, action="append", metavar="PART")
    parser.add_argument(
        "--publish",
        action="store_true",
        help=f"put the table into docs/{PAGE.name}, and one into {CHOICE_PAGE.name}",
    )
    options = parser.parse_args()
    quick: bool = options.quick
    if options.publish and options.only:
        parser.error("--publish wants the whole table")

    versions: dict[str, str] = {}
    notes: list[str] = []

    def note(text: str) -> None:
        _say(f"  left out: {text}")
        # A command that installs from this checkout is the same on every machine.
        notes.append(f"Left out: {text}.".replace(str(ROOT), "."))

    def here(*names: str) -> dict[str, str]:
        return dict.fromkeys(names, sys.executable)

    def of_torch(*names: str) -> dict[str, str]:
        python = torch_python(_say, note)
        if python is None:
            return {}
        versions["torch"] = TORCH
        return dict.fromkeys(names, python)

    def training_contenders() -> dict[str, str]:
        folder = library.folder()
        if folder is not None:
            # The environment of torch has none.
            os.environ[library.VARIABLE] = str(folder)
        names = ("training-gloo", "training-tcp", "training-ucx")
        return of_torch(*names[: 2 if folder is None else 3])

    has_ucx = unavailable_reason("ucx") is None
    has_mpi = importlib.util.find_spec("mpi4py") is not None
    measured: dict[str, Any] = {
        "rounds": 3 if quick else 9,
        "say": _say,
        "left_out": note,
    }
    parts: dict[str, Callable[[], Iterable[Row]]] = {
        "all_reduce": lambda: all_reduce.measure(
            {
                **here("rankscope"),
                **here(*["rankscope-gloo"] * is_gloo_available()),
                **here(*["rankscope-ucx"] * has_ucx),
                **here(*["bare-mpi"] * (has_ucx and has_mpi)),
                **of_torch("torch"),
            },
            **measured,
        ),
        "coalescing": lambda: coalescing.measure(
            {**here("coalescing"), **of_torch("torch-coalescing")}, **measured
        ),
        "training": lambda: training.measure(training_contenders(), **measured),
        "mpi": lambda: mpi.measure(**measured),
        "nccl": lambda: nccl.measure(versions, **measured),
        "cell": lambda: notebook.empty_cell(rounds=3 if quick else 9),
        "start": lambda: notebook.start_up(rounds=2 if quick else 5),
        "dispatch": lambda: dispatch.measure(rounds=5 if quick else 15),
        "publishing": lambda: publishing.measure(rounds=11 if quick else 41),
        "recovery": lambda: recovery.measure(trials=5 if quick else 20, say=_say),
        "board": lambda: board.measure(seconds=3 if quick else 15, left_out=note),
        "top": lambda: top.measure(seconds=5 if quick else 15, left_out=note),
    }
    load = os.getloadavg()[0]
    rows: list[Row] = []
    start = time.perf_counter()
    failed: list[str] = []
    for name in PARTS:
        if not options.only or name in options.only:
            _say(f"{name} ...")
            try:
                rows += parts[name]()
            except Exception:  # noqa: BLE001 - what was measured is shown
                traceback.print_exc()
                failed.append(name)
    _say(f"took {time.perf_counter() - start:.0f} s")
    rounds = "With --quick: few rounds." if quick else ""
    head = f"{machine(versions, load)} {rounds}".rstrip()
    paragraphs = [head, EXPLANATION, markdown(rows), *notes]
    text = "\n\n".join(paragraphs)
    print(text)
    over = sum(row.passed is False for row in rows)
    judged = sum(row.passed is not None for row in rows)
    print(f"\n{judged - over} of {judged} within their budget.")
    if failed:
        sys.exit(f"Not measured, see above: {', '.join(failed)}")
    if options.publish:
        _publish(text, PAGE)
        when = time.strftime("%Y-%m-%d")
        _publish(f"Measured on {when}: {head}\n\n{_side_by_side(rows)}", CHOICE_PAGE)


if __name__ == "__main__":
    main()
