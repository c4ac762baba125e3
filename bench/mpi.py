"""The MPI backend against bare mpi4py, on the same Open MPI."""

from __future__ import annotations

from collections.abc import Callable

from .all_reduce import BLOCKS
from .ranks import ContenderFailed, MPIRanks
from .table import Row, Sample, duration, size_name

__all__ = ["measure"]

#: From this size on a ratio is the budget, and below it a difference in seconds.
LARGE = 64 << 10
RATIO_BUDGET = 1.3
EXTRA_BUDGET = 15e-6
#: The micro-benchmarks of OSU that are measured, and at which sizes in bytes.
OSU = {"latency": (4, 64 << 10), "bandwidth": (64 << 10, 4 << 20)}
OSU_BLOCKS = {4: 500, 64 << 10: 100, 4 << 20: 5}
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
                rows.append(_row(f"{what}, against bare mpi4py", ours, bare, nbytes))
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


def _row(what: str, ours: Sample, bare: Sample, nbytes: int) -> Row:
    if nbytes >= LARGE:
        return Row.compare(what, ours, bare, RATIO_BUDGET)
    row = Row.compare(what, ours, bare, None)
    extra = ours.median - bare.median
    row.budget = f"≤ +{duration(EXTRA_BUDGET)}"
    row.ratio = f"+{duration(max(extra, 0.0))}"
    row.passed = extra <= EXTRA_BUDGET
    return row
