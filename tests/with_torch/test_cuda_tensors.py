"""CUDA tensors over the backend ``rankscope``: simulated GPUs, NCCL and cupy.

A tensor here says that it is on a GPU, and its memory is that of the host.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rankscope.backends.torch_backend.driving import future_of
from rankscope.backends.torch_backend.ops import Ops
from rankscope.backends.torch_backend.tensors import memory
from rankscope.backends.work.op_type import OpType
from tests.backends.conftest import simulation
from tests.backends.gpu_ranks import Rank, Ranks
from tests.backends.gpu_simulation import DeviceArray, Simulation

__all__ = ["simulation"]


class OnGpu(torch.Tensor):  # type: ignore[misc]
    """A tensor of the CPU that says it is on GPU `gpu`."""

    gpu: int

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), kwargs: Any = None
    ) -> Any:
        made = super().__torch_function__(function, types, arguments, kwargs or {})
        if isinstance(made, cls):
            made.gpu = arguments[0].gpu
        return made

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.gpu)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.gpu

    def __dlpack__(self, **_: Any) -> DeviceArray:
        array = self.as_subclass(torch.Tensor).numpy().view(DeviceArray)
        array.device = self.gpu
        return array


OnGpu.__module__ = "torch"  # as the library that messages and checks look for


def on_gpu(values: Any, gpu: int) -> OnGpu:
    made = torch.as_tensor(values).as_subclass(OnGpu)
    made.gpu = gpu
    return made


def host(tensor: torch.Tensor) -> Any:
    return tensor.as_subclass(torch.Tensor).tolist()


@pytest.fixture
def ranks(
    simulation: Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Ranks]:
    cupy = SimpleNamespace(
        ndarray=DeviceArray, from_dlpack=lambda one: one.__dlpack__()
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    made = Ranks(simulation, tmp_path).start(2)
    yield made
    made.close()


def ops_of(rank: Rank) -> Ops:
    ops = Ops()
    ops.group = rank.pg
    return ops


def test_ops_on_cuda_go_to_nccl_with_torchs_results(ranks: Ranks) -> None:
    def body(r: Rank) -> None:
        ops = ops_of(r)

        def of(values: Any, dtype: torch.dtype = torch.float32) -> OnGpu:
            return on_gpu(torch.as_tensor(values, dtype=dtype), r.rank)

        def done(work: Any) -> None:
            work.synchronize()

        x = of([r.rank + 1.0, 2.0])
        work = ops.allreduce([x])
        done(work)
        assert host(x) == [3.0, 4.0]
        assert work.result()[0] is x
        assert work.get_future().wait()[0] is x

        outputs = [of([0.0, 0.0]) for _ in range(2)]
        done(ops.allgather([outputs], [of([r.rank, 5.0])]))
        assert [host(one) for one in outputs] == [[0.0, 5.0], [1.0, 5.0]]

        y = of([0.0])
        done(ops._reduce_scatter_base(y, of([1.0, 10.0])))
        assert host(y) == [2.0 if r.rank == 0 else 20.0]

        z = of([0.0, 0.0])
        done(ops.alltoall_base(z, of([r.rank * 10.0, r.rank * 10.0 + 1]), [], []))
        assert host(z) == [float(r.rank), 10.0 + r.rank]

        # Only the bits of a dtype that numpy lacks move, and a transposed matrix as it
        # lies in memory.
        half = of([1.5, float(r.rank)], torch.bfloat16)
        done(ops.broadcast([half], 1))
        assert host(half) == [1.5, 1.0]
        dense = of([[0.0, 1.0], [2.0, 3.0 + r.rank]]).t()
        done(ops.allreduce([dense]))
        assert host(dense) == [[0.0, 4.0], [2.0, 7.0]]

    ranks(body)


def test_a_future_in_a_backward_pass_ends_when_the_gpu_has_ended(ranks: Ranks) -> None:
    """Its callbacks read the result, where wait() on a device orders a stream alone."""
    free = threading.Event()

    def hold() -> None:
        assert free.wait(30)

    def body(r: Rank) -> None:
        ops = ops_of(r)
        x = on_gpu(torch.ones(2), r.rank)
        done = torch.ones(1, requires_grad=True)
        seen: list[Any] = []

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            r.simulation.user_stream(r.rank).put(hold)
            work: Any = ops.allreduce([x])
            future = future_of(work.work, [x], False)
            future.then(lambda one: seen.append(host(one.value()[0])))
            threading.Timer(0.05, free.set).start()
            return gradient

        done.register_hook(hook)
        (done * 2).sum().backward()
        assert seen == [[2.0, 2.0]]

    ranks(body)


def test_a_tensor_of_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the tensor is on meta; .* CPU and on CUDA"):
        memory(torch.ones(2, device="meta"), OpType.ALL_REDUCE)


def test_a_gpu_without_cupy_is_told_what_to_install(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    first = ranks.ranks[0]
    before = np.ones(2)
    x = on_gpu(before, 0)
    with pytest.raises(
        TypeError, match=r"a torch tensor on CUDA\) needs cupy.*install"
    ):
        ops_of(first).allreduce([x])
    assert before.tolist() == [1.0, 1.0]
