"""DDP over the backend ``rankscope``, against torch's gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from .ranks import in_turns, started
from .table import Row, Sample, duration, size_name

__all__ = ["measure"]

MIB = 1 << 20
#: What is measured: variant, bytes and ops in one block of one round; then, by the
#: number of ranks, the budget of the ratio.
CASES: tuple[tuple[str, int, int, dict[int, float]], ...] = (
    ("", 4, 1000, {2: 0.4}),
    ("", MIB, 50, {}),
    ("", 25 * MIB, 6, {2: 0.55}),
    ("communication", 4 * MIB, 20, {2: 0.6}),
    ("communication", 100 * MIB, 2, {2: 0.6}),
    ("step", 4 * MIB, 20, {2: 0.85, 4: 0.9}),
    ("step", 100 * MIB, 2, {2: 0.9, 4: 0.9}),
)
WHAT = {
    "": "torch's all_reduce",
    "communication": "all_reduces of DDP's buckets,",
    "step": "DDP step, parameters of",
}
NAMES = {"training-tcp": "over tcp", "training-ucx": "over UCX"}
#: Seconds of an op in a group of one rank: nothing is sent.
SHARE_BUDGET = 20e-6


def measure(
    pythons: Mapping[str, str],
    rounds: int,
    say: Callable[[str], None],
    left_out: Callable[[str], None],
) -> list[Row]:
    """Compare at 2 and 4 ranks; `pythons` has each contender's Python."""
    rows: list[Row] = []
    for size in (1, 2, 4) if pythons else ():
        with started(pythons, size, left_out) as contenders:
            for variant, nbytes, iterations, budgets in CASES:
                if size == 1 and nbytes > 4:
                    break
                ranks = f"{size} rank{'s' * (size > 1)}"
                what = f"{WHAT[variant]} {size_name(nbytes)}, {ranks}"
                say(f"  {what}")
                samples = in_turns(
                    contenders, nbytes, iterations, rounds, left_out, variant
                )
                rows += _rows(what, samples, budgets.get(size), size)
    return rows


def _rows(
    what: str, samples: dict[str, Sample], budget: float | None, size: int
) -> Iterator[Row]:
    reference = samples.pop("training-gloo", None)
    for name, ours in samples.items():
        if reference is not None:
            of = f"{what}, {NAMES[name]}, against torch.distributed gloo"
            row = Row.compare(of, ours, reference, budget)
            if size == 1:
                row.budget = f"≤ {duration(SHARE_BUDGET)}"
                row.passed = ours.median <= SHARE_BUDGET
            yield row
