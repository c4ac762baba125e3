"""Tensors of torch's float8 on NCCL: their bytes, with a dtype that cupy lacks."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.devices.arrays import Float8, Float8Array, native
from rankscope.backends.work.flight_recorder import recorder
from tests.backends.gpu_ranks import Rank, Ranks
from tests.backends.gpu_simulation import Simulation

E4M3, BYTES = Float8("float8_e4m3fn"), 1


def tensor(r: Rank, values: Any) -> Float8Array:
    return Float8Array(r.array(values, np.uint8), E4M3)


def test_bytes_are_moved(ranks: Ranks, simulation: Simulation) -> None:
    ranks.start(2)

    def body(r: Rank) -> list[Any]:
        mine = tensor(r, [r.rank + 1] * 4)
        gathered, swapped = tensor(r, [0] * 8), tensor(r, [0] * 4)
        dist.all_gather_into_tensor(gathered, mine, group=r.pg)
        dist.all_to_all_single(swapped, mine, group=r.pg)
        dist.broadcast(mine, 1, group=r.pg)
        r.synchronize()
        return [list(gathered._bytes), list(swapped._bytes), list(mine._bytes)]

    assert ranks(body) == [[[1] * 4 + [2] * 4, [1, 1, 2, 2], [2] * 4]] * 2


@pytest.mark.parametrize(("name", "number"), [("e4m3fn", 10), ("e5m2", 11)])
def test_they_are_reduced_as_what_they_are(
    ranks: Ranks, simulation: Simulation, name: str, number: int
) -> None:
    ranks.start(1)
    (r,) = ranks.ranks
    dtypes, all_reduce = [], simulation.nccl.all_reduce

    def noting(*arguments: Any) -> None:
        dtypes.append(arguments[3])
        all_reduce(*arguments)

    simulation.nccl.all_reduce = noting  # type: ignore[method-assign]
    x = Float8Array(r.array([1, 2], np.uint8), Float8(f"float8_{name}"))
    dist.all_reduce(x, group=r.pg)
    dist.all_reduce(x, dist.make_nccl_premul_sum(0.5), group=r.pg)
    assert dtypes == [number, number]
    record = recorder.records()[-1]
    assert record.as_dict()["dtypes"] == [f"float8_{name}"]


def test_what_cannot_reduce_them_is_named_before_anything_moves(
    ranks: Ranks, simulation: Simulation
) -> None:
    ranks.start(1)
    (r,) = ranks.ranks
    x = tensor(r, [1, 2])
    simulation.capability = (8, 0)
    match = "has compute capability 8.0, 9.0 is needed; convert it"
    with pytest.raises(TypeError, match=match):
        dist.all_reduce(x, group=r.pg)
    dist.broadcast(x, 0, group=r.pg)
    with pytest.raises(ValueError, match="has no ReduceOp.BAND"):
        dist.all_reduce(x, dist.ReduceOp.BAND, group=r.pg)
    assert r.pg.aborted is None


class Tensor:
    """As much of torch's as is looked at."""

    def __init__(self, dtype: str, strided: bool = False) -> None:
        self.dtype = dtype
        self.memory = np.zeros(8, np.uint8)[:: 2 if strided else 1]

    def view(self, dtype: Any) -> Any:
        assert dtype == BYTES
        return self.memory

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self) -> Any:
        raise BufferError("no such dtype")


Tensor.__module__ = "torch"


@pytest.mark.parametrize("strided", [False, True])
def test_tensors_of_torch_share_their_bytes(
    monkeypatch: pytest.MonkeyPatch, strided: bool
) -> None:
    def from_dlpack(array: Any) -> Any:
        return array if isinstance(array, np.ndarray) else array.__dlpack__()

    cupy = SimpleNamespace(ndarray=type("Array", (), {}), from_dlpack=from_dlpack)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(uint8=BYTES))
    x = Tensor("torch.float8_e5m2", strided)
    if strided:
        with pytest.raises(ValueError, match=r"pass x.contiguous\(\)"):
            native(x, "cuda", "tensor", "all_reduce")
        return
    taken = native(x, "cuda", "tensor", "all_reduce")
    assert (taken.dtype.name, taken.shape, taken.size) == ("float8_e5m2", (8,), 8)
    assert np.shares_memory(taken.reshape(2, 4)[1:]._bytes, x.memory)
    with pytest.raises(TypeError, match="cannot be shared with cupy"):
        native(Tensor("torch.float8_e4m3fnuz"), "cuda", "tensor", "all_reduce")
