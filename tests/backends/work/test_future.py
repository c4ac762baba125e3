"""Futures of Works: values, callbacks that block, chains, errors, await."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import logging
import threading

import numpy as np
import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.errors import DistAbortedError, DistBackendError
from rankscope.backends.work.future import Future, collect_all, wait_all
from rankscope.backends.work.op_type import OpType
from rankscope.backends.work.state import WorkState
from rankscope.backends.work.threads import CallbackThreads
from rankscope.backends.work.work import Work


def test_the_value_is_a_list_of_the_output_arrays() -> None:
    x, parts = np.ones(2), [np.ones(1), np.ones(1)]
    for result, wanted in ((x, [x]), (parts, parts), (None, [])):
        work = Work(OpType.ALL_GATHER, result)
        future = work.get_future()
        with pytest.raises(DistBackendError, match="no value yet"):
            future.value()
        work.mark_completed()
        for value in (future.value(), future.wait(5), future.result(), work.result()):
            assert all(one is other for one, other in zip(value, wanted, strict=True))


def test_a_chain_computes_on_the_value() -> None:
    work = Work(OpType.ALL_REDUCE, np.full(3, 8.0))
    mean = work.get_future().then(lambda done: done.value()[0] / 4)
    text = mean.then(lambda done: f"{done.value()[0]:g}")
    assert not text.done()
    work.mark_completed()
    assert text.wait(30) == "2"
    assert mean.value().tolist() == [2.0] * 3


def test_a_callback_may_wait_for_other_works_and_futures() -> None:
    first, second = Work(), Work()
    threads: list[str] = []

    def then_second(_: Future) -> int:
        threads.append(threading.current_thread().name)
        second.wait(30)
        return 1

    waiting = first.get_future().then(then_second)
    # Of the same future, a callback that needs the one above and one that frees it.
    joined = first.get_future().then(lambda _: waiting.wait(30) + 1)
    first.get_future().add_done_callback(lambda _: second.mark_completed())
    first.mark_completed()
    assert joined.wait(30) == 2
    assert threads == ["rankscope-callback"]


def test_a_done_future_calls_back_at_once_on_the_thread_that_adds() -> None:
    work = Work()
    work.mark_completed()
    future = work.get_future()
    here = future.then(lambda _: threading.current_thread())
    assert here.done()
    assert here.value() is threading.current_thread()


def test_errors_pass_through_a_chain() -> None:
    work = Work(OpType.BROADCAST)
    called: list[bool] = []

    def look(done: Future) -> object:
        called.append(True)
        return done.value()

    failed = work.get_future().then(look)
    mended = failed.then(lambda done: str(done.exception()))
    broken = work.get_future().then(lambda _: 1 / 0)
    error = DistAbortedError("enough")
    work.mark_failed(error, WorkState.ABORTED)
    with pytest.raises(DistAbortedError, match="enough"):
        failed.wait(30)
    assert failed.exception() is error
    assert called == [True]
    assert mended.wait(30) == "enough"
    with pytest.raises(ZeroDivisionError):
        broken.wait(30)


def test_an_error_of_a_callback_is_logged_and_harms_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    work, seen = Work(), threading.Event()
    future = work.get_future()
    future.add_done_callback(lambda _: [][1])
    future.add_done_callback(lambda _: seen.set())
    with caplog.at_level(logging.ERROR):
        work.mark_completed()
        assert seen.wait(30)
        until(lambda: "IndexError" in caplog.text)
        future.add_done_callback(lambda _: {0: 0}[1])
    assert "KeyError" in caplog.text


def test_a_callback_runs_in_the_context_that_added_it() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="none")
    work = Work()
    token = name.set("mine")
    seen = work.get_future().then(lambda _: name.get())
    name.reset(token)
    work.mark_completed()
    assert seen.wait(30) == "mine"


def test_a_future_is_awaited_and_serves_as_one_of_the_standard_library() -> None:
    work = Work(OpType.ALL_REDUCE, np.ones(1))
    future = work.get_future()

    async def both() -> tuple[object, object]:
        asyncio.get_running_loop().call_later(0.01, work.mark_completed)
        return await future, await asyncio.wrap_future(work.get_future())

    one, other = asyncio.run(both())
    assert one[0] is other[0] is future.value()[0]  # type: ignore[index]
    assert concurrent.futures.wait([future], 5).done == {future}

    async def failing() -> None:
        broken = Work()
        broken.mark_failed(DistAbortedError("gone"), WorkState.ABORTED)
        await broken.get_future()

    with pytest.raises(DistAbortedError, match="gone"):
        asyncio.run(failing())


def test_wait_with_a_timeout_leaves_the_future_and_its_work() -> None:
    work = Work()
    future = work.get_future()
    with pytest.raises(concurrent.futures.TimeoutError):
        future.wait(0.01)
    work.mark_completed()
    assert future.wait(0) == []


def test_a_cancelled_chain_is_not_called() -> None:
    work, called = Work(), list[bool]()
    chained = work.get_future().then(lambda _: called.append(True))
    assert chained.cancel()
    done = work.get_future().then(lambda _: None)
    work.mark_completed()
    done.wait(30)
    assert called == []


def test_collect_all_and_wait_all() -> None:
    works = [Work(OpType.ALL_REDUCE, np.full(1, i)) for i in range(3)]
    futures = [work.get_future() for work in works]
    collected = collect_all(futures)
    for work in reversed(works):
        assert not collected.done()
        work.mark_completed()
    assert collected.wait(5) == futures
    assert [int(value[0][0]) for value in wait_all(futures, 5)] == [0, 1, 2]
    assert collect_all([]).value() == []

    works = [Work(), Work()]
    futures = [work.get_future() for work in works]
    collected = collect_all(futures)
    works[1].mark_failed(DistAbortedError("one"), WorkState.ABORTED)
    with pytest.raises(DistAbortedError, match="one"):
        collected.value()
    with pytest.raises(concurrent.futures.TimeoutError):
        wait_all(futures, 0.01)
    works[0].mark_completed()
    with pytest.raises(DistAbortedError, match="one"):
        wait_all(futures, 5)


def test_callback_threads_are_reused_and_end() -> None:
    threads, pool = list[threading.Thread](), CallbackThreads(linger=0.2)
    for count in range(1, 4):
        pool.submit(lambda: threads.append(threading.current_thread()))
        until(lambda count=count: len(threads) == count)  # type: ignore[misc]
        until(lambda: pool._idle == 1)
    assert len(set(threads)) == 1
    until(lambda: not threads[0].is_alive())
    again = threading.Event()
    pool.submit(again.set)
    assert again.wait(30)


def test_source_rank_is_that_of_a_receive() -> None:
    work = Work(OpType.RECV)
    with pytest.raises(DistBackendError, match="no result yet"):
        work.source_rank()
    work.mark_completed(3)
    assert work.source_rank() == 3
    silent = Work(OpType.RECV)
    silent.mark_completed()
    assert silent.source_rank() == -1
    with pytest.raises(DistBackendError, match="no receive"):
        Work(OpType.SEND).source_rank()
