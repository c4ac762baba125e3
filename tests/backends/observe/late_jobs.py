"""Real runs, healthy ones and with injected sleeps: who is said to be late in them?

By hand, since what a loaded machine does is no test::

    python -m tests.backends.observe.late_jobs --runs 50
    python -m tests.backends.observe.late_jobs --runs 20 --torch .venv-torch/bin/python

Each run is judged as a board does, look by look as it goes on, and by its last line;
what is printed of it is who was named, and whether that is right, wrong or nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope.backends.observe.late_findings import LateFinding
from rankscope.backends.observe.lateness import Lateness

PROGRAM = Path(__file__).with_name("late_program.py")

HEALTHY = (
    *("only_all_reduce", "compute_and_reduce", "data_loader", "buckets", "barriers"),
    *("several_groups", "pipeline", "checkpoints", "warm_up", "evaluation", "gathers"),
    *("microbatches", "experts", "coalesced", "halves"),
)
INJECTED = (
    *("compute_and_reduce", "data_loader", "callback", "buckets", "barriers"),
    *("only_all_reduce", "several_groups", "gathers", "coalesced", "halves"),
)

#: Ops that a rank enters between two looks, and those that a look sees.
EVERY, SEEN = 5, 200


@dataclass(frozen=True)
class Job:
    """A run: what each rank does, and who is to be named."""

    loop: str
    steps: int
    seed: int
    #: As late_program.py takes it: ``one:2:10``.
    sleeps: str = ""
    ranks: int = 4

    @property
    def late(self) -> frozenset[int]:
        """The ranks that are late, by turns or together."""
        if self.loop in ("evaluation", "checkpoints"):
            # The others do wait for it. Each second step, with some noise, or at a line
            # of its own, that is nearly each time.
            return frozenset({0})
        how, who, _ = (self.sleeps or "::").split(":")
        if how == "turns":
            return frozenset(range(self.ranks))
        return frozenset(int(one) for one in who.split(",") if one)

    def run(
        self, python: str | None = None, backend: str = "gloo"
    ) -> tuple[dict[int, Any], str]:
        """Return the records of each rank, and what the job says at its end."""
        start = [sys.executable, "-m", "rankscope.run", "-n", str(self.ranks)]
        if python is not None:
            start = [python, "-m", "torch.distributed.run", "--standalone"]
            start += ["--nproc-per-node", str(self.ranks), "-m", "rankscope.torch"]
        with tempfile.TemporaryDirectory() as folder:
            arguments = [self.loop, str(self.steps), str(self.seed), self.sleeps]
            done = subprocess.run(
                [*start, str(PROGRAM), *arguments, folder],
                env={**os.environ, "LATE_TORCH": backend if python else ""},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=180,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"{self} failed:\n{done.stdout}{done.stderr}")
            dumps = {
                rank: json.loads(Path(folder, f"{rank}.json").read_text("utf-8"))
                for rank in range(self.ranks)
            }
        said = (done.stdout + done.stderr).partition("rankscope: late ")[2]
        return dumps, f"late {said.splitlines()[0]}" if said else ""


def looks(dumps: Mapping[int, Any]) -> Iterator[tuple[int, list[LateFinding]]]:
    """Yield what a board finds that looks again and again, with the ops until then."""
    lateness = Lateness()
    most = max(len(one["records"]) for one in dumps.values())
    for until in range(EVERY, most + EVERY, EVERY):
        lateness.take(
            {
                rank: {**one, "records": one["records"][max(0, until - SEEN) : until]}
                for rank, one in dumps.items()
            }
        )
        yield until, lateness.findings()


def judge(job: Job, dumps: Mapping[int, Any], said: str) -> str:
    """Return ``right``, ``wrong`` or ``nothing``, and what was named when."""
    joint = {
        f"{PROGRAM.name}:{number}"
        for number, line in enumerate(PROGRAM.read_text("utf-8").splitlines(), 1)
        if line.endswith("# joint")
    }
    found = [(until, one) for until, some in looks(dumps) for one in some]
    ended = Lateness(ended=True)
    ended.take(dumps)
    found += [(0, one) for one in ended.findings()]
    turns = job.sleeps.startswith("turns")
    wrong = [
        (until, one)
        for until, one in found
        # Of two, the noise may hide one for a while.
        if not {*one.ranks} <= job.late
        or (turns and {*one.ranks} != job.late)
        or one.line.partition(" in ")[0] not in joint
    ]
    if wrong:
        until, one = wrong[0]
        return f"wrong: at op {until or 'last'} ({len(wrong)} times): {one}"
    if not found:
        return f"nothing{': ' * bool(said)}{said}"
    until, one = found[0]
    return f"right: at op {until or 'last'}: {one}; at the end {said or 'nothing'}"


def healthy(runs: int, ranks: int) -> Iterator[Job]:
    """Yield runs in which nobody is late, but for rank 0 that does more."""
    for seed in range(runs):
        rng = random.Random(seed)
        loop, steps = HEALTHY[seed % len(HEALTHY)], rng.choice((60, 100, 121, 203))
        yield Job(loop, steps, seed, ranks=ranks)


def injected(runs: int, ranks: int) -> Iterator[Job]:
    """Yield runs with sleeps of 2, 10 and 50 ms on a rank, on two, in turns."""
    for seed in range(runs):
        rng = random.Random(seed)
        loop, ms = INJECTED[seed % len(INJECTED)], (50, 10, 2)[seed % 3]
        how, count = rng.choice((("one", 1), ("two", 2), ("turns", 0)))
        if loop == "several_groups":
            # In its other groups the rank that waits for a late one is not late.
            how, count = "one", 1
        who = ",".join(map(str, sorted(rng.sample(range(ranks), count))))
        yield Job(loop, 65, seed, f"{how}:{who}:{ms}", ranks)


def main() -> None:
    """Run jobs one after the other; count what is said of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=22, help="of each kind")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--torch", metavar="PYTHON", help="run torch's gloo with this")
    parser.add_argument("--keep", type=Path, help="keep the records of these here")
    arguments = parser.parse_args()
    for kind, jobs in (("healthy", healthy), ("injected", injected)):
        count = Counter[str]()
        for job in jobs(arguments.runs, arguments.ranks):
            dumps, said = job.run(arguments.torch)
            verdict = judge(job, dumps, said)
            count[verdict.partition(":")[0]] += 1
            print(f"{job.loop} {job.steps} {job.sleeps or '-'}: {verdict}", flush=True)
            if arguments.keep:
                name = f"{kind}_{job.seed}_{job.loop}.json"
                (arguments.keep / name).write_text(json.dumps(dumps), encoding="utf-8")
        print(f"{kind}: {dict(count)}", flush=True)


if __name__ == "__main__":
    main()
