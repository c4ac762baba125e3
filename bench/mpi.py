"""The MPI backend against bare mpi4py, on the same Open MPI."""

from __future__ import annotations

import os
from collections.abc import Callable

from . import dispatch
from .all_reduce import BLOCKS
from .ranks import ContenderFailed, MPIRanks
from .table import Row, Sample, size_name

__all__ = ["measure"]

#: From the size on, the budget of the ratio; below all of them it is a difference in
#: seconds, the budget of dispatch and 10 µs. For ranks that have a core each.
RATIO_BUDGETS = {64 << 10: 2.2, 1 << 20: 1.2}
EXTRA_BUDGET = dispatch.BUDGET + 10e-6
#: The micro-benchmarks of OSU that are measured, and at which sizes in bytes.
OSU = {"latency": (4, 64 << 10), "bandwidth": (64 << 10, 4 << 20)}
OSU_BLOCKS = {4: 1500, 64 << 10: 100, 4 << 20: 5}
CONTENDERS = ("mpi", "bare-mpi")


def measure(
    rounds: int, say: Callable[[str], None], left_out: Callable[[str], None]
) -> list[Row]:
    """Measure all_reduce on 2 and 4 ranks, and OSU's latency and bandwidth.

    `rounds` is the number of turns of both contenders. `say` is called with the
    progress, `left_out` with the reason why ranks cannot be started.
    """
    rows: list[Row] = []
    for size in (2, 4):
        contenders: list[MPIRanks] = []
        try:
            for name in CONTENDERS:
                contenders.append(MPIRanks(name, size))
            for nbytes, iterations in BLOCKS.items():
                say(f"  MPI all_reduce, {size} ranks, {size_name(nbytes)}")
                ours, bare = _samples(contenders, "", nbytes, iterations, rounds)
                what = f"MPI all_reduce {size_name(nbytes)}, {size} ranks"
                has_budget = size <= len(os.sched_getaffinity(0))
                what = f"{what}, against bare mpi4py"
                rows.append(_row(what, ours, bare, nbytes, has_budget))
            if size == 2:
                rows += _osu(contenders, rounds, say)
        except ContenderFailed as error:
            left_out(f"MPI, {size} ranks: {error}")
        finally:
            for ranks in contenders:
                ranks.close()
    return rows


def _osu(
    contenders: list[MPIRanks], rounds: int, say: Callable[[str], None]
) -> list[Row]:
    rows = []
    for variant, sizes in OSU.items():
        for nbytes in sizes:
            say(f"  MPI {variant}, {size_name(nbytes)}")
            iterations = OSU_BLOCKS[nbytes]
            ours, bare = _samples(contenders, variant, nbytes, iterations, rounds)
            kind = "there and back" if variant == "latency" else "16 messages"
            what = f"MPI send and recv {size_name(nbytes)}, {kind}, against bare mpi4py"
            rows.append(Row.compare(what, ours, bare, None))
    return rows


def _samples(
    contenders: list[MPIRanks],
    variant: str,
    nbytes: int,
    iterations: int,
    rounds: int,
) -> tuple[Sample, Sample]:
    samples = Sample([]), Sample([])
    pairs = list(zip(contenders, samples, strict=True))
    for ranks, _ in pairs:
        ranks.prepare(nbytes, variant)
        ranks.times(min(iterations, 20), variant)
    for number in range(rounds):
        for ranks, sample in pairs if number % 2 else reversed(pairs):
            sample.rounds.append(ranks.times(iterations, variant))
    return samples


def _row(what: str, ours: Sample, bare: Sample, nbytes: int, has_budget: bool) -> Row:
    budgets = [limit for start, limit in RATIO_BUDGETS.items() if nbytes >= start]
    if budgets:
        return Row.compare(what, ours, bare, budgets[-1] if has_budget else None)
    return Row.compare_extra(what, ours, bare, EXTRA_BUDGET if has_budget else None)
