"""all_reduce: Rankscope's backends, torch's gloo and bare mpi4py."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .ranks import in_turns, started
from .table import Row, Sample, size_name

__all__ = ["BLOCKS", "from_size", "measure"]

# Bytes → all_reduces in one block of one round. Shorter blocks of small ones measure
# how the machine falls asleep between them.
BLOCKS = {
    4: 1500,
    1 << 10: 1500,
    1 << 16: 200,
    1 << 20: 50,
    1 << 24: 6,
    1 << 26: 3,
}
# (contender, reference), then by the number of ranks: from how many bytes on the ratio
# has which budget.
COMPARISONS: dict[tuple[str, str], dict[int, dict[int, float]]] = {
    ("rankscope", "torch"): {
        2: {4: 0.4, 1 << 20: 0.6},
        4: {4: 0.6, 1 << 10: 0.25, 1 << 24: 0.6},
    },
    ("rankscope-gloo", "torch"): {},
    ("rankscope-ucx", "torch"): {
        2: {4: 0.25, 1 << 20: 0.5},
        4: {4: 0.5, 1 << 10: 0.25, 1 << 20: 0.6},
    },
    ("rankscope-ucx", "bare-mpi"): {2: {1 << 16: 3.5, 1 << 20: 1.8, 1 << 24: 1.2}},
}
#: Against bare mpi4py, below the sizes above: a difference in seconds.
EXTRA_BUDGET = 25e-6
NAMES = {
    "rankscope": "over tcp",
    "rankscope-gloo": "over gloo",
    "rankscope-ucx": "over UCX",
    "torch": "torch.distributed gloo",
    "bare-mpi": "bare mpi4py",
}


def measure(
    pythons: Mapping[str, str],
    rounds: int,
    say: Callable[[str], None],
    left_out: Callable[[str], None],
) -> list[Row]:
    """Compare at 2 and 4 ranks, every size; `pythons` has each contender's Python.

    `left_out` is called with the reason why one is left out, `say` with the progress.
    """
    rows: list[Row] = []
    for size in (2, 4):
        with started(pythons, size, left_out) as contenders:
            for nbytes, iterations in BLOCKS.items():
                say(f"  all_reduce, {size} ranks, {size_name(nbytes)}")
                samples = in_turns(contenders, nbytes, iterations, rounds, left_out)
                rows += _rows(samples, nbytes, size)
    return rows


def _rows(samples: Mapping[str, Sample], nbytes: int, size: int) -> list[Row]:
    rows = []
    for (ours, reference), budgets in COMPARISONS.items():
        if not (ours in samples and reference in samples):
            continue
        what = (
            f"all_reduce {size_name(nbytes)}, {size} ranks, "
            f"{NAMES[ours]}, against {NAMES[reference]}"
        )
        both = samples[ours], samples[reference]
        limits = budgets.get(size, {})
        if reference == "bare-mpi" and nbytes < 1 << 16:
            rows.append(
                Row.compare_extra(what, *both, EXTRA_BUDGET if limits else None)
            )
        else:
            rows.append(Row.compare(what, *both, from_size(limits, nbytes)))
    return rows


def from_size(limits: Mapping[int, float], nbytes: int) -> float | None:
    """Return the budget that counts from the largest size on that is not above."""
    fitting = [limit for start, limit in limits.items() if nbytes >= start]
    return fitting[-1] if fitting else None
