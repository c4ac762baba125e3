"""Random programs with one fault each on the ranks of a cluster, and whom to blame.

    python -m tests.engines.cluster.random_programs --seeds 100

A program is made from a seed: collectives over six groups that overlap, sends and
receives, and one fault of one rank. `run` runs it in a cell, asks for the diagnosis
as soon as there is one, and makes the groups usable again; `judge` compares the
culprits with the fault. `run_script` runs it as a plain script instead, whose ops
time out, and takes what its ranks said. `main` prints what was told wrong, and a table
by fault.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rankscope.engines import Cluster, ClusterError
from tests.backends.hang_report.script import Script

__all__ = [
    "FAULTS",
    "SETUP",
    "Outcome",
    "Program",
    "judge",
    "make_program",
    "run",
    "run_script",
]

RANKS = 4
GROUPS: Mapping[str, tuple[int, ...]] = {
    "world": (0, 1, 2, 3),
    "row0": (0, 1),
    "row1": (2, 3),
    "column0": (0, 2),
    "column1": (1, 3),
    "three": (0, 1, 2),
}
_MADE = "\n".join(
    f"groups[{name!r}] = dist.new_group({list(ranks)}, group_desc={name!r})"
    for name, ranks in GROUPS.items()
    if name != "world"
)
#: Makes the groups on each rank, and what the statements of the programs name.
SETUP = f"""import os, signal, time, numpy as np, rankscope as dist
groups = {{'world': None}}
{_MADE}
def array(elements, dtype): return np.ones(elements, dtype)
def many(n, *of): return [array(*of) for _ in range(n)]"""
#: The same for torch's ops.
TORCH_SETUP = SETUP.replace(
    "numpy as np, rankscope", "torch, torch.distributed"
).replace(
    "np.ones(elements, dtype)", "torch.ones(elements, dtype=getattr(torch, dtype))"
)
#: The same in a script, whose ops time out after three seconds, not its start.
_MEET = f"""dist.init_process_group(timeout=30)
{SETUP}
for one in [dist.group.WORLD, *groups.values()]:
    if isinstance(one, dist.ProcessGroup):
        one.set_timeout(3)
dist.barrier()"""
_COLLECTIVES = (
    *("all_reduce", "all_reduce", "broadcast", "reduce", "barrier", "all_gather"),
    *("all_gather_into_tensor", "reduce_scatter", "gather", "scatter", "all_to_all"),
    *("all_gather_object", "ring"),
)
_ROOTED = {"broadcast": "src", "reduce": "dst", "gather": "dst", "scatter": "src"}
_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
#: Ops whose parts may differ between ranks.
_SIZELESS = ("barrier", "all_gather_object", "all_to_all")
#: A program may hang as long as this without a diagnosis.
PATIENCE = 15.0
#: A statement that lasts until somebody ends it.
_ASLEEP = "time.sleep(300)"


@dataclass(frozen=True)
class Op:
    """A collective of a group or a send with its receive (`group` is then empty)."""

    kind: str
    ranks: tuple[int, ...]
    group: str = ""
    root: int = 0
    elements: int = 4
    dtype: str = "float32"
    reduce_op: str = "SUM"
    tag: int = 0

    def statement(self, rank: int) -> str:
        """The op as `rank`, one of its ranks, issues it."""
        one = f"array({self.elements}, {self.dtype!r})"
        if self.kind == "p2p":
            source, target = self.ranks
            if rank == source:
                return f"dist.send({one}, dst={target}, tag={self.tag})"
            return f"dist.recv({one}, src={source}, tag={self.tag})"
        members, group = len(self.ranks), f"group=groups[{self.group!r}]"
        parts = f"many({members}, {self.elements}, {self.dtype!r})"
        if self.kind == "ring":
            place = self.ranks.index(rank)
            after, before = (self.ranks[(place + step) % members] for step in (1, -1))
            return (
                f"[work.wait() for work in dist.batch_isend_irecv(["
                f"dist.P2POp(dist.isend, {one}, {after}, {group}), "
                f"dist.P2POp(dist.irecv, {one}, {before}, {group})])]"
            )
        arguments = {
            "barrier": "",
            "all_gather": f"{parts}, {one}, ",
            "all_gather_into_tensor": (
                f"array({members * self.elements}, {self.dtype!r}), {one}, "
            ),
            "reduce_scatter": f"{one}, {parts}, ",
            "gather": f"{one}, {parts if rank == self.root else None}, ",
            "scatter": f"{one}, {parts if rank == self.root else None}, ",
            "all_to_all": f"{parts}, {parts}, ",
            "all_gather_object": f"[None] * {members}, {self.elements}, ",
        }.get(self.kind, f"{one}, ")
        if self.kind in _ROOTED:
            arguments += f"{_ROOTED[self.kind]}={self.root}, "
        if self.kind in _REDUCING:
            arguments += f"op=dist.ReduceOp.{self.reduce_op}, "
        return f"dist.{self.kind}({arguments}{group})"


@dataclass
class Program:
    """What each rank does, with one fault, and the ranks that are right to name."""

    seed: int
    fault: str
    #: The rank that has the fault, and the op that it has it in.
    rank: int
    op: Op
    statements: dict[int, list[str]]
    #: The culprits of a right diagnosis: one of these sets, or, of an order that
    #: differs, any set with `rank` in it.
    right: tuple[frozenset[int], ...] = ()

    def __str__(self) -> str:
        lines = ["works = []"]
        for rank, statements in self.statements.items():
            body = "\n".join([*statements, "pass"])
            lines += [f"if rank == {rank}:", textwrap.indent(body, "    ")]
        return "\n".join(lines)


class _NotPossibleError(Exception):
    """The fault has no place in this op."""


class _Draw:
    """The random choices of a seed: ops, and the statements of each rank."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ops = [self._op() for _ in range(self.random.randint(3, 9))]
        self.at = self.random.randrange(len(self.ops))
        self.op = self.ops[self.at]
        self.rank = self.random.choice(self.op.ranks)
        self.statements: dict[int, list[str]] = {rank: [] for rank in range(RANKS)}
        #: Where the statements of `op` begin on `rank`.
        self.place = 0
        for number, op in enumerate(self.ops):
            for rank in op.ranks:
                if number == self.at and rank == self.rank:
                    self.place = len(self.statements[rank])
                self.statements[rank].append(op.statement(rank))
        self.mine = self.statements[self.rank]

    def _op(self) -> Op:
        elements = self.random.choice((4, 100, 70_000))
        if self.random.random() < 0.25:
            source, target = self.random.sample(range(RANKS), 2)
            tag = self.random.choice((0, 0, 7))
            return Op("p2p", (source, target), elements=elements, tag=tag)
        group = self.random.choice([*GROUPS])
        root = self.random.choice(GROUPS[group])
        kind = self.random.choice(_COLLECTIVES)
        return Op(kind, GROUPS[group], group, root, elements)

    def instead(self, statement: str) -> None:
        self.mine[self.place] = statement

    def otherwise(self, op: Op) -> None:
        """Let the rank issue `op` in place of its own."""
        self.instead(op.statement(self.rank))

    def spread(self) -> None:
        """Issue some ops without waiting at once, or at other times."""
        manner = self.random.choice(("", "", "async", "skew"))
        for rank, statements in self.statements.items():
            drawn: list[str] = []
            for one in statements:
                chance = self.random.random()
                if manner == "skew" and chance < 0.5:
                    drawn.append(f"time.sleep({chance / 2.5:.3f})")
                if manner == "async" and chance < 0.5 and one.startswith("dist."):
                    one = one.replace("dist.send", "dist.isend")
                    one = one.replace("dist.recv", "dist.irecv")
                    ending = ")" if "dist.i" in one else ", async_op=True)"
                    if "_object" not in one:
                        one = f"works.append({one[:-1]}{ending})"
                drawn.append(one)
                if manner == "async" and chance < 0.3:
                    drawn.append("[work.wait() for work in works]; works.clear()")
            if manner == "async":
                drawn.append("[work.wait() for work in works]")
            self.statements[rank] = drawn


def _sleeps(draw: _Draw) -> None:
    draw.mine.insert(draw.place, _ASLEEP)


def _computes(draw: _Draw) -> None:
    draw.mine.insert(draw.place, "while True: pass")


def _raises(draw: _Draw) -> None:
    draw.instead("raise KeyError('lr')")


def _handles_an_exception(draw: _Draw) -> None:
    handled = f"try: raise ValueError('bad')\nexcept ValueError: {_ASLEEP}"
    draw.instead(handled)


def _leaves(draw: _Draw) -> None:
    del draw.mine[draw.place :]


def _dies(draw: _Draw) -> None:
    draw.instead("os.kill(os.getpid(), signal.SIGKILL)")


def _size(draw: _Draw) -> None:
    if draw.op.kind in _SIZELESS:
        raise _NotPossibleError
    draw.otherwise(replace(draw.op, elements=draw.op.elements + 3))


def _dtype(draw: _Draw) -> None:
    if draw.op.kind in _SIZELESS and draw.op.kind != "all_to_all":
        raise _NotPossibleError
    draw.otherwise(replace(draw.op, dtype="float64"))


def _kind(draw: _Draw) -> None:
    if draw.op.kind in ("p2p", "ring"):
        raise _NotPossibleError
    others = ("all_reduce", "broadcast", "barrier", "all_gather", "gather", "scatter")
    kind = draw.random.choice([one for one in others if one != draw.op.kind])
    draw.otherwise(replace(draw.op, kind=kind))


def _root(draw: _Draw) -> None:
    if draw.op.kind not in _ROOTED:
        raise _NotPossibleError
    others = [rank for rank in draw.op.ranks if rank != draw.op.root]
    draw.otherwise(replace(draw.op, root=draw.random.choice(others)))


def _reduce_op(draw: _Draw) -> None:
    if draw.op.kind not in _REDUCING:
        raise _NotPossibleError
    draw.otherwise(replace(draw.op, reduce_op="MAX"))


def _tag(draw: _Draw) -> None:
    if draw.op.kind != "p2p":
        raise _NotPossibleError
    draw.otherwise(replace(draw.op, tag=5))


def _order(draw: _Draw) -> None:
    after = draw.place + 1
    if after == len(draw.mine) or draw.mine[after] == draw.mine[draw.place]:
        raise _NotPossibleError
    mine = draw.mine
    mine[draw.place], mine[after] = mine[after], mine[draw.place]


_ABSENT: dict[str, Callable[[_Draw], None]] = {
    "sleeps": _sleeps,
    "computes": _computes,
    "raises": _raises,
    "handles an exception": _handles_an_exception,
    "leaves": _leaves,
    "dies": _dies,
}
_MISMATCHES: dict[str, Callable[[_Draw], None]] = {
    "size": _size,
    "dtype": _dtype,
    "op": _kind,
    "root": _root,
    "reduce op": _reduce_op,
    "tag": _tag,
}
#: What a rank does wrong in an op, by name.
FAULTS: Mapping[str, Callable[[_Draw], None]] = {
    **_ABSENT,
    **_MISMATCHES,
    "order": _order,
}


def make_program(seed: int, only: str = "") -> Program:
    """Return the program of a seed, with the fault that is named if one is."""
    for attempt in range(200):
        draw = _Draw(seed * 1000 + attempt)
        fault = only or draw.random.choice([*FAULTS])
        try:
            FAULTS[fault](draw)
        except _NotPossibleError:
            continue
        draw.spread()
        right = [frozenset({draw.rank})]
        if fault in _MISMATCHES and len(draw.op.ranks) == 2:
            # Nothing tells which of two is wrong.
            right.append(frozenset(draw.op.ranks))
        if draw.op.kind == "ring":
            # It sends to the one, and receives from the other.
            right += [frozenset((draw.rank, one)) for one in draw.op.ranks]
        if fault == "order":
            right = []
        return Program(seed, fault, draw.rank, draw.op, draw.statements, tuple(right))
    raise RuntimeError(f"seed {seed}: no fault has a place in its ops")


@dataclass
class Outcome:
    """What became of a program: its diagnosis, or how it ended without one."""

    #: The text of each verdict, with its culprits.
    verdicts: dict[str, frozenset[int]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    ended: bool = False
    #: The ranks that waited in an op when the patience ended.
    waiting: list[int] = field(default_factory=list)


def judge(program: Program, outcome: Outcome) -> str:
    """Say of a diagnosis: right, more (the rank and others), wrong, none or ended.

    A script has no verdict where the errors of its ranks have the cause already.
    """
    culprits = {rank for one in outcome.verdicts.values() for rank in one}
    said = "".join(outcome.verdicts)
    if not outcome.verdicts:
        named = [f"rank {one}" for one in {program.rank}.union(*program.right)]
        if all(
            any(one in error for one in named)
            for rank, error in outcome.errors.items()
            if rank != program.rank
        ):
            return "none" if outcome.waiting else "ended"
        return "none"
    if program.fault == "order":
        return "right" if program.rank in culprits else "wrong"
    if culprits in program.right:
        return "right"
    if culprits == {0} and "rank 0 has left the program" in said:
        # A script's store is gone with it: nobody came to the fault.
        return "ended"
    return "more" if program.rank in culprits else "wrong"


def run(cluster: Cluster, program: Program, setup: str = SETUP) -> Outcome:
    """Run a program on the ranks of a cluster that executed `setup`."""
    execution = cluster.execute(str(program))
    outcome, deadline = Outcome(), time.monotonic() + PATIENCE
    while time.monotonic() < deadline and not outcome.verdicts:
        ended = execution.done
        outcome.verdicts = {
            str(one): frozenset(one.culprits) for one in cluster.diagnose(stall=0.5)
        }
        if ended:
            break
        time.sleep(0.1)
    outcome.ended = execution.done
    if not outcome.verdicts and not outcome.ended:
        outcome.waiting = [
            one.rank
            for one in cluster.status().ranks
            if any(group.in_flight for group in one.groups)
        ]
    if not execution.done:
        with contextlib.suppress(ClusterError):
            # A busy host may need more than an abort waits for an answer.
            cluster.abort()
        if not execution.wait(1):
            cluster.interrupt()
            if not execution.wait(20):
                stuck = execution.ranks_running
                raise AssertionError(
                    f"{program.seed} does not end on {stuck}: {cluster.stacks(stuck)}"
                )
    outcome.errors = {rank: str(one) for rank, one in execution.errors.items()}
    if any(not one.alive for one in cluster.status().ranks):
        cluster.restart()
        cluster.execute(setup).result()
    else:
        cluster.rebuild()
        if setup is TORCH_SETUP:
            cluster.execute(setup).result()
    return outcome


def run_script(program: Program) -> Outcome:
    """Run a program as a script of which each op may take three seconds."""
    with tempfile.TemporaryDirectory() as folder:
        script = Script(Path(folder), RANKS, f"{_MEET}\n{program}", after=60)
        try:
            # A rank that sleeps or computes goes on after the ranks that waited.
            waits = program.fault in ("sleeps", "computes", "handles an exception")
            ranks = [
                one
                for rank, one in enumerate(script.ranks)
                if not (waits and rank == program.rank)
            ]
            deadline = time.monotonic() + 40
            for one in ranks:
                one.wait(max(1.0, deadline - time.monotonic()))
            outcome = Outcome(ended=True)
            for path in script.reports.glob("*/verdict.json"):
                for one in json.loads(path.read_text())["verdicts"]:
                    outcome.verdicts[one["text"]] = frozenset(one["culprits"])
            outcome.errors = {
                rank: "\n".join(script.log(rank).splitlines()[-3:])
                for rank, one in enumerate(script.ranks)
                if one.poll()
            }
        finally:
            script.close()
    return outcome


def report(program: Program, outcome: Outcome) -> str:
    """Tell a person what was run and what was said of it."""
    return "\n".join(
        [
            f"--- seed {program.seed}: rank {program.rank} {program.fault}",
            f"    in {program.op}",
            str(program),
            *(f"  {[*ranks]}: {one}" for one, ranks in outcome.verdicts.items()),
            *(
                f"  error of rank {rank}: {text[:500]}"
                for rank, text in outcome.errors.items()
            ),
            f"  waiting: {outcome.waiting}" if outcome.waiting else "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--seeds", type=int, default=20, metavar="N")
    parser.add_argument("--backend", default="", help="of the groups (the default one)")
    parser.add_argument("--engines", default="", help="mpi: by mpiexec")
    parser.add_argument("--torch", default="", help="the backend of torch's ops")
    parser.add_argument("--fault", default="", choices=["", *FAULTS])
    parser.add_argument("--scripts", action="store_true", help="as scripts, in no cell")
    parser.add_argument("--show", nargs="*", default=["wrong", "none", "more"])
    asked = parser.parse_args()
    if asked.scripts and (asked.backend or asked.engines or asked.torch):
        parser.error("--scripts takes the default backend alone")
    results: Counter[tuple[str, str]] = Counter()
    with contextlib.ExitStack() as stack:
        do = run_script
        if not asked.scripts:
            names = ("backend", "engines", "torch")
            options = {one: given for one in names if (given := getattr(asked, one))}
            cluster = stack.enter_context(Cluster.start(RANKS, **options))
            setup = TORCH_SETUP if asked.torch else SETUP
            cluster.execute(setup).result()
            do = functools.partial(run, cluster, setup=setup)
        for seed in range(asked.first, asked.first + asked.seeds):
            program = make_program(seed, asked.fault)
            outcome = do(program)
            result = judge(program, outcome)
            results[program.fault, result] += 1
            if result in asked.show:
                print(report(program, outcome), flush=True)
    for (fault, result), count in sorted(results.items()):
        print(f"{fault:22} {result:6} {count}")


if __name__ == "__main__":
    main()
