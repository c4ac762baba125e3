"""An ``alone`` test runs alone, and other tests do not delay it for ever."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.backends.conformance.waiting import until
from tests.turns import Turns


class Worker(threading.Thread):
    """Takes a turn, and keeps it until `end` is set."""

    def __init__(self, folder: Path, *, alone: bool) -> None:
        super().__init__()
        self.begun, self.end = threading.Event(), threading.Event()
        self._turns, self._alone = Turns(folder), alone

    def run(self) -> None:
        with self._turns.take(self._alone):
            self.begun.set()
            self.end.wait(30)
        self._turns.close()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[Worker]]:
    """One that is alone between two that are not; ended after the test."""
    made = [Worker(tmp_path, alone=alone) for alone in (False, True, False)]
    yield made
    for worker in made:
        worker.end.set()
        if worker.ident is not None:
            worker.join()


def entrance_is_taken(folder: Path) -> bool:
    with (folder / "entrance.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_tests_of_two_workers_run_at_once(workers: list[Worker]) -> None:
    first, _, second = workers
    first.start()
    second.start()
    assert first.begun.wait(30)
    assert second.begun.wait(30)


def test_one_that_is_alone_waits_and_is_waited_for(
    workers: list[Worker], tmp_path: Path
) -> None:
    first, alone, later = workers
    first.start()
    assert first.begun.wait(30)
    alone.start()
    until(lambda: entrance_is_taken(tmp_path))
    # It could run beside the first, but the one that is alone asked before it.
    later.start()
    assert not later.begun.wait(0.05)
    assert not alone.begun.is_set()
    first.end.set()
    assert alone.begun.wait(30)
    assert not later.begun.wait(0.05)
    alone.end.set()
    assert later.begun.wait(30)
