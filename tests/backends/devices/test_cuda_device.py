"""Which CUDA device a process has that names none for its arrays."""

from __future__ import annotations

import sys
import threading

import pytest

import rankscope as dist
from rankscope.backends.devices import cuda_device
from rankscope.backends.devices.cuda_device import chosen_device, local_device
from tests.backends.gpu_ranks import Ranks
from tests.backends.gpu_simulation import Simulation


def test_a_thread_that_chose_no_device_has_none(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_device, "_driver", simulation.cuda)
    assert chosen_device() is None
    with simulation.cuda.device(3):
        assert chosen_device() == 3
        monkeypatch.setattr(cuda_device, "_assigned", 5)
        assert chosen_device() == 5


def test_no_driver_is_asked_where_nothing_uses_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_device, "_driver", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    for name in ("cupy", "torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert chosen_device() is None
    # With cupy there, and no bindings of the driver.
    monkeypatch.setitem(sys.modules, "cupy", sys)
    assert chosen_device() is None


@pytest.mark.parametrize(
    ("local_rank", "count", "expected"),
    [
        ("3", 8, 3),
        ("3", 1, 0),  # the launcher shows each rank one GPU
        ("5", 4, 1),
        ("", 4, 0),
        ("3", 0, 0),
    ],
)
def test_a_process_without_a_device_gets_that_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, local_rank: str, count: int, expected: int
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert local_device(count) == expected


def test_a_rank_that_sees_one_gpu_uses_that(
    ranks: Ranks, simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(simulation.cuda, "device_count", lambda: 1)
    ranks.start(1)
    (r,) = ranks.ranks
    # A thread that never chose a device, as that which serves a peer's first message.
    thread = threading.Thread(target=lambda: dist.barrier(group=r.pg))
    thread.start()
    thread.join(30)
    assert r.pg.summary().devices["cuda"] == "nccl (device 0: running)"
