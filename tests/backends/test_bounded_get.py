"""Waits for a queue end, however short they are."""

from __future__ import annotations

import queue

import pytest

from rankscope.backends.bounded_get import bounded_get
from rankscope.backends.work.latch import Latch


@pytest.mark.parametrize("timeout", [-1.0, 0.0, 1e-6, 5e-6, 2e-5, 1e-3])
def test_a_short_wait_ends(timeout: float) -> None:
    # CPython 3.10 to 3.12 waited for ever in one of some thousand.
    for _ in range(1000):
        with pytest.raises(queue.Empty):
            bounded_get(queue.SimpleQueue(), timeout)
        assert not Latch().wait(timeout)


@pytest.mark.parametrize("timeout", [None, 0.0, 5e-6, 10.0])
def test_it_returns_what_is_there(timeout: float | None) -> None:
    items: queue.SimpleQueue[int] = queue.SimpleQueue()
    items.put(3)
    assert bounded_get(items, timeout) == 3
