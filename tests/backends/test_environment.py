"""Who changes the environment waits for libraries that read it, but not for ever."""

from __future__ import annotations

import threading

import pytest

from rankscope.backends import environment
from rankscope.backends.conformance.waiting import until


def test_a_change_waits_for_those_who_read_and_new_readers_for_it() -> None:
    """MPI_Init on one thread crashed in getenv while UCX was loaded on another."""
    told: list[str] = []
    done, changed = threading.Event(), threading.Event()

    def change() -> None:
        told.append("waits")
        with environment.being_changed():
            told.append("changes")
            assert done.wait(20)
            told.append("changed")

    def read() -> None:
        assert changed.wait(20)
        with environment.being_read():
            told.append("reads")

    threads = [threading.Thread(target=one) for one in (change, read)]
    with environment.being_read():
        for one in threads:
            one.start()
        until(lambda: told)
        assert told == ["waits"]
    until(lambda: len(told) == 2)
    changed.set()
    done.set()
    for one in threads:
        one.join(20)
    assert told == ["waits", "changes", "changed", "reads"]


def test_a_change_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI_Init may wait for processes that never call it."""
    monkeypatch.setattr(environment, "PATIENCE", 0.01)
    with environment.being_read(), environment.being_changed():
        pass
