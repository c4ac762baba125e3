"""The benchmark: sizes as nccl-tests counts them, and results that are checked."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rankscope.backends.benchmark import (
    BENCHMARKS,
    Measurement,
    check_benchmark,
    parse_sizes,
    usual_device,
)
from rankscope.backends.benchmark_cases import array_module
from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.devices.cuda_install import install_command
from rankscope.backends.errors import DistBackendError
from rankscope.backends.work.op_type import payload


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1K", [1024]),
        ("4K,1M", [4096, 1 << 20]),
        ("1K:8K", [1024, 2048, 4096, 8192]),
        ("1k:5KiB", [1024, 2048, 4096]),
        ("16:1K:8", [16, 128, 1024]),
        ("1:2:1.5", [1]),
        ("4:8:1.1", [4, 5, 6, 7]),
        ("0.5K,1GB", [512, 1 << 30]),
        ("8,1K:2K", [8, 1024, 2048]),
    ],
)
def test_sizes(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "0",
        "-4",
        "4K:1K",
        "1K:4K:1",
        "1K:4K:0",
        "1K:4K:nan",
        "1:2:3:4",
        "1K,,2K",
    ],
)
def test_sizes_that_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected FIRST:LAST"):
        parse_sizes(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_redce", [4], "float32", 2), "expected one of all_reduce"),
        (("all_reduce", [4], "float32", 2, 0), "at least 1 iteration"),
        (("all_reduce", [4], "bool", 2), "dtype bool"),
        (("all_reduce", [3], "float32", 2), "needs at least 4 bytes"),
        (("all_reduce", [], "float32", 2), "no size at all"),
        (("all_to_all_single", [8], "float32", 4), "over 4 ranks needs at least 16"),
        (("batch_isend_irecv", [8], "float32", 1), "at least 2 ranks"),
    ],
)
def test_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_benchmark(*arguments)


@pytest.mark.parametrize(
    ("devices", "usual"),
    [(["cuda"], "cuda"), (["cpu"], "cpu"), (["cuda", "cpu"], "cpu")],
)
def test_the_device_is_the_backends(devices: list[str], usual: str) -> None:
    assert usual_device(devices) == usual


def test_without_cupy_there_are_no_arrays_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DistBackendError, match=re.escape(install_command())):
        array_module("cuda")


def test_without_a_gpu_there_are_no_arrays_on_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class CUDARuntimeError(RuntimeError):
        """As cupy's."""

    def get_device() -> int:
        raise CUDARuntimeError("cudaErrorNoDevice")

    runtime = SimpleNamespace(CUDARuntimeError=CUDARuntimeError, getDevice=get_device)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(DistBackendError, match=r"no GPU here .*NoDevice.*--device cpu"):
        array_module("cuda")


def _measure(me: Rank, backend: str, dtype: str) -> list[list[Measurement]]:
    import rankscope as dist
    from rankscope.backends.benchmark import benchmark
    from tests.backends import store_backend

    store_backend.register()
    with me.store() as store:
        dist.init_process_group(backend, store=store, rank=me.rank, world_size=me.size)
        found = [
            list(benchmark(op, [4096, 10_000], dtype=dtype, iterations=2, warmup=1))
            for op in BENCHMARKS
        ]
        dist.destroy_process_group()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("backend", ["tcp", "store"])
def test_every_op_is_right_and_counted(backend: str, dtype: str) -> None:
    size = 3
    for measured in run_ranks(size, _measure, backend, dtype):
        for op, found in zip(BENCHMARKS, measured, strict=True):
            itemsize = 4 if dtype == "float32" else 1
            for one, asked in zip(found, (4096, 10_000), strict=True):
                assert (one.op, one.dtype, one.wrong) == (op, dtype, 0)
                assert one.seconds > 0
                assert asked - size * itemsize < one.size <= asked
                given = [[one.count], [one.count]]
                if op == "all_to_all_single" or op == "reduce_scatter_tensor":
                    given[0] = [one.count * size]
                if op != "batch_isend_irecv":
                    assert payload(op, given, itemsize, size) == one.size


def _with_a_wrong_backend(me: Rank) -> list[int]:
    import rankscope as dist
    from rankscope.backends.benchmark import benchmark
    from tests.backends.store_backend import StoreBackend

    class Wrong(StoreBackend):
        """Its sums lack what the last rank gave."""

        def all_reduce(self, tensor: Any, op: dist.ReduceOp) -> dist.Work:
            if self.rank == self.size - 1:
                tensor.fill(0)
            return super().all_reduce(tensor, op)

    dist.Backend.register_backend("wrong", Wrong, devices=("cpu",))
    with me.store() as store:
        dist.init_process_group("wrong", store=store, rank=me.rank, world_size=me.size)
        found = list(benchmark("all_reduce", [400], iterations=1, warmup=0))
        dist.destroy_process_group()
    return [one.wrong for one in found]


@pytest.mark.processes
def test_wrong_elements_are_counted() -> None:
    # Of each five numbers that rank 1 gives, one is zero.
    assert run_ranks(2, _with_a_wrong_backend) == [[80], [80]]
