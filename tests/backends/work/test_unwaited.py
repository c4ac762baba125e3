"""Asynchronous ops whose Work was dropped, and those that somebody waits for."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends import OpType, Work
from rankscope.backends.work.flight_recorder import GroupCounters, Record
from rankscope.backends.work.unwaited import Unwaited


@pytest.fixture
def ops() -> Unwaited:
    watched = Unwaited()
    watched.begin()
    return watched


def issue(ops: Unwaited) -> Work:
    """Return a completed Work, as a caller gets it."""
    status = GroupCounters("default", 0, 0, (0, 1), "default")
    work = Work(OpType.ALL_REDUCE)
    work.bind(Record(status, work.op_type, [np.ones(1)], None, 60.0))
    work.mark_completed()
    ops.note(work, work.record)
    return work


def test_a_work_that_was_dropped_is_named(ops: Unwaited) -> None:
    issue(ops)
    gc.collect()
    [record] = ops.end()
    assert record.op_type is OpType.ALL_REDUCE
    assert not ops.active
    assert ops.end() == []


@pytest.mark.parametrize(
    "use",
    [
        Work.wait,
        Work.result,
        Work.exception,
        Work.get_future,
        Work.synchronize,
        lambda work: work.add_done_callback(lambda done: None),
    ],
    ids=["wait", "result", "exception", "future", "synchronize", "callback"],
)
def test_a_work_that_was_used_is_not(ops: Unwaited, use: Callable[[Work], Any]) -> None:
    use(issue(ops))
    gc.collect()
    assert ops.end() == []


def test_a_work_that_is_kept_may_be_waited_for_later(ops: Unwaited) -> None:
    kept = issue(ops)
    assert ops.end() == []
    assert kept.wait()


def test_nothing_is_noted_outside_of_cells(group: dist.ProcessGroup) -> None:
    from rankscope.backends.work.unwaited import unwaited

    dist.all_reduce(np.ones(2), async_op=True)
    assert unwaited.end() == []
