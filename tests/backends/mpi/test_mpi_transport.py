"""MPI's errors, and requests that are abandoned; MPI itself is not loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.messaging.transport import Received
from rankscope.backends.mpi import transport as module
from rankscope.backends.mpi.transport import MPITransport


class _Failure(Exception):
    """What mpi4py raises."""

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def Get_error_class(self) -> int:
        return self.kind

    def Get_error_string(self) -> str:
        return "MPI_ERR_OTHER: known error not in list"


def _transport(dead: list[int]) -> MPITransport:
    mpi = SimpleNamespace(
        Exception=_Failure,
        ERR_PROC_FAILED=75,
        BYTE=None,
        ANY_SOURCE=-2,
        ANY_TAG=-1,
        TAG_UB=4,
        Status=lambda: None,
    )
    failed = SimpleNamespace(Translate_ranks=lambda ranks, members: dead)
    comm = SimpleNamespace(Get_failed=lambda: failed, Get_group=lambda: None)
    collectives = SimpleNamespace(Get_attr=lambda key: 2**31 - 1)
    return MPITransport(mpi, comm, collectives)


def test_a_dead_rank_that_mpi_knows_is_the_culprit() -> None:
    reason = _transport([1, 3]).explain(_Failure(75))
    assert isinstance(reason, dist.DistBackendError)
    assert str(reason) == "the process of ranks 1, 3 died"
    assert reason.culprits == (1, 3)


def test_a_death_of_which_mpi_does_not_know_the_rank() -> None:
    assert str(_transport([]).explain(_Failure(75))) == "the process of a rank died"


def test_other_errors() -> None:
    transport = _transport([])
    assert transport.explain(_Failure(16)) == (
        "MPI reports MPI_ERR_OTHER: known error not in list"
    )
    assert transport.explain(ZeroDivisionError()) is None


class _Request:
    """A request that is over: a test of it does what the test wants, too."""

    def __init__(self, on_test: Callable[[], object] = lambda: None) -> None:
        self._on_test = on_test

    def Test(self) -> bool:
        self._on_test()
        return True


def _abandon(*requests: _Request) -> None:
    _transport([]).abandon([(request, np.zeros(3), False) for request in requests])


@pytest.fixture
def abandoned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests and the memory that are kept."""
    kept: list[Any] = []
    monkeypatch.setattr(module, "_abandoned", kept)
    return kept


def test_an_abandoned_request_is_tested_by_one_thread_at_a_time(
    abandoned: list[Any],
) -> None:
    tested: list[int] = []
    inside, go_on = threading.Event(), threading.Event()

    def on_test() -> None:
        tested.append(threading.get_ident())
        if len(tested) == 1:
            inside.set()
            assert go_on.wait(30)

    thread = threading.Thread(target=_abandon, args=[_Request(on_test)])
    thread.start()
    assert inside.wait(30)
    try:
        _abandon(_Request())
    finally:
        kept = [*abandoned]
        go_on.set()
        thread.join(30)
    assert len(kept) == 2
    _abandon()
    assert tested == [thread.ident]
    assert abandoned == []


def test_a_message_that_an_interrupt_comes_after_is_not_lost() -> None:
    looked: list[int] = []
    begun: list[Any] = []

    def begin(into: list[Any]) -> _Request:
        begun.append(into[0])
        if len(begun) == 1:
            raise KeyboardInterrupt
        return _Request()

    def probe(source: int, tag: int, status: Any) -> Any:
        looked.append(tag)
        return SimpleNamespace(Irecv=begin)

    transport = _transport([])
    status = SimpleNamespace(
        Get_count=lambda _: 24, Get_tag=lambda: 7, Get_source=lambda: 1
    )
    transport._new_status = lambda: status
    transport._comm.Improbe = probe
    array = np.zeros(3)
    receive = transport.receive(array, 1, 7)
    with pytest.raises(KeyboardInterrupt):
        transport.test(receive)
    assert transport.test(receive)
    assert transport.fits(receive, 24, 7)
    assert looked == [7]
    assert begun == [array, array]


def test_a_message_of_another_size_is_not_read() -> None:
    transport = _transport([])
    status = SimpleNamespace(
        Get_count=lambda _: 40, Get_tag=lambda: 7, Get_source=lambda: 1
    )
    transport._new_status = lambda: status
    transport._comm.Improbe = lambda *_: SimpleNamespace()
    receive = transport.receive(np.zeros(3), 1, 7)
    assert transport.test(receive)
    assert not transport.fits(receive, 24, 7)
    assert transport.received(receive) == Received(1, 40, 7)
