"""Object collectives over a backend of another device, and what they say.

The device is the simulated GPU of `gpu_simulation`, or one made here.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.collectives.arguments import Place, take_device
from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups.config import BackendConfig
from rankscope.backends.groups.process_group import ProcessGroup
from rankscope.backends.interface import staging
from tests.backends.gpu_ranks import Rank, Ranks
from tests.backends.gpu_simulation import Simulation
from tests.backends.manual import Manual


@pytest.fixture(autouse=True)
def moved(monkeypatch: pytest.MonkeyPatch, simulation: Simulation) -> list[int]:
    """Have 'cuda' mean the simulation; gives the devices that arrays were made on."""
    made: list[int] = []

    def to_device(host: np.ndarray, index: int | None) -> Any:
        made.append(simulation.cuda.current_device() or 0 if index is None else index)
        return simulation.array(host, made[-1])

    monkeypatch.setattr(staging, "_copies", {})
    dist.register_staging("cuda", np.array, np.copyto, to_device)
    return made


def of(rank: int) -> dict[str, Any]:
    return {"rank": rank, "text": "ä" * rank, "data": bytes(100 * rank)}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_objects_go_over_nccl_where_there_is_nothing_else(
    ranks: Ranks, moved: list[int], size: int
) -> None:
    def body(r: Rank) -> None:
        everybody: list[Any] = [None] * size
        dist.all_gather_object(everybody, of(r.rank), r.pg)
        assert everybody == [of(rank) for rank in range(size)]
        for root in range(size):
            some = [of(root), root] if r.rank == root else [None, None]
            dist.broadcast_object_list(some, root, r.pg)
            assert some == [of(root), root]
            rows: list[Any] | None = [None] * size if r.rank == root else None
            dist.gather_object(of(r.rank), rows, root, r.pg)
            assert rows is None or rows == everybody
            mine: list[Any] = [None]
            dist.scatter_object_list(
                mine, everybody if r.rank == root else None, root, r.pg
            )
            assert mine == [of(r.rank)]
        if r.rank == 0 and size > 1:
            dist.send_object_list([of(0), 5], 1, r.pg)
        elif r.rank == 1:
            received: list[Any] = [None, None]
            assert dist.recv_object_list(received, 0, r.pg) == 0
            assert received == [of(0), 5]

    ranks.start(size)(body)
    assert {*moved} == {*range(size)}


def test_the_bytes_are_read_when_the_device_is_done(
    ranks: Ranks, simulation: Simulation
) -> None:
    busy = threading.Event()

    def body(r: Rank) -> list[Any]:
        if r.rank == 0:
            simulation.compute(0, lambda: (busy.wait(30), None)[1])
            threading.Timer(0.3, busy.set).start()
        everybody: list[Any] = [None, None]
        dist.all_gather_object(everybody, of(r.rank), r.pg)
        return everybody

    assert ranks.start(2)(body) == [[of(0), of(1)]] * 2


def test_an_abort_raises_and_nothing_is_read(
    ranks: Ranks, simulation: Simulation
) -> None:
    def body(r: Rank) -> None:
        dist.barrier(group=r.pg)
        simulation.hangs.add(r.rank)
        everybody: list[Any] = ["as it was"] * 2
        with pytest.raises(dist.DistError) as caught:
            dist.all_gather_object(everybody, 1, r.pg)
        assert str(caught.value).startswith("all_gather_object: all_gather ")
        assert "no more" in str(caught.value)
        assert everybody == ["as it was"] * 2

    ranks.start(2)
    futures = ranks.futures(body)
    until(lambda: all(r.pg.status.collective_seq == 2 for r in ranks.ranks))
    ranks.ranks[0].pg.abort("no more")
    for future in futures:
        future.result(30)


def test_they_go_to_the_device_of_the_group_or_the_one_that_is_named(
    ranks: Ranks, simulation: Simulation, moved: list[int]
) -> None:
    (r,) = ranks.start(1).ranks
    dist.all_reduce(simulation.array([1.0], 2), group=r.pg)
    dist.all_gather_object([None], 1, r.pg)
    assert {*moved} == {2}
    moved.clear()
    dist.broadcast_object_list([1], 0, r.pg, device="cuda:5")
    dist.broadcast_object_list([1], 0, r.pg, SimpleNamespace(type="cuda", index=5))
    assert {*moved} == {5}
    moved.clear()
    dist.broadcast_object_list([1], 0, r.pg, device="cuda")
    assert {*moved} == {2}


def test_what_nccl_has_not_is_refused_before_anything_is_sent(
    ranks: Ranks, simulation: Simulation
) -> None:
    def body(r: Rank) -> None:
        with pytest.raises(ValueError, match="recv_object_list: .*any rank; give src"):
            dist.recv_object_list([None], group=r.pg)
        with pytest.raises(ValueError, match="send_object_list: .*tag=3.*no tags"):
            dist.send_object_list([1], 1 - r.rank, r.pg, tag=3)
        everybody: list[Any] = [None, None]
        dist.all_gather_object(everybody, r.rank, r.pg)
        assert everybody == [0, 1]

    ranks.start(2)(body)
    assert {"send", "recv"}.isdisjoint(name for name, _ in simulation.calls)


# -- which backend, and what is said -------------------------------------------


@pytest.fixture
def both(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Rank 0 of 4 over `Manual`, for cpu and cuda."""
    return group


@pytest.mark.parametrize(
    ("device", "place"),
    [
        (None, "cpu"),
        ("cpu", "cpu"),
        ("cuda", "cuda"),
        ("cuda:0", "cuda"),
        (SimpleNamespace(type="cpu", index=None), "cpu"),
        (SimpleNamespace(type="cuda", index=0), "cuda"),
    ],
)
def test_device_picks_the_backend(
    both: dist.ProcessGroup, device: Any, place: str
) -> None:
    def end() -> None:
        for _ in range(2):
            until(lambda: Manual.made and Manual.made[0].works)
            Manual.made[0].works.pop().mark_completed()

    thread = threading.Thread(target=end)
    thread.start()
    dist.send_object_list([1], 1, device=device)
    thread.join()
    assert [*both.current.backends] == [place]


def test_a_device_without_a_backend_is_named(both: dist.ProcessGroup) -> None:
    for call in (
        lambda: dist.broadcast_object_list([1], 0, device="metal:1"),
        lambda: dist.send_object_list([1], 1, device="metal:1"),
        lambda: dist.recv_object_list([1], 1, device="metal:1"),
    ):
        with pytest.raises(
            ValueError,
            match=r"_object_list in group 'default' on rank 0: device='metal:1': no "
            "backend for device type 'metal'; the group has cpu:manual,cuda:manual",
        ):
            call()
    assert Manual.made == []


@pytest.mark.parametrize("device", [0, "cuda:", "cuda:x", "", SimpleNamespace(type=2)])
def test_what_is_no_device_is_refused(both: dist.ProcessGroup, device: Any) -> None:
    with pytest.raises(ValueError, match="device=.*expected a device type such as"):
        dist.send_object_list([1], 1, device=device)
    with pytest.raises(ValueError, match="barrier in group .*: device="):
        dist.barrier(device=device)


@pytest.mark.parametrize(
    "device", ["cuda", "cuda:0", SimpleNamespace(type="cuda", index=0)]
)
def test_barrier_takes_the_type_of_a_device(
    both: dist.ProcessGroup, device: Any
) -> None:
    dist.barrier(async_op=True, device=device)
    assert [*both.current.backends] == ["cuda"]


def test_a_coalescing_block_is_no_place_for_objects(both: dist.ProcessGroup) -> None:
    # Nothing is sent before its end, and the sizes have to be.
    for call in (
        lambda: dist.broadcast_object_list([1], 0),
        lambda: dist.all_gather_object([None] * both.size(), 1),
        lambda: dist.send_object_list([1], 1),
    ):
        with (
            pytest.raises(ValueError, match="call it before or after the block"),
            dist.coalescing_manager(),
        ):
            call()
    assert not both.current.busy


def test_devices_are_read(both: dist.ProcessGroup) -> None:
    where = Place("here", both)
    assert take_device("cuda", where) == ("cuda", None)
    assert take_device("cuda:12", where) == ("cuda", 12)
    assert take_device(SimpleNamespace(type="cuda"), where) == ("cuda", None)


def test_an_op_that_the_backend_lacks_names_the_call(both: dist.ProcessGroup) -> None:
    with pytest.raises(
        NotImplementedError,
        match="^broadcast_object_list: backend 'manual' does not implement broadcast",
    ):
        dist.broadcast_object_list([1], 0)
    with pytest.raises(ValueError, match="^all_gather_object in group 'default'"):
        dist.all_gather_object([None], 1)


def on_device(group: dist.ProcessGroup, config: str) -> dist.ProcessGroup:
    return ProcessGroup("h", [0], 0, BackendConfig(config), group.store, 30)


def test_arrays_that_nobody_can_make_are_asked_for(both: dist.ProcessGroup) -> None:
    alone = on_device(both, "ext:manual")
    dist.register_staging("ext", np.array, np.copyto)
    with pytest.raises(
        dist.DistError,
        match="all_gather_object in group 'h' on rank 0: .* arrays of device type "
        r"'ext' is registered: call register_staging\(..., to_device=...\)",
    ):
        dist.all_gather_object([None], 1, alone)
    alone.shutdown()


def test_what_the_library_lacks_is_said_by_its_backend(
    both: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_copies", {})

    def lacking(*_: Any) -> Any:
        raise dist.DistBackendError("the library is not here: install it")

    dist.Backend.register_backend("lacking", lacking, devices="cuda")
    try:
        alone = on_device(both, "lacking")
        with pytest.raises(
            dist.DistBackendError,
            match="^all_gather_object: all_gather in group 'h' on rank 0: .*install it",
        ):
            dist.all_gather_object([None], 1, alone)
        alone.shutdown()
    finally:
        del dist.Backend.registry["lacking"]
