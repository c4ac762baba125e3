"""Abort of a group over NCCL: torch's own, on a thread. A stand-in has NCCL's place.

No GPU is needed: only the backend of the group is a stand-in.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers "fake"

from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups.abort_reason import AbortReason
from rankscope.backends.torch_watch import aborting
from rankscope.backends.torch_watch.creation import made_of
from rankscope.backends.torch_watch.private.groups import Names

REASON = AbortReason("rank 1 has not entered", "the test", culprits=(1,))


class StandIn:
    """A backend that says it is NCCL, and whose abort does what a test says."""

    def __init__(self, abort: Callable[[], None], name: str) -> None:
        self._abort, self._name = abort, name
        self.threads: list[threading.Thread] = []

    def name(self) -> str:
        return self._name

    def abort(self) -> None:
        self.threads.append(threading.current_thread())
        self._abort()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A group of this process alone; torch's own fake backend opens nothing."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("fake", store=store, rank=0, world_size=1)
    made = dist.group.WORLD
    assert made is not None
    yield made
    dist.destroy_process_group()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StandIn]:
    """Puts a stand-in into the place of every backend."""

    def put(abort: Callable[[], None], name: str = "nccl") -> StandIn:
        backend = StandIn(abort, name)
        monkeypatch.setattr(Names, "backends", lambda self, group: {"cuda": backend})
        return backend

    return put


@pytest.mark.parametrize("name", ["nccl", "nccl2"])
def test_an_abort_that_blocks_is_not_waited_for_and_is_told_of(
    name: str,
    group: dist.ProcessGroup,
    stand_in: Callable[..., StandIn],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(aborting, "NCCL_WAIT", 0.05)
    freed = threading.Event()
    backend = stand_in(lambda: freed.wait() and None, name)
    assert aborting.abort(group, REASON, op="all_reduce", sequence_number=3)
    until(lambda: "has not returned after 0.05 s" in caplog.text, 10)
    (thread,) = backend.threads
    assert thread is not threading.main_thread()
    # The first reason of a generation holds, and torch is not called again.
    assert not aborting.abort(group, AbortReason("again", "the test"))
    assert made_of(group).aborted == REASON
    error = aborting.refusal(group, made_of(group), "broadcast")
    assert "rank 1 has not entered" in str(error)
    assert (error.op, error.culprits) == ("broadcast", (1,))
    freed.set()
    thread.join(10)
    assert not thread.is_alive()


def test_an_abort_that_fails_is_logged(
    group: dist.ProcessGroup,
    stand_in: Callable[..., StandIn],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise RuntimeError("no communicator")

    backend = stand_in(fail)
    with caplog.at_level(logging.ERROR):
        aborting.abort(group, REASON)
        until(lambda: backend.threads, 10)
        backend.threads[0].join(10)
    assert "torch's abort of group" in caplog.text
    assert "no communicator" in caplog.text


def test_another_backend_is_aborted_and_the_reason_says_that_it_may_go_on(
    group: dist.ProcessGroup, stand_in: Callable[..., StandIn]
) -> None:
    backend = stand_in(lambda: None, "xccl")
    aborting.abort(group, REASON)
    assert backend.threads == [threading.current_thread()]
    reason = made_of(group).aborted
    assert reason is not None
    assert reason.text.startswith("rank 1 has not entered; torch's abort of the ")
    assert "'xccl' (device cuda) may do nothing: interrupt the cell" in reason.text
