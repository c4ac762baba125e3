"""Waits that an interrupt ends, at any point: what they wait for still ends others."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from types import FrameType
from typing import Any

from rankscope.backends import OpType, Work
from rankscope.backends.errors import DistTimeoutError
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
