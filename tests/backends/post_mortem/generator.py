"""Random faults in random training jobs, with what is right to say of each.

    python -m tests.backends.post_mortem.generator --seeds 1000
    python -m tests.backends.post_mortem.generator --seeds 1000 --as log

A case is made from a seed: a job, a fault in it, its run until nothing moves, and
the files that it leaves. `main` diagnoses cases and prints a table by fault.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope.__main__ import main as command_line
from tests.backends.post_mortem.dump_files import Form, dump_files
from tests.backends.post_mortem.faults import (
    CUT_OFF,
    FAULTS,
    MORE_FAULTS,
    DrawAgainError,
    Drawn,
)
from tests.backends.post_mortem.other_evidence import ras_report, torchrun_log
from tests.backends.post_mortem.training_job import Layout
from tests.backends.post_mortem.truth import RESULTS, Truth, judge

#: The first seed of the cases with more faults and jobs.
MORE = 100_000

__all__ = ["Case", "diagnose", "main", "make_case", "make_other", "write"]


@dataclass(frozen=True)
class Case:
    seed: int
    fault: str
    form: Form
    layout: Layout
    files: Mapping[str, bytes]
    truth: Truth


def make_case(seed: int, fault: str = "") -> Case:
    """Return the case of a seed, of a given fault (see `FAULTS`) if one is named."""
    more = seed >= MORE
    faults = [*FAULTS, *MORE_FAULTS] if more else [*FAULTS]
    for attempt in range(200):
        name = fault or random.Random(f"{seed} {attempt // 20}").choice(faults)
        try:
            drawn = Drawn(f"{seed} {attempt} {name}", name, more)
        except DrawAgainError:
            continue
        files = dump_files(drawn.run, drawn.form, drawn.absent)
        for rank, data in drawn.instead.items():
            if data == CUT_OFF:
                (whole,) = dump_files(
                    drawn.run, drawn.form, {*drawn.world} - {rank}
                ).values()
                data = whole[: len(whole) // 2]
            if data:
                files[drawn.form.file_name(rank)] = data
        if seed % 4 == 0:
            files["README.txt"] = b"dumps\n"
        return Case(seed, name, drawn.form, drawn.job.layout, files, drawn.truth)
    raise RuntimeError(f"seed {seed}: no {fault or 'fault'} can be seen in any draw")


#: Faults of which a log or a report of RAS may tell something.
_OTHERS = (
    *("stop", "killed", "left", "two stop", "stage late", "gpu", "cycle", "skip"),
    *("op mismatch", "size mismatch", "order in a group", "order of groups"),
)


def make_other(kind: str, seed: int, fault: str = "") -> Case:
    """Return a case of which there is a log of torchrun, or a report of RAS, alone."""
    name = fault or random.Random(f"{kind} {seed}").choice(_OTHERS)
    for attempt in range(200):
        try:
            drawn = Drawn(f"{kind} {seed} {attempt}", name)
        except DrawAgainError:
            continue
        if drawn.form.kind == "gloo":
            continue
        dead = drawn.absent - drawn.instead.keys() if name == "killed" else set()
        data = ras_report(drawn.run, dead)
        if kind == "log":
            data = torchrun_log(drawn.run, seed, dead)
        layout = drawn.job.layout
        return Case(seed, name, drawn.form, layout, {f"job.{kind}": data}, drawn.truth)
    raise RuntimeError(f"seed {seed}: no {name} can be seen in any draw")


def write(case: Case, folder: Path) -> Path:
    """Write the files of a case into `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in case.files.items():
        (folder / name).write_bytes(data)
    return folder


def diagnose(path: Path) -> dict[str, Any]:
    """Return what ``rankscope diagnose PATH --json`` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        command_line(["diagnose", str(path), "--json"])
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def main() -> None:
    """Print a table by fault of what the diagnosis says of many cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--fault", default="", help=", ".join(FAULTS))
    forms = ("dumps", "log", "ras")
    parser.add_argument("--as", dest="form", choices=forms, default="dumps")
    parser.add_argument("--show", action="store_true", help="print what is not right")
    parser.add_argument("--keep", type=Path, help="write the cases into this folder")
    given = parser.parse_args()
    table: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(given.first, given.first + given.seeds):
            if given.form == "dumps":
                case = make_case(seed, given.fault)
            else:
                case = make_other(given.form, seed, given.fault)
            folder = write(case, (given.keep or Path(scratch)) / str(seed))
            verdicts = diagnose(folder)["verdicts"]
            result = judge(case.truth, verdicts)
            table.setdefault(case.fault, Counter())[result] += 1
            if given.show and result in ("wrong", "not known"):
                print(seed, case.fault, result, case.form.kind, case.layout)
                print("   ", case.truth)
                for one in verdicts:
                    print("   ", one["kind"], one["culprits"], one["text"])
    total = sum(table.values(), Counter[str]())
    print(f"{'':<18}{'cases':>7}" + "".join(f"{name:>11}" for name in RESULTS))
    for fault in (*(name for name in FAULTS | MORE_FAULTS if name in table), "all"):
        row = table.get(fault, total)
        print(
            f"{fault:<18}{row.total():>7}"
            + "".join(f"{row[name]:>11}" for name in RESULTS)
        )


if __name__ == "__main__":
    main()
