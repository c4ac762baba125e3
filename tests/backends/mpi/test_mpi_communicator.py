"""GroupRendezvous: a group is cancelled before, or after, all members have come."""

from __future__ import annotations

import contextlib
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import rankscope as dist
from rankscope.backends.conformance.waiting import until
from rankscope.backends.mpi import communicator
from rankscope.backends.mpi.communicator import GroupRendezvous
from rankscope.backends.mpi.transport import MPITransport

OTHER = {"world_rank": 1, "job": "", "tag": 7, "saw_death": False}


class Watched(dist.HashStore):
    """Cancels the rendezvous when it asks for the decision, after which it is lost."""

    rendezvous: GroupRendezvous | None = None
    closed = lost = False

    def get(self, key: str, timeout: Any = None) -> bytes:
        if self.lost:
            raise dist.DistStoreError("the store is lost")
        if key == "decision" and self.rendezvous is not None:
            cancel(self.rendezvous)
            self.lost = True
        return super().get(key, timeout)

    def close(self) -> None:
        self.closed = True


def cancel(rendezvous: GroupRendezvous) -> None:
    """Cancel, and wait until that is published."""
    rendezvous.cancel()
    until(lambda: "rankscope-mpi-cancel" not in {t.name for t in threading.enumerate()})


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The lists of members of which communicators were made."""
    mpi = SimpleNamespace(
        COMM_WORLD=SimpleNamespace(Get_rank=lambda: 0),
        BYTE=0,
        ANY_SOURCE=-1,
        ANY_TAG=-1,
        TAG_UB=0,
        ERRORS_RETURN=0,
        Exception=RuntimeError,
        Status=object,
    )
    members: list[Any] = []

    def make(_: Any, found: Any, place: int) -> Any:
        if place == 0:
            members.append(found)
        return SimpleNamespace(
            Set_errhandler=lambda _: None, Get_attr=lambda _: 2**31 - 1
        )

    monkeypatch.delenv("PMIX_NAMESPACE", raising=False)
    monkeypatch.setattr(communicator, "initialise", lambda: mpi)
    monkeypatch.setattr(communicator, "check_job", lambda *_: None)
    monkeypatch.setattr(communicator, "_saw_death", lambda _: False)
    monkeypatch.setattr(communicator, "making_communicator", contextlib.nullcontext)
    monkeypatch.setattr(communicator, "_make_communicator", make)
    return members


def store_with_the_other() -> Watched:
    store = Watched()
    store.set("rank/1", json.dumps(OTHER))
    store.add("present", 1)
    return store


def test_a_rank_that_is_cancelled_after_all_have_come_takes_part(
    made: list[Any],
) -> None:
    """The others are inside MPI, and would never leave it."""
    store = store_with_the_other()
    rendezvous = GroupRendezvous(store, 0, 2)
    store.rendezvous = rendezvous
    assert isinstance(rendezvous.connect(), MPITransport)
    ((first, second),) = made
    assert (first["world_rank"], second) == (0, OTHER)
    assert not store.closed


def test_a_group_that_is_cancelled_before_is_not_made(made: list[Any]) -> None:
    store = store_with_the_other()
    rendezvous = GroupRendezvous(store, 0, 2)
    cancel(rendezvous)
    assert rendezvous.connect() is None
    assert not made
    assert store.closed


def test_a_cancellation_that_the_store_does_not_take_closes_it() -> None:
    """It ends the wait for the decision."""

    class Silent(Watched):
        def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
            raise dist.DistStoreError("the store does not answer")

    store = Silent()
    cancel(GroupRendezvous(store, 0, 2))
    assert store.closed
