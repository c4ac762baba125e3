"""Work: the transition table, waiting, futures, awaiting, durations."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.backends import (
    DistAbortedError,
    DistBackendError,
    DistTimeoutError,
    OpType,
    ReduceOp,
    Work,
    WorkState,
    create_work_from_future,
)
from rankscope.backends.work.composite import chain, join
from rankscope.backends.work.state import OpRecord
from rankscope.backends.work.work import transition

EVENTS = [state for state in WorkState if state is not WorkState.SCHEDULED]
TERMINAL = [state for state in WorkState if state.is_terminal]


@pytest.mark.parametrize(
    ("state", "event"), list(itertools.product(WorkState, EVENTS)), ids=str
)
def test_a_terminal_state_stays_and_any_other_takes_the_event(
    state: WorkState, event: WorkState
) -> None:
    assert transition(state, event) is (state if state.is_terminal else event)


@pytest.mark.parametrize("state", list(WorkState), ids=str)
def test_nothing_goes_back_to_scheduled(state: WorkState) -> None:
    with pytest.raises(ValueError, match="SCHEDULED"):
        transition(state, WorkState.SCHEDULED)


@settings(deadline=None)
@given(st.lists(st.sampled_from(EVENTS)))
def test_the_first_outcome_is_the_outcome(events: list[WorkState]) -> None:
    state = WorkState.SCHEDULED
    for event in events:
        state = transition(state, event)
    outcomes = [event for event in events if event.is_terminal]
    assert not outcomes or state is outcomes[0]


def test_terminal_states_are_the_four_outcomes() -> None:
    assert {state.name for state in TERMINAL} == {
        "COMPLETED",
        "FAILED",
        "TIMED_OUT",
        "ABORTED",
    }


def test_a_work_from_issue_to_success() -> None:
    work = Work(OpType.ALL_REDUCE)
    assert work.state is WorkState.SCHEDULED
    assert not work.is_completed()
    assert work.get_duration() is None
    work.mark_started()
    assert work.state is WorkState.STARTED
    assert work.mark_completed("result")
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result() == "result"
    assert work.wait() is True
    assert "completed" in repr(work)


def test_the_duration_runs_from_the_start_and_not_from_the_issue() -> None:
    work = Work()
    work.mark_started(at_ns=work.scheduled_ns + 5_000_000)
    work.mark_completed(completed_ns=work.scheduled_ns + 8_000_000)
    assert work.duration_ns == 3_000_000
    assert work.get_duration() == 3.0


def test_a_work_that_is_not_timed_has_no_duration() -> None:
    work = Work()
    work.timed = False
    work.mark_started()
    work.mark_completed()
    assert work.get_duration() is None


@pytest.mark.parametrize(
    "state", [WorkState.FAILED, WorkState.TIMED_OUT, WorkState.ABORTED], ids=str
)
def test_every_waiter_of_a_failed_work_raises_its_error(state: WorkState) -> None:
    work = Work()
    error = DistAbortedError("why")
    assert work.mark_failed(error, state)
    assert not work.mark_completed()
    assert work.state is state
    assert not work.is_success()
    assert work.exception() is error
    for attempt in (work.wait, work.result, work.synchronize, work.get_future().result):
        with pytest.raises(DistAbortedError, match="why"):
            attempt()


def test_wait_with_a_timeout_leaves_the_work_in_flight() -> None:
    work = Work(OpType.BARRIER)
    with pytest.raises(DistTimeoutError, match=r"barrier.*0\.01 s.*in flight"):
        work.wait(timeout=0.01)
    assert not work.is_completed()
    with pytest.raises(DistBackendError, match="no result yet"):
        work.result()
    work.mark_completed()
    assert work.wait(timeout=0.01)


def test_waiters_on_several_threads_are_all_released() -> None:
    work = Work()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waits = [pool.submit(work.wait, 30) for _ in range(8)]
        work.mark_completed()
        assert all(wait.result(30) for wait in waits)


def test_only_one_of_many_racing_outcomes_wins() -> None:
    for _ in range(200):
        work, start = Work(), threading.Barrier(3)

        def complete(work: Work = work, start: threading.Barrier = start) -> bool:
            start.wait()
            return work.mark_completed()

        def fail(work: Work = work, start: threading.Barrier = start) -> bool:
            start.wait()
            return work.mark_failed(DistBackendError("x"))

        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            racers = [pool.submit(complete), pool.submit(fail), pool.submit(fail)]
            assert [racer.result(30) for racer in racers].count(True) == 1


def test_callbacks_run_once_whether_added_before_or_after_the_end() -> None:
    work, seen = Work(), list[Work]()
    work.add_done_callback(seen.append)
    assert seen == []
    work.mark_completed()
    work.mark_completed()
    work.add_done_callback(seen.append)
    assert seen == [work, work]


def test_a_future_and_await_give_the_result() -> None:
    work = Work()
    future = work.get_future()

    async def consume() -> object:
        asyncio.get_running_loop().call_later(0.01, work.mark_completed, 42)
        return await work

    assert asyncio.run(consume()) == 42
    assert future.result(0) == 42


def test_a_cancelled_future_does_not_disturb_the_work() -> None:
    work = Work()
    future = work.get_future()
    assert future.cancel()
    assert work.mark_completed(1)
    assert work.result() == 1


def test_a_work_from_a_future_ends_as_the_future_does() -> None:
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    work = create_work_from_future(future, OpType.REDUCE)
    assert work.state is WorkState.STARTED
    future.set_result(7)
    assert work.result() == 7

    failing: concurrent.futures.Future[int] = concurrent.futures.Future()
    work = create_work_from_future(failing)
    failing.set_exception(KeyError("k"))
    with pytest.raises(KeyError):
        work.wait()

    cancelled: concurrent.futures.Future[int] = concurrent.futures.Future()
    work = create_work_from_future(cancelled)
    cancelled.cancel()
    assert work.state is WorkState.ABORTED
    with pytest.raises(DistBackendError, match="cancelled"):
        work.wait()


def test_a_chained_work_starts_and_ends_with_the_one_it_stands_on() -> None:
    inner, order = Work(), list[str]()
    outer = chain(inner, OpType.REDUCE_SCATTER, lambda: order.append("then"), "out")
    inner.mark_started(at_ns=1)
    assert outer.state is WorkState.STARTED
    assert not outer.is_completed()
    inner.mark_completed()
    assert outer.wait()
    assert order == ["then"]
    assert outer.result() == "out"
    assert outer.started_ns == 1


def test_a_chained_work_fails_with_either_part() -> None:
    inner = Work()
    outer = chain(inner, OpType.REDUCE_SCATTER, lambda: None)
    inner.mark_failed(DistAbortedError("gone"), WorkState.ABORTED)
    assert outer.state is WorkState.ABORTED
    with pytest.raises(DistAbortedError, match="gone"):
        outer.wait()

    def broken() -> None:
        raise ZeroDivisionError

    inner = Work()
    outer = chain(inner, OpType.REDUCE_SCATTER, broken)
    inner.mark_completed()
    with pytest.raises(ZeroDivisionError):
        outer.wait()


def test_a_joined_work_ends_with_the_last_and_fails_with_the_first() -> None:
    parts = [Work(), Work()]
    outer = join(parts, OpType.SEND, "all")
    parts[1].mark_completed()
    assert not outer.is_completed()
    parts[0].mark_completed()
    assert outer.wait(5)
    assert outer.result() == "all"
    assert join([], OpType.SEND).is_success()

    parts = [Work(), Work()]
    outer = join(parts, OpType.SEND)
    parts[0].mark_failed(DistAbortedError("one"))
    with pytest.raises(DistAbortedError, match="one"):
        outer.wait(5)


def test_a_composite_that_is_aborted_releases_whoever_waits_for_its_parts() -> None:
    inner = Work()
    outer = chain(inner, OpType.REDUCE, lambda: None)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(outer.wait)
        outer.mark_failed(DistAbortedError("stop"), WorkState.ABORTED)
        assert isinstance(waiter.exception(30), DistAbortedError)
    assert inner.state is WorkState.ABORTED


def test_reduce_ops_are_those_of_torch() -> None:
    assert {op.name for op in ReduceOp} == {
        "SUM",
        "AVG",
        "PRODUCT",
        "MIN",
        "MAX",
        "BAND",
        "BOR",
        "BXOR",
        "PREMUL_SUM",
    }


def test_what_fails_during_an_abort_fails_with_the_abort() -> None:
    work = Work(OpType.ALL_REDUCE)
    cause = DistAbortedError("the group was aborted: enough")
    work.hold_failures(cause)
    assert work.mark_failed(RuntimeError("the connection was closed"))
    assert work.state is WorkState.ABORTED
    assert work.exception() is cause
    done = Work(OpType.ALL_REDUCE)
    done.hold_failures(cause)
    done.mark_completed()
    assert done.is_success()


class Meddling:
    """A record in whose calls a signal handler aborts, or which it interrupts."""

    def __init__(self, name: str, handler: Callable[[Work], None]) -> None:
        self.name, self.handler = name, handler
        self.calls: list[str] = []

    def _note(self, name: str, work: Work) -> None:
        self.calls.append(name)
        if name == self.name:
            self.name = ""
            self.handler(work)

    def started(self, work: Work) -> None:
        self._note("started", work)

    def ended(self, work: Work) -> None:
        self._note("ended", work)

    def identity(self) -> dict[str, Any]:
        return {}

    def describe(self) -> str:
        return "an op"


def end_with(record: Meddling) -> Work:
    """Start and end a Work on a thread of its own, which is not to hang."""
    work = Work(OpType.BARRIER)

    def run() -> None:
        work.bind(cast(OpRecord, record))
        work.mark_started()
        with contextlib.suppress(KeyboardInterrupt):
            work.mark_completed()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    return work


@pytest.mark.parametrize("name", ["started", "ended"])
def test_a_signal_handler_may_abort_in_the_midst_of_a_report(name: str) -> None:
    def abort(work: Work) -> None:
        work.hold_failures(DistAbortedError("by the handler"))
        work.fail_by_group(DistAbortedError("by the handler"))

    record = Meddling(name, abort)
    work = end_with(record)
    aborted = name == "started"
    assert work.state is (WorkState.ABORTED if aborted else WorkState.COMPLETED)
    assert (work.exception() is not None) == aborted
    assert record.calls.count("ended") == 1


def test_an_interrupt_leaves_no_op_in_flight() -> None:
    def interrupt(_: Work) -> None:
        raise KeyboardInterrupt

    record = Meddling("ended", interrupt)
    assert end_with(record).is_success()
    assert record.calls == ["started", "ended", "ended"]
