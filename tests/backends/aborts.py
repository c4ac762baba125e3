"""Aborts of any CPU backend, in each state of an op: what the ranks run.

The default group is there. Rank 0 aborts; the last rank is the one that does
not come.
"""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import psutil
import pytest

import rankscope as dist
from rankscope.backends.world import world
from tests.ranks import Rank
from tests.waiting import until

__all__ = ["abort_in_each_op", "abort_while_running", "cycles", "meet"]

OPS = [
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "recv",
]


def meet(me: Rank, name: str) -> None:
    """A barrier that does not use the group under test."""
    store = world.store
    assert store is not None
    store.set(f"test/{name}/{me.rank}", "")
    store.wait([f"test/{name}/{rank}" for rank in range(me.size)], 30)


def start(name: str, x: Any, size: int, rank: int) -> dist.Work:
    """Start the op called `name`, in which rank 0 hangs without the last rank."""
    last = size - 1
    many = [np.zeros_like(x) for _ in range(size)]
    flat = np.concatenate(many)
    calls: dict[str, Any] = {
        "all_reduce": lambda: dist.all_reduce(x, async_op=True),
        "broadcast": lambda: dist.broadcast(x, last, async_op=True),
        "reduce": lambda: dist.reduce(x, 0, async_op=True),
        "all_gather": lambda: dist.all_gather(many, x, async_op=True),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(
            flat, x, async_op=True
        ),
        "gather": lambda: dist.gather(x, many if rank == 0 else None, 0, async_op=True),
        "scatter": lambda: dist.scatter(
            x, many if rank == last else None, last, async_op=True
        ),
        "reduce_scatter": lambda: dist.reduce_scatter(x, many, async_op=True),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(
            x, flat, async_op=True
        ),
        "all_to_all": lambda: dist.all_to_all(many, [x] * size, async_op=True),
        "all_to_all_single": lambda: dist.all_to_all_single(
            flat, np.concatenate([x] * size), async_op=True
        ),
        "barrier": lambda: dist.barrier(async_op=True),
        "recv": lambda: dist.irecv(x, last, tag=3),
    }
    work: dist.Work = calls[name]()
    return work


def abort_in_each_op(me: Rank, count: int) -> float:
    """Hang in each op on `count` elements, with another behind it; abort, rebuild.

    Returns the longest time from the abort to the end of a wait on rank 0.
    """
    default = world.get_group()
    x = np.ones(count)
    dist.all_reduce(x)
    longest = 0.0
    for name in OPS:
        x[:] = 1
        if me.rank < me.size - 1:
            hung = start(name, x, me.size, me.rank)
            queued = dist.all_reduce(np.ones(3), async_op=True)
            assert queued is not None
            meet(me, f"hang in {name}")
            if me.rank == 0:
                longest = max(longest, _abort(name, [hung, queued]))
            else:
                with pytest.raises(dist.DistAbortedError, match=f"test of {name}"):
                    queued.wait(20)
        else:
            meet(me, f"hang in {name}")
            until(lambda: default.aborted is not None)
        # Nothing of the aborted op may write here any more.
        x[:] = me.rank
        dist.rebuild_process_group()
        _check(me)
        np.testing.assert_array_equal(x, me.rank)
    return longest


def _abort(name: str, works: list[dist.Work]) -> float:
    """Abort from one thread while others wait; check what they were told."""
    errors: list[BaseException | None] = [None] * len(works)

    def wait(place: int) -> None:
        try:
            works[place].wait(20)
        except dist.DistError as error:
            errors[place] = error

    waiters = [threading.Thread(target=wait, args=[i]) for i in range(len(works))]
    for waiter in waiters:
        waiter.start()
    assert not works[0].is_completed()
    began = time.monotonic()
    dist.abort_process_group(reason=f"test of {name}")
    for waiter in waiters:
        waiter.join(20)
    took = time.monotonic() - began
    for work, error in zip(works, errors, strict=True):
        assert isinstance(error, dist.DistAbortedError)
        assert work.state is dist.WorkState.ABORTED
        # Op, number, group, rank, reason.
        for part in (str(work.op_type.value), "#", "'default'", "rank 0", name):
            assert part in str(error)
    return took


def abort_while_running(me: Rank, nbytes: int, times: int) -> int:
    """Abort an op that every rank is in, at whatever point; return how many it hit."""
    default = world.get_group()
    hit = 0
    x = np.ones(nbytes // 8)
    for turn in range(times):
        meet(me, f"run {turn}")
        try:
            _abort_running(me, x, at_once=turn % 3 == 0)
        except dist.DistAbortedError:
            hit += 1
        until(lambda: default.aborted is not None)
        meet(me, f"ran {turn}")
        dist.rebuild_process_group()
        _check(me)
    return hit


def _abort_running(me: Rank, x: Any, at_once: bool) -> None:
    work = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)
    assert work is not None
    if me.rank == 0:
        if not at_once:
            until(lambda: work.state is not dist.WorkState.SCHEDULED)
        dist.abort_process_group(reason="test")
    work.wait(20)


def _check(me: Rank) -> None:
    """The group works, on small arrays and on larger ones."""
    for count in (5, 50_000):
        y = np.full(count, me.rank + 1.0)
        dist.all_reduce(y)
        np.testing.assert_array_equal(y, sum(range(me.size + 1)))


def cycles(me: Rank, times: int) -> tuple[float, int, int]:
    """Abort and rebuild, again and again; return the growth of what is held.

    MiB of resident memory, threads and file descriptors.
    """
    process = psutil.Process()

    def one(number: int) -> None:
        default = world.get_group()
        if me.rank:
            work = dist.all_reduce(np.ones(1000), async_op=True)
            assert work is not None
        meet(me, f"hang {number}")
        if me.rank == 0:
            dist.abort_process_group(reason=f"cycle {number}")
        until(lambda: default.aborted is not None)
        meet(me, f"aborted {number}")
        dist.rebuild_process_group()
        x = np.ones(1000)
        dist.all_reduce(x)
        np.testing.assert_array_equal(x, me.size)

    dist.barrier()
    for number in range(20):
        one(number)
    gc.collect()
    memory, threads = process.memory_info().rss, threading.active_count()
    descriptors = process.num_fds()
    for number in range(20, 20 + times):
        one(number)
    # Threads that told the others of an abort may still be at it.
    until(lambda: threading.active_count() <= threads)
    gc.collect()
    return (
        (process.memory_info().rss - memory) / 2**20,
        threading.active_count() - threads,
        process.num_fds() - descriptors,
    )
