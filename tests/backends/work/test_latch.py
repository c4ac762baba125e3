"""Waits that an interrupt ends, at any point: what they wait for still ends others."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import pytest

from rankscope.backends import OpType, Work
from rankscope.backends.errors import DistBackendError, DistTimeoutError
from rankscope.backends.work.composite import chain, join
from rankscope.backends.work.latch import Latch


def interrupted(wait: Any, place: int) -> bool:
    """Call `wait`, with an interrupt at a call or a return in it; did one come?

    Python calls the handlers of signals there, and not at each line.
    """
    count = itertools.count()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_lines = False
        if next(count) == place:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        wait()
    except KeyboardInterrupt:
        return True
    except DistTimeoutError:
        return False
    finally:
        sys.settrace(before)
    return False


def test_a_wait_may_be_interrupted_anywhere() -> None:
    for place in itertools.count():
        work = Work(OpType.BARRIER)
        came = interrupted(functools.partial(work.wait, 0.001), place)
        ending = threading.Thread(target=work.mark_completed, daemon=True)
        ending.start()
        ending.join(20)
        assert not ending.is_alive(), f"the end hangs after an interrupt at {place}"
        assert work.wait(20)
        if not came:
            break
    assert place > 10


@pytest.mark.parametrize("error", [None, DistBackendError("one")])
def test_the_end_of_a_part_may_be_interrupted_anywhere(
    error: DistBackendError | None,
) -> None:
    for place in itertools.count():
        parts = [Work(), Work()]
        joined = join(parts, OpType.COALESCED)
        parts[0].mark_completed()
        end: Callable[[], bool] = parts[1].mark_completed
        if error is not None:
            end = functools.partial(parts[1].mark_failed, error)
        came = interrupted(end, place)
        end()
        joined._is_over(20)
        assert joined.exception() is error
        if not came:
            break
    assert place > 10


def test_an_interrupt_of_one_callback_loses_no_other() -> None:
    def interrupt(_: Any = None) -> None:
        raise KeyboardInterrupt

    inner = Work()
    inner.add_done_callback(interrupt)
    outer = chain(inner, OpType.REDUCE, interrupt)
    future = inner.get_future()
    with pytest.raises(KeyboardInterrupt):
        inner.mark_completed()
    assert future.done()
    assert isinstance(outer.exception(), KeyboardInterrupt)


def test_an_interrupted_wait_takes_no_token_away() -> None:
    latch = Latch()
    tokens = latch._tokens

    class Interrupted:
        put = tokens.put

        def get(self, block: bool, timeout: float | None) -> None:
            latch.set()
            tokens.get(block, timeout)
            raise KeyboardInterrupt

    latch._tokens = cast(Any, Interrupted())
    with pytest.raises(KeyboardInterrupt):
        latch.wait()
    assert tokens.qsize() == 1


def test_a_latch_lets_all_through() -> None:
    latch = Latch()
    assert not latch.wait(0)
    assert not latch.wait(-1)
    passed: list[bool] = []
    waiters = [
        threading.Thread(target=lambda: passed.append(latch.wait()), daemon=True)
        for _ in range(5)
    ]
    for thread in waiters:
        thread.start()
    latch.set()
    latch.set()
    for thread in waiters:
        thread.join(20)
    assert passed == [True] * 5
    assert latch.is_set()
