"""all_reduce: Rankscope's gloo, pygloo in-process and torch.distributed's gloo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

from .ranks import ContenderFailed, Ranks
from .table import Row, Sample, size_name

__all__ = ["measure"]

# Bytes → all_reduces in one block of one round.
BLOCKS = {
    4: 300,
    1 << 10: 300,
    1 << 16: 200,
    1 << 20: 50,
    1 << 24: 6,
    1 << 26: 3,
}
ALGORITHMS = ("BCUBE", "RING")

# (contender, reference, budget): DESIGN §7.
COMPARISONS = (
    ("rankscope", "torch", 1.0),
    ("rankscope-copies", "torch", 1.2),
    ("rankscope", "pygloo", 1.15),
)
NAMES = {
    "rankscope": "zero-copy",
    "rankscope-copies": "with copies",
    "pygloo": "pygloo in-process",
    "torch": "torch.distributed gloo",
}


def measure(
    pythons: Mapping[str, str],
    rounds: int,
    say: Callable[[str], None],
    left_out: Callable[[str], None],
) -> list[Row]:
    """Compare at 2 and 4 ranks, every size; `pythons` has each contender's Python.

    Within a round every contender runs one block, in turn, and the order
    rotates from round to round, so that a disturbance affects all contenders.
    A contender that fails is left out at that number of ranks from then on;
    `left_out` is called with the reason, `say` with the progress.
    """
    rows: list[Row] = []
    for size in (2, 4):
        contenders: dict[str, Ranks] = {}
        try:
            for name, python in pythons.items():
                try:
                    contenders[name] = Ranks(name, size, python)
                except ContenderFailed as error:
                    left_out(f"{size} ranks: {error}")
            for nbytes, iterations in BLOCKS.items():
                say(f"  all_reduce, {size} ranks, {size_name(nbytes)}")
                samples = _size(contenders, nbytes, iterations, rounds, left_out)
                rows += _rows(samples, f"all_reduce {size_name(nbytes)}, {size} ranks")
        finally:
            for ranks in contenders.values():
                ranks.close()
    return rows


def _size(
    contenders: dict[str, Ranks],
    nbytes: int,
    iterations: int,
    rounds: int,
    left_out: Callable[[str], None],
) -> dict[str, Sample]:
    variants: dict[str, str] = {}
    samples: dict[str, Sample] = {}

    def attempt(name: str, step: Callable[[Ranks], None]) -> None:
        try:
            step(contenders[name])
        except ContenderFailed as error:
            left_out(
                f"{contenders[name].size} ranks, from {size_name(nbytes)} on: {error}"
            )
            contenders.pop(name).close()
            samples.pop(name, None)

    def prepare(ranks: Ranks) -> None:
        variants[ranks.name] = _better_variant(ranks, nbytes, iterations)
        samples[ranks.name] = Sample([])

    def block(ranks: Ranks) -> None:
        times = ranks.times(iterations, variants[ranks.name])
        samples[ranks.name].rounds.append(times)

    for name in list(contenders):
        attempt(name, prepare)
    for number in range(rounds):
        names = list(contenders)
        turn = number % len(names) if names else 0
        for name in names[turn:] + names[:turn]:
            attempt(name, block)
    return samples


def _better_variant(ranks: Ranks, nbytes: int, iterations: int) -> str:
    """pygloo leaves the algorithm to its caller: take the faster one here."""
    if ranks.name != "pygloo":
        ranks.prepare(nbytes)
        ranks.times(min(iterations, 20))
        return ""
    medians = {}
    for algorithm in ALGORITHMS:
        ranks.prepare(nbytes, algorithm)
        medians[algorithm] = median(ranks.times(min(iterations, 20), algorithm))
    return min(medians, key=medians.__getitem__)


def _rows(samples: dict[str, Sample], what: str) -> list[Row]:
    return [
        Row.compare(
            f"{what}, {NAMES[ours]}, against {NAMES[reference]}",
            samples[ours],
            samples[reference],
            budget,
        )
        for ours, reference, budget in COMPARISONS
        if ours in samples and reference in samples
    ]
