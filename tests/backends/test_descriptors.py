"""Descriptors that run out: an error that says what to do, no abort of a library."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from rankscope.backends.descriptors import allow_descriptors
from rankscope.backends.errors import DistNetworkError
from rankscope.backends.stores.tcp import TCPStore


@pytest.fixture
def limits() -> Iterator[int]:
    """The limit that may be had; both are put back, as far as that is allowed."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def leave(count: int, hard: int) -> None:
    """Let this process open `count` more descriptors."""
    now = len(os.listdir("/dev/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (now + count, hard))


def test_the_limit_is_raised_to_what_may_be(limits: int) -> None:
    leave(3, limits)
    assert allow_descriptors(2)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] < limits
    assert allow_descriptors(100)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 100


def test_a_store_without_descriptors_is_an_error(
    limits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(5, limits)
    # As where the system allows no more.
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    with pytest.raises(DistNetworkError, match=r"no 20 file descriptors .*ulimit -n"):
        TCPStore("127.0.0.1", 0, is_master=True, key=b"key")
    monkeypatch.undo()
