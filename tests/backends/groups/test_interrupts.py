"""Where an interrupt is raised: not in the midst of Rankscope's code at work."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from queue import SimpleQueue
from types import FrameType

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.bounded_get import bounded_get
from rankscope.backends.conformance.waiting import until
from rankscope.backends.work.sigint import interrupt
from tests.backends.manual import Manual

RAISE = partial(signal.raise_signal, signal.SIGINT)


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    """Handle SIGINT as a rank does in a cell."""

    def handle(signum: int, frame: FrameType | None) -> None:
        interrupt(frame)

    before = signal.signal(signal.SIGINT, handle)
    yield
    interrupt.cancel()
    await_sender()
    signal.signal(signal.SIGINT, before)


def await_sender() -> None:
    """Wait for the thread that sends an interrupt again."""

    def is_over() -> bool:
        frames = sys._current_frames().values()
        return not any(one.f_code.co_name == "_send_again" for one in frames)

    until(is_over, 20)


class _Interrupted:
    """A lock during whose acquisition an interrupt comes."""

    __enter__ = staticmethod(RAISE)

    def __exit__(self, *error: object) -> None:
        pass


def test_an_op_that_is_being_issued_is_issued_first(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist.all_reduce(np.ones(3), async_op=True)
    monkeypatch.setattr(group.current, "issue_lock", _Interrupted())
    with pytest.raises(KeyboardInterrupt):
        dist.all_reduce(np.ones(3), async_op=True)
    assert len(Manual.made[0].works) == 2
    assert group.status.collective_seq == 2
    assert not interrupt.is_put_off


def test_one_in_the_users_code_is_raised_there() -> None:
    with pytest.raises(KeyboardInterrupt):
        RAISE()


def test_a_wait_ends_at_once() -> None:
    began = time.monotonic()
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.05, partial(signal.pthread_kill, main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        bounded_get(SimpleQueue(), 20)
    assert time.monotonic() - began < 10
    timer.join()


def test_other_threads_issue_their_ops(group: dist.ProcessGroup) -> None:
    interrupt.is_put_off = True
    thread = threading.Thread(target=dist.all_reduce, args=(np.ones(3),))
    thread.start()
    until(lambda: bool(Manual.made and Manual.made[0].works), 20)
    Manual.made[0].works[0].mark_completed()
    thread.join(20)
    assert not thread.is_alive()
    assert interrupt.is_put_off


def test_one_whose_cell_has_ended_does_not_come_again(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended(_Interrupted):
        def __exit__(self, *error: object) -> None:
            interrupt.cancel()

    dist.all_reduce(np.ones(3), async_op=True)
    monkeypatch.setattr(group.current, "issue_lock", Ended())
    dist.all_reduce(np.ones(3), async_op=True)
    await_sender()
    assert group.status.collective_seq == 2
