"""How the kernel schedules gloo's thread, in the side process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.gloo.backend import GlooBackend
from rankscope.backends.gloo.dtypes import arithmetic
from rankscope.backends.gloo.side.scheduling import yielding_threads
from rankscope.backends.work.reduce_op import ReduceOp


@pytest.fixture(autouse=True)
def _leaves_the_policy() -> Iterator[None]:
    """Check that the thread of the test has the usual policy again."""
    yield
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def policy_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found[0]


def cores(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(number)))


def test_where_cores_are_few_a_thread_yields(monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 5)
    with yielding_threads(2):
        assert policy_of_a_new_thread() == os.SCHED_BATCH
    assert policy_of_a_new_thread() == os.SCHED_OTHER


def test_with_a_core_for_every_thread_nothing_is_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores(monkeypatch, 6)
    with yielding_threads(2):
        assert policy_of_a_new_thread() == os.SCHED_OTHER


def test_the_policy_returns_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 1)
    with pytest.raises(ValueError, match="no device"), yielding_threads(2):
        raise ValueError("no device")
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_another_policy_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 1)
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_FIFO)
    set_to: list[int] = []
    monkeypatch.setattr(os, "sched_setscheduler", lambda pid, *to: set_to.append(to[0]))
    with yielding_threads(2):
        pass
    monkeypatch.undo()
    assert set_to == []


def test_a_sandbox_may_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, policy: int, parameter: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    cores(monkeypatch, 1)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with yielding_threads(2):
        assert policy_of_a_new_thread() == os.SCHED_OTHER


def policies(me: Rank) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with me.store("gloo") as store:
        made = GlooBackend(store, me.rank, me.size)
        x = np.ones(1, np.float32)
        assert made.all_reduce(x, arithmetic(x.dtype, ReduceOp.SUM)).wait(20)
        [side] = psutil.Process().children()
        policy = {
            thread.id: os.sched_getscheduler(thread.id) for thread in side.threads()
        }
        # The thread that calls gloo has the core first.
        assert policy.pop(side.pid) == os.SCHED_OTHER
        assert os.SCHED_BATCH in policy.values()
        # A rank that leaves ends the side process of one that still looks.
        me.meet("looked")
        made.shutdown()


def test_gloos_thread_yields_in_a_side_process() -> None:
    run_ranks(2, policies)
