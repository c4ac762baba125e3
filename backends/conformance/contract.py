"""Level *contract*: the promises of a backend in the absence of faults."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import psutil

import rankscope.backends as dist

from ..errors import DistTimeoutError
from ..work.reduce_op import ReduceOp
from ..work.state import WorkState
from ..work.work import Work
from .aborts import abort_hung_op
from .calls import claimed, connect, first_claimed, start
from .expect import same
from .leaks import Snapshot
from .reference import reduced
from .trial import Rules, Trial, Unclaimed
from .waiting import until

__all__ = ["RULES"]

RULES = Rules()

# An op that needs every rank, so that it cannot end while one is absent.
_JOINT = ("all_reduce", "all_gather", "all_to_all", "barrier")
# Set by a last rank that was not waited for.
_ENTERED = "entered"


def _last_rank_enters_later(trial: Trial, keys: list[str], limit: float) -> None:
    """On the last rank: wait until `keys` are set, for `limit` s at most."""
    if trial.rank != trial.size - 1:
        return
    deadline = time.monotonic() + limit
    while not trial.store.check(keys):
        if time.monotonic() > deadline:
            trial.store.set(_ENTERED, b"")
            return
        trial.raise_if_failed()
        time.sleep(0.01)


@RULES.contract(
    "returns at once",
    "a method returns its Work at once, and the op waits for every rank",
)
def returns_at_once(trial: Trial) -> None:
    names = [name for name in claimed(trial) if name in _JOINT]
    if not names:
        raise Unclaimed(f"the backend does not claim {' or '.join(_JOINT)}")
    connect(trial)
    trial.meet("start")
    last, limit = trial.size - 1, trial.options.report_seconds
    others = [f"issued/{rank}" for rank in range(last)]
    _last_rank_enters_later(trial, others, limit)
    works: list[tuple[str, Work]] = []
    for name in names:
        (work,) = start(trial, name, trial.array(np.ones(1000)))
        # A call that waits for the last rank returns once that rank has entered.
        assert trial.rank == last or not trial.store.check([_ENTERED]), (
            f"the call of {name} had not returned while rank {last} was absent, for "
            f"{limit:g} s: a method has to return its Work at once"
        )
        works.append((name, work))
    if trial.rank < last:
        with contextlib.suppress(DistTimeoutError):
            works[0][1].wait(timeout=0.1)
        for name, work in works:
            # Whether a barrier waits is a rule of its own.
            assert name == "barrier" or not work.is_completed(), (
                f"{name} was over before rank {last} entered it"
            )
        trial.store.set(f"issued/{trial.rank}", b"")
    for _, work in reversed(works):
        assert work.wait(trial.options.timeout)
    trial.held(len(works))


@RULES.contract("runs in order", "ops run in the order of issue")
def runs_in_order(trial: Trial) -> None:
    had = claimed(trial)
    if "all_reduce" in had and (second := _other_reduction(trial)):
        _two_reductions(trial, second)
    elif "broadcast" in had:
        _two_broadcasts(trial)
    else:
        raise Unclaimed(
            "the backend does not claim broadcast, nor all_reduce with SUM and "
            "another reduction"
        )
    name = first_claimed(trial, "all_reduce", "broadcast")
    many = [
        trial.array(np.full(1 + 37 * turn, float(turn * (trial.rank + 1))))
        for turn in range(20)
    ]
    works = [work for one in many for work in start(trial, name, one)]
    for work in works:
        work.wait(trial.options.timeout)
    factor = sum(range(trial.size + 1)) if name == "all_reduce" else trial.size
    for turn, one in enumerate(many):
        same(trial.arrays.read(one), float(turn * factor))
    trial.held(len(works))


def _other_reduction(trial: Trial) -> ReduceOp | None:
    """Return a reduction that the backend has beside SUM, ``None`` without one."""
    for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MAX, ReduceOp.MIN):
        # Alone: a rank that skips the rule must leave no op in flight.
        try:
            dist.all_reduce(trial.array([1.0]), op, group=trial.group)
        except (TypeError, ValueError):
            if op is ReduceOp.SUM:
                return None
        else:
            if op is not ReduceOp.SUM:
                return op
    return None


def _two_reductions(trial: Trial, second: ReduceOp) -> None:
    """SUM and then another reduction of one array: the order shows in the result."""
    calls = [partial(dist.all_reduce, op=op) for op in (ReduceOp.SUM, second)]
    total = np.array([float(sum(range(trial.size + 1)))])
    (expected,) = reduced(second, [total] * trial.size)
    _two_calls(
        trial, calls, f"SUM and then {second.name} of one array gave", float(expected)
    )


def _two_broadcasts(trial: Trial) -> None:
    """Rank 0 and then the last rank broadcast one array: the first one decides."""
    roots = (0, trial.size - 1)
    calls = [partial(dist.broadcast, group_src=root) for root in roots]
    what = "broadcasts of one array from rank 0 and then from the last rank gave"
    _two_calls(trial, calls, what, 1.0)


def _two_calls(
    trial: Trial, calls: Sequence[Callable[..., Any]], what: str, expected: float
) -> None:
    """Issue `calls` on one array, and compare its element with what is `expected`."""
    x = trial.array([trial.rank + 1.0])
    works = [call(x, group=trial.group, async_op=True) for call in calls]
    for work in works:
        work.wait(trial.options.timeout)
    (found,) = trial.arrays.read(x)
    assert found == expected, (
        f"{what} {found:g}; in the order of issue they give {expected:g}"
    )
    trial.held(len(works))


@RULES.contract(
    "reports start and end",
    "the Work of an op that runs is STARTED, and its times are in order",
)
def reports_start_and_end(trial: Trial) -> None:
    name, limit = first_claimed(trial, *_JOINT), trial.options.report_seconds
    connect(trial)
    trial.meet("start")
    _last_rank_enters_later(trial, ["started"], trial.options.timeout)
    try:
        (work,) = start(trial, name, trial.array(np.ones(4)))
        if trial.rank == 0:

            def started() -> bool:
                trial.group.summary()  # a backend may report when it is asked
                return work.state is not WorkState.SCHEDULED

            until(started, limit, f"{name} to be reported as started (mark_started)")
    finally:
        trial.store.set("started", b"")
    work.wait(trial.options.timeout)
    until(work.is_completed, limit, f"the end of {work!r}")
    assert work.state is WorkState.COMPLETED
    assert 0 < work.scheduled_ns <= work.completed_ns
    if work.timed and work.started_ns:
        assert work.started_ns <= work.completed_ns, (
            f"{name} is reported to have started {work.started_ns} ns and ended "
            f"{work.completed_ns} ns after the epoch"
        )
    trial.held()


@RULES.contract(
    "goes on alone", "an op ends and calls its callbacks while no thread waits for it"
)
def goes_on_alone(trial: Trial) -> None:
    name, limit = first_claimed(trial, *_JOINT), trial.options.report_seconds
    calls: list[tuple[bool, threading.Thread]] = []
    (work,) = start(trial, name, trial.array(np.ones(1000)))

    def note(done: Work) -> None:
        calls.append((done.is_completed(), threading.current_thread()))

    work.add_done_callback(note)
    until(lambda: calls, limit, f"the callback of {name}: no thread waits for the op")
    work.wait(trial.options.timeout)

    # A callback may issue the next op.
    following: list[Any] = []

    def follow(_: Work) -> None:
        following.append(start(trial, name, trial.array(np.ones(3)))[0])

    (work,) = start(trial, name, trial.array(np.ones(3)))
    work.add_done_callback(follow)
    until(lambda: following, limit, f"a callback of {name} to issue another op")
    following[0].wait(trial.options.timeout)
    assert [completed for completed, _ in calls] == [True], (
        f"the callback of {name} ran {len(calls)} times"
    )
    trial.held()


class _ProgramError(Exception):
    """What a program raises whose ``finally`` destroys its group."""


@RULES.contract(
    "destroy in flight",
    "a group with an op in flight is destroyed at once after an error",
)
def destroy_in_flight(trial: Trial) -> None:
    name = first_claimed(trial, *_JOINT)
    connect(trial)
    work: Work | None = None
    if trial.rank < trial.size - 1:
        (work,) = start(trial, name, trial.array(np.ones(1000)))
        if work.is_completed():
            trial.meet("issued")
            raise Unclaimed(f"{name} ends without the last rank: none is in flight")
    trial.meet("issued")
    # A device has time to end ops whose wait() has returned.
    limit = trial.options.abort_seconds + (15 if work and work.on_device else 0)
    began = time.monotonic()
    try:
        raise _ProgramError
    except _ProgramError:
        # Without an error what is in flight has time to end.
        trial.close()
    took = time.monotonic() - began
    trial.notes["destroy_s"] = took
    assert took < limit, f"destroy_process_group() took {took:.1f} s"
    assert work is None or work.is_completed(), f"{work!r} after its group is gone"
    trial.held()


@RULES.contract(
    "leaves nothing behind",
    "groups that come and go leave no descriptor, thread or process",
)
def leaves_nothing(trial: Trial) -> None:
    cycles = trial.options.cycles
    names = [name for name in claimed(trial) if name in _JOINT]
    name = names[0] if names else ""

    def open_again(part: str) -> None:
        trial.meet(f"close, {part}")
        trial.close()
        trial.open(part)
        if name:
            connect(trial)

    def one(number: int) -> None:
        if name and trial.size > 1 and number % 2:
            abort_hung_op(trial, name, f"cycle {number}")
        elif name:
            start(trial, name, trial.array(np.ones(1000)))[0].wait()
        if number % 4 == 0:
            open_again(f"cycle-{number}")
        trial.held()

    # A resource that is made once and kept is no leak.
    warm = 4 + cycles // 10
    for number in range(warm):
        one(number)
    # The measured state is that of a new group that has run one op.
    open_again("before")
    before, memory = _settled(trial, "before"), psutil.Process().memory_info().rss
    for number in range(warm, warm + cycles):
        one(number)
    open_again("after")
    if trial.rank == 0 or trial.own_process:
        deadline = time.monotonic() + trial.options.leak_seconds
        while left := _settled(trial, "").surplus(before):
            if time.monotonic() > deadline:
                raise AssertionError(f"after {cycles} cycles: {'; '.join(left)}")
            time.sleep(0.05)
    trial.meet("measured")
    trial.notes["grown_mib"] = (psutil.Process().memory_info().rss - memory) / 2**20


def _settled(trial: Trial, meeting: str) -> Snapshot:
    if meeting:
        trial.meet(meeting)
    gc.collect()
    found = Snapshot.take()
    if meeting:
        trial.meet(f"{meeting}, taken")
    return found
