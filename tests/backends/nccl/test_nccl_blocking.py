"""Blocking communicators: a call of NCCL that hangs holds up no abort.

Only the progress thread calls NCCL then, with the lock of the device's queue. Over a
simulated GPU, as in `test_nccl`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rankscope as dist
from rankscope.backends.conformance.waiting import until
from rankscope.backends.nccl.communicator import ABORT_WAIT, CLOSE_WAIT, MUTEX_WAIT
from tests.backends.gpu_ranks import Ranks
from tests.backends.gpu_simulation import Simulation


@pytest.fixture(params=["RANKSCOPE_NCCL_USE_COMM_NONBLOCKING", "NCCL_COMM_BLOCKING"])
def blocking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Communicators are blocking, by either variable."""
    ours = request.param.startswith("RANKSCOPE")
    monkeypatch.setenv(request.param, "0" if ours else "1")


@pytest.fixture
def other(simulation: Simulation, tmp_path: Path) -> Iterator[Ranks]:
    """A second group on the same devices."""
    made = Ranks(simulation, tmp_path)
    yield made
    made.close()


@pytest.fixture
def stuck(simulation: Simulation) -> Iterator[threading.Event]:
    """Set it to have calls of rank 0, which hang from now on, return."""
    made = threading.Event()
    yield made
    made.set()


def queue_of(work: dist.Work) -> Any:
    assert work.launch is not None  # type: ignore[attr-defined]
    return work.launch.stream.queue  # type: ignore[attr-defined]


def hang(ranks: Ranks, stuck: threading.Event) -> dist.Work:
    """Issue an op on rank 0 whose call of NCCL hangs until `stuck` is set."""
    simulation = ranks.simulation
    simulation.calls.clear()
    simulation.calls_stuck[0] = stuck
    work = ranks.ranks[0].all_reduce()
    until(lambda: ("all_reduce", 0) in simulation.calls)
    assert queue_of(work).lock.locked()
    return work


def abort(ranks: Ranks) -> None:
    """Abort on rank 0; no wait in it is for the end of the call that hangs."""
    began = time.monotonic()
    ranks.ranks[0].pg.abort("enough")
    # Waits for the mutex, for the lock of the queue and for NCCL are bounded.
    assert time.monotonic() - began < ABORT_WAIT + MUTEX_WAIT + CLOSE_WAIT / 2


@pytest.mark.usefixtures("blocking")
def test_the_abort_of_a_call_that_hangs_does_not_wait_for_it(
    ranks: Ranks, simulation: Simulation, stuck: threading.Event
) -> None:
    ranks.start(2)
    ranks(lambda r: dist.barrier(group=r.pg))
    work = hang(ranks, stuck)
    abort(ranks)
    assert not stuck.is_set()
    with pytest.raises(dist.DistAbortedError, match="enough"):
        work.synchronize()
    # It is the abort that ends the call.
    until(lambda: ("abort", 0) in simulation.calls)
    assert ("revoke", 0) not in simulation.calls
    stuck.set()
    until(lambda: ranks.ranks[1].pg.aborted is not None)
    for r in ranks.ranks:
        r.pg.rebuild()
    ranks(lambda r: dist.all_reduce(r.array([1.0]), group=r.pg))


@pytest.mark.usefixtures("blocking")
def test_the_abort_of_an_op_behind_a_call_that_hangs_does_not_wait_for_it(
    ranks: Ranks, other: Ranks, simulation: Simulation, stuck: threading.Event
) -> None:
    ranks.start(2)
    other.start(2, name="other")
    for one in (ranks, other):
        one(lambda r: dist.barrier(group=r.pg))
    first = hang(ranks, stuck)
    behind = other.ranks[0].all_reduce()
    assert queue_of(behind) is queue_of(first)
    abort(other)
    with pytest.raises(dist.DistAbortedError, match="enough"):
        behind.synchronize()
    until(lambda: ("abort", 0) in simulation.calls)
    # The group of the call that hangs is not aborted: the call may yet return.
    assert not first.is_completed()
    stuck.set()
    ranks.ranks[1].all_reduce().synchronize()
    first.synchronize()
