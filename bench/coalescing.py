"""64 all_reduces: coalesced, one by one, and as one op on one flat array.

The flat array was flat from the start: copying 64 arrays together and apart is
part of what coalescing costs. "One by one" issues all 64 with ``async_op=True``
and then waits, as the coalesced block does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .ranks import costs_in_turns, started
from .table import Row, Sample, size_name

__all__ = ["measure"]

COUNT = 64
#: Bytes of one array → blocks of 64 in one round.
BLOCKS = {4: 60, 4 << 10: 60, 128 << 10: 12, 8 << 20: 1}
RANKS = 2
#: Of the CPU of 64 single ops, up to the size at which copying outweighs dispatch.
CPU_BUDGET = 0.25
CPU_BUDGET_BYTES = 4 << 10
VARIANTS = ("single", "coalesced", "flat")


def measure(
    pythons: Mapping[str, str],
    rounds: int,
    say: Callable[[str], None],
    left_out: Callable[[str], None],
) -> list[Row]:
    """Compare the three ways, Rankscope's and torch's, at each size of `BLOCKS`.

    `pythons` maps contenders to their Python. `say` is called with the progress,
    `left_out` with the reason why a contender is left out.
    """
    rows: list[Row] = []
    with started(pythons, RANKS, left_out) as contenders:
        for nbytes, blocks in BLOCKS.items():
            say(f"  {COUNT} all_reduces of {size_name(nbytes)}")
            costs = costs_in_turns(
                contenders, nbytes, blocks, rounds, left_out, VARIANTS
            )
            rows += _rows(nbytes, *costs)
    return rows


def _rows(
    nbytes: int,
    times: Mapping[tuple[str, str], Sample],
    cpu: Mapping[tuple[str, str], Sample],
) -> list[Row]:
    ours, torch = ("coalescing", "coalesced"), ("torch-coalescing", "coalesced")
    if ours not in times:
        return []
    what = f"{COUNT} all_reduces of {size_name(nbytes)}, coalesced"
    single, flat = ("coalescing", "single"), ("coalescing", "flat")
    cpu_budget = CPU_BUDGET if nbytes <= CPU_BUDGET_BYTES else None
    torch_budget = 1.2 if nbytes == min(BLOCKS) else 1.0
    compared = [
        ("CPU, against single", cpu, single, cpu_budget),
        ("time, against single", times, single, None),
        ("time, against one flat op", times, flat, None),
        ("time, against torch's manager", times, torch, torch_budget),
    ]
    return [
        Row.compare(f"{what}: {name}", samples[ours], samples[reference], budget)
        for name, samples, reference, budget in compared
        if reference in samples
    ]
