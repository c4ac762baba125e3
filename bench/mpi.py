"""The MPI backend against bare mpi4py, on the same Open MPI."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from . import dispatch
from .all_reduce import BLOCKS, from_size
from .ranks import in_turns, started
from .table import Row, size_name

__all__ = ["measure"]

#: From the size on, the budget of the ratio; below all of them it is a difference in
#: seconds, the budget of dispatch and 10 µs. For ranks that have a core each.
RATIO_BUDGETS = {64 << 10: 2.2, 1 << 20: 1.2}
EXTRA_BUDGET = dispatch.BUDGET + 10e-6
#: The micro-benchmarks of OSU that are measured, and the ops in a block by bytes.
OSU = {
    "latency": {4: 1500, 64 << 10: 100},
    "bandwidth": {64 << 10: 100, 4 << 20: 5},
}
KINDS = {"latency": "there and back", "bandwidth": "16 messages"}


def measure(
    rounds: int, say: Callable[[str], None], left_out: Callable[[str], None]
) -> Iterator[Row]:
    """Measure all_reduce on 2 and 4 ranks, and OSU's latency and bandwidth.

    `rounds` is the number of turns of both contenders. `say` is called with the
    progress, `left_out` with the reason why ranks cannot be started.
    """
    if find_spec("mpi4py") is None:
        left_out("mpi: mpi4py is not installed in this environment")
        return
    pythons = dict.fromkeys(("mpi", "bare-mpi"), sys.executable)
    for size in (2, 4):
        has_budget = size <= len(os.sched_getaffinity(0))
        cases = [
            ("", nbytes, iterations, f"all_reduce {size_name(nbytes)}, {size} ranks")
            for nbytes, iterations in BLOCKS.items()
        ]
        if size == 2:
            cases += [
                (
                    variant,
                    nbytes,
                    iterations,
                    f"send and recv {size_name(nbytes)}, {KINDS[variant]}",
                )
                for variant, blocks in OSU.items()
                for nbytes, iterations in blocks.items()
            ]
        with started(pythons, size, left_out) as contenders:
            for variant, nbytes, iterations, what in cases:
                if len(contenders) < len(pythons):
                    break
                say(f"  MPI {what}")
                samples = in_turns(
                    contenders, nbytes, iterations, rounds, left_out, variant
                )
                if len(samples) < len(pythons):
                    break
                both = samples["mpi"], samples["bare-mpi"]
                title = f"MPI {what}, against bare mpi4py"
                budget = from_size(RATIO_BUDGETS, nbytes)
                if variant:
                    yield Row.compare(title, *both, None)
                elif budget is None:
                    extra = EXTRA_BUDGET if has_budget else None
                    yield Row.compare_extra(title, *both, extra)
                else:
                    yield Row.compare(title, *both, budget if has_budget else None)
