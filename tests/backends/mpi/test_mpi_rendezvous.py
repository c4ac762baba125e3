"""mpi_rendezvous over a broadcast that the test ends; MPI itself is not loaded."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.mpi import rendezvous
from rankscope.backends.mpi.rendezvous import mpi_rendezvous

SENT = json.dumps(["10.0.0.7", 4711, "5ec2e7"]).encode()


class Broadcast:
    """A broadcast of rank 0; others receive once the test says so."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory, self.over = memory, False

    def come(self) -> None:
        self.memory[: len(SENT)] = np.frombuffer(SENT, np.uint8)
        self.over = True

    def Test(self) -> bool:
        return self.over


class World:
    """``MPI.COMM_WORLD`` of two processes, one of which is this one."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, 2
        self.broadcasts: list[Broadcast] = []

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Ibcast(self, buffer: list[Any], root: int) -> Broadcast:
        self.broadcasts.append(Broadcast(buffer[0]))
        return self.broadcasts[-1]


@pytest.fixture
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    """The world of the rank that is the test's parameter."""
    made = World(request.param)
    mpi = SimpleNamespace(
        COMM_WORLD=made, BYTE=None, get_vendor=lambda: ("Open MPI", (5, 0, 0))
    )

    def store(host: str, port: int, *_: Any, key: bytes, **__: Any) -> Any:
        return SimpleNamespace(host=host, port=port, key=key)

    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(made.rank))
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    monkeypatch.delenv("PMI_SIZE", raising=False)
    monkeypatch.setattr(rendezvous, "unavailable_reason", lambda: None)
    monkeypatch.setattr(rendezvous, "initialise", lambda: mpi)
    monkeypatch.setattr(rendezvous, "TCPStore", store)
    monkeypatch.setattr(rendezvous, "_pending", None)
    return made


def times_out() -> None:
    with pytest.raises(dist.DistNetworkTimeoutError, match="within 0 s"):
        mpi_rendezvous(0, b"key")


@pytest.mark.parametrize("world", [1], indirect=True)
def test_a_broadcast_that_timed_out_is_received_by_the_next_call(world: World) -> None:
    """Rank 0 makes one, and MPI writes to the memory of the first."""
    times_out()
    times_out()
    (broadcast,) = world.broadcasts
    broadcast.come()
    found = mpi_rendezvous(5, None)
    assert found is not None
    store: Any = found[0]
    assert (store.host, store.port, store.key.hex()) == ("10.0.0.7", 4711, "5ec2e7")
    assert found[1:] == (1, 2)
    times_out()  # the next rendezvous has a broadcast of its own
    assert len(world.broadcasts) == 2


@pytest.mark.parametrize("world", [0], indirect=True)
def test_rank_0_keeps_the_store_whose_address_it_broadcasts(world: World) -> None:
    times_out()
    (broadcast,) = world.broadcasts
    sent = broadcast.memory.tobytes()
    broadcast.over = True
    found = mpi_rendezvous(5, b"another key")
    assert found is not None
    store: Any = found[0]
    assert json.loads(sent.rstrip(b"\0")) == [store.host, store.port, store.key.hex()]
    assert len(world.broadcasts) == 1


@pytest.mark.parametrize("world", [0], indirect=True)
def test_the_mpiexec_of_another_library_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank was alone in a group of one, and went on without an error."""
    world.size = 1
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(dist.DistBackendError) as caught:
        mpi_rendezvous(5, None)
    assert "started 4 ranks, and Open MPI, the library" in str(caught.value)
    assert "set MASTER_ADDR and MASTER_PORT" in str(caught.value)
    assert world.broadcasts == []
    # A job of one rank, also within a larger one of another mpiexec.
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    times_out()
