"""The thread that drives queues: it naps, or sleeps on descriptors, and is woken."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.messaging.progress import Progress


class Driven:
    """A queue that is done after `needed` things have come."""

    def __init__(self, needed: int, has_descriptor: bool = True) -> None:
        self.waiting = set[int]()
        self.patient = False
        self.needed = needed
        self.bell = os.eventfd(0, os.EFD_NONBLOCK) if has_descriptor else None
        self.came = 0
        self.turns = self.armed = 0

    @property
    def busy(self) -> bool:
        return self.needed > 0

    def come(self) -> None:
        self.came += 1
        if self.bell is not None:
            os.eventfd_write(self.bell, 1)

    def advance(self) -> bool:
        self.turns += 1
        if not self.came:
            return False
        self.came -= 1
        self.needed -= 1
        return True

    def fileno(self) -> int | None:
        return self.bell

    def arm(self) -> bool:
        if self.came or self.bell is None:
            return False
        try:
            os.eventfd_read(self.bell)
        except BlockingIOError:
            pass
        if self.came:
            return False
        self.armed += 1
        return True


def _fewer(queue: Driven, needed: int) -> bool:
    return queue.needed < needed


@pytest.fixture
def progress() -> Iterator[Progress]:
    made = Progress()
    yield made
    made.stop()


@pytest.fixture
def driven() -> Iterator[list[Driven]]:
    queues: list[Driven] = []
    yield queues
    for queue in queues:
        if queue.bell is not None:
            os.close(queue.bell)


def test_what_comes_ends_the_sleep(progress: Progress, driven: list[Driven]) -> None:
    queue = Driven(needed=3)
    driven.append(queue)
    progress.add(queue)
    while queue.busy:
        needed = queue.needed
        until(lambda: progress._bell is not None)
        queue.come()
        until(partial(_fewer, queue, needed))


@pytest.mark.usefixtures("high_descriptors")
def test_it_sleeps_on_descriptors_that_select_does_not_take(
    progress: Progress, driven: list[Driven], caplog: pytest.LogCaptureFixture
) -> None:
    queue = Driven(needed=1)
    driven.append(queue)
    assert queue.bell is not None
    assert queue.bell > 1023
    progress.add(queue)
    until(lambda: queue.armed)
    queue.come()
    until(lambda: not queue.busy)
    # Else it logs the error, and looks again a while later.
    assert not caplog.records


def test_a_sleep_costs_no_turns(progress: Progress, driven: list[Driven]) -> None:
    queue = Driven(needed=1)
    driven.append(queue)
    progress.add(queue)
    until(lambda: progress._bell is not None)
    turns, since = queue.turns, time.monotonic()
    until(lambda: time.monotonic() - since > 0.3)
    # A loop of naps would have made a hundred.
    assert queue.turns - turns < 10
    queue.come()
    until(lambda: not queue.busy)


def test_a_queue_that_is_added_ends_the_sleep_of_others(
    progress: Progress, driven: list[Driven]
) -> None:
    first, second = Driven(needed=1), Driven(needed=1)
    driven += [first, second]
    progress.add(first)
    until(lambda: progress._bell is not None)
    second.come()
    progress.add(second)
    until(lambda: not second.busy)
    assert first.busy
    first.come()
    until(lambda: not first.busy)


def test_queues_without_a_descriptor_are_looked_at(
    progress: Progress, driven: list[Driven]
) -> None:
    silent, telling = Driven(needed=1, has_descriptor=False), Driven(needed=1)
    driven += [silent, telling]
    progress.add(silent)
    progress.add(telling)
    silent.came = 1
    until(lambda: not silent.busy)
    telling.come()
    until(lambda: not telling.busy)


def test_a_queue_with_a_waiter_is_left_to_it(
    progress: Progress, driven: list[Driven]
) -> None:
    waited, alone = Driven(needed=1), Driven(needed=1)
    driven += [waited, alone]
    waited.waiting.add(threading.get_ident())
    waited.come()
    progress.add(waited)
    alone.come()
    progress.add(alone)
    until(lambda: not alone.busy)
    assert waited.busy
    assert not waited.turns
    waited.waiting.clear()
    until(lambda: not waited.busy)


def test_a_thread_that_waited_for_long_tells_when_it_leaves(
    progress: Progress, driven: list[Driven]
) -> None:
    waited, added = Driven(needed=1), Driven(needed=1)
    driven += [waited, added]
    waited.waiting.add(threading.get_ident())
    waited.patient = True
    waited.come()
    progress.add(waited)
    until(lambda: progress._patient)
    added.come()
    progress.add(added)
    until(lambda: not added.busy)
    until(lambda: progress._patient)
    assert not waited.turns
    waited.waiting.clear()
    waited.patient = False
    progress.add(waited)
    until(lambda: not waited.busy)


def test_stop_ends_a_sleep(progress: Progress, driven: list[Driven]) -> None:
    queue = Driven(needed=1)
    driven.append(queue)
    progress.add(queue)
    until(lambda: progress._bell is not None)
    begun = time.monotonic()
    progress.stop()
    assert time.monotonic() - begun < 0.9
    assert not any(t.name == "rankscope-messages" for t in threading.enumerate())
