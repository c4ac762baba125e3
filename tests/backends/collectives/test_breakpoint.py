"""breakpoint: a debugger where there is a terminal, an error where there is none."""

from __future__ import annotations

import io
import sys
import threading
from typing import Any

import pytest

import rankscope as dist
from rankscope.backends.conformance.ranks import Rank, run_ranks
from tests.backends import store_backend

pytestmark = pytest.mark.processes


class Terminal(io.StringIO):
    """What a person types."""

    def isatty(self) -> bool:
        return True


def stops(me: Rank) -> str:
    store_backend.register()
    dist.init_process_group("store", timeout=30)
    secret = f"of rank {me.rank}"
    sys.stdout = shown = io.StringIO()
    # Rank 0 gets to its barrier while rank 1 is in the debugger.
    sys.stdin = Terminal("up\np secret\n!me.meet('looked')\nc\n" if me.rank else "")
    barriers: list[float] = []
    met = threading.Event()

    def look(record: Any) -> None:
        if record.op_type is dist.OpType.BARRIER:
            barriers.append(record.timeout)
            met.set()

    def meet() -> None:
        assert met.wait(30)
        me.meet("looked")

    other = threading.Thread(target=meet)
    if not me.rank:
        other.start()
    hook = dist.add_op_hook(look)
    for _ in range(2):
        dist.breakpoint(rank=1, skip=1, timeout_s=60)
    hook.remove()
    if not me.rank:
        other.join()
    # Once: the first call was skipped. The other rank waits longer than for other ops.
    assert barriers == [60]
    assert secret
    dist.destroy_process_group()
    return shown.getvalue()


def test_one_rank_stops_in_a_debugger_and_the_others_wait() -> None:
    quiet, talking = run_ranks(2, stops)
    assert quiet == ""
    assert "type 'up'" in talking
    assert "'of rank 1'" in talking
    assert "stops()" in talking


def refused(me: Rank) -> list[str]:
    store_backend.register()
    dist.init_process_group("store", timeout=60)
    # As in an engine; rank 1 has a terminal, and is not the one that is asked.
    sys.stdin = Terminal("c\n") if me.rank == 1 else io.StringIO()
    errors = []
    with pytest.raises(dist.DistError, match="%dist_debug -r 0") as caught:
        dist.breakpoint()
    errors.append(str(caught.value))
    with pytest.raises(ValueError, match="rank=2; expected a rank .* 0 to 1"):
        dist.breakpoint(2)
    dist.barrier()
    dist.destroy_process_group()
    return errors


def test_without_a_terminal_all_ranks_are_told_of_dist_debug() -> None:
    for (error,) in run_ranks(2, refused):
        assert "rank 0 has no terminal" in error
