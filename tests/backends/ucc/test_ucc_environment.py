"""The variables in which UCC finds its settings; UCC itself is not loaded."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.ucc import environment
from rankscope.backends.ucc.context import Context
from rankscope.backends.ucc.environment import in_environment


class Lock:
    """A lock that counts the calls of those who want it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls = 0

    def __enter__(self) -> None:
        self.calls += 1
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def variables() -> dict[str, str]:
    return {name: os.environ[name] for name in os.environ if "UCC_UCX_" in name}


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in variables():
        monkeypatch.delenv(name)


def test_groups_that_connect_at_once_read_their_own_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock = Lock()
    monkeypatch.setattr(environment, "_reading", lock)
    read: list[dict[str, str]] = []

    def other() -> None:
        with in_environment({"NET_DEVICES": "eth0", "TLS": "tcp"}):
            read.append(variables())

    thread = threading.Thread(target=other)
    with in_environment({"NET_DEVICES": "lo"}):
        thread.start()
        until(lambda: read or lock.calls == 2)
        assert variables() == {"UCC_UCX_NET_DEVICES": "lo"}
    thread.join(30)
    assert read == [{"UCC_UCX_NET_DEVICES": "eth0", "UCC_UCX_TLS": "tcp"}]
    assert variables() == {}


class Library:
    """What making a context calls of UCC: it reads variables, and the ranks meet."""

    handle = 0

    def __init__(self) -> None:
        self.read: dict[str, str] = {}

    def call(self, name: str, *arguments: Any) -> int:
        if name == "ucc_context_config_read":
            self.read = variables()
        elif name == "ucc_context_create":
            band, request = arguments[1]._obj.oob, ctypes.c_void_p()
            memory = ctypes.create_string_buffer(b"address")
            own = ctypes.addressof(memory)
            band.allgather(own, own, len(memory), None, ctypes.byref(request))
            until(lambda: band.req_test(request) == 0)
            band.req_free(request)
        return 0

    def ucc_context_config_release(self, config: Any) -> None:
        """Free nothing."""


def test_a_group_that_waits_for_its_ranks_keeps_no_other_from_connecting() -> None:
    """Ranks may connect two groups in different orders."""
    met: list[tuple[str, dict[str, str], bool]] = []

    def gather(name: str, own: bytes) -> Sequence[bytes]:
        met.append((name, variables(), environment._reading.locked()))
        return [own]

    library: Any = Library()
    Context(library, gather, 0, 1, "context of a test", {"NET_DEVICES": "lo"})
    assert library.read == {"UCC_UCX_NET_DEVICES": "lo"}
    assert met == [("context/1", {}, False)]
