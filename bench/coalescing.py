"""64 all_reduces: coalesced, one by one, and as one op on one flat array.

The flat array was flat from the start: copying 64 arrays together and apart is
part of what coalescing costs. "One by one" issues all 64 with ``async_op=True``
and then waits, as the coalesced block does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .ranks import ContenderFailed, Ranks, started
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
            rows += _size(contenders, nbytes, blocks, rounds, left_out)
    return rows


def _size(
    contenders: dict[str, Ranks],
    nbytes: int,
    blocks: int,
    rounds: int,
    left_out: Callable[[str], None],
) -> list[Row]:
    times: dict[tuple[str, str], Sample] = {}
    cpu: dict[tuple[str, str], Sample] = {}
    for name, ranks in list(contenders.items()):
        try:
            for variant in VARIANTS:
                ranks.prepare(nbytes, variant)
                times[name, variant], cpu[name, variant] = Sample([]), Sample([])
        except ContenderFailed as error:
            left_out(f"{size_name(nbytes)}: {error}")
            contenders.pop(name).close()
    for number in range(rounds):
        order = [(name, variant) for name in contenders for variant in VARIANTS]
        turn = number % len(order) if order else 0
        for name, variant in order[turn:] + order[:turn]:
            took, used = contenders[name].costs(blocks, variant)
            times[name, variant].rounds.append(took)
            cpu[name, variant].rounds.append([used])
    return _rows(nbytes, times, cpu)


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
