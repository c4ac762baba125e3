"""NCCL on one rank of a GPU: what an op costs the host, coalescing, aborts.

PyTorch's figures for its coalescing manager, on its own machine: 22.19 ms and
2865 µs of CPU for 64 × 8 MiB before it captured ops in Python, 16.93 ms and
635 µs after, 16.38 ms and 131 µs for one flattened op.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import rankscope as dist
from rankscope.backends.config import BackendConfig
from rankscope.backends.process_group import ProcessGroup

from .table import Row, Sample, duration

__all__ = ["measure"]

OPS = 2000
ARRAYS, BYTES = 64, 8 << 20
ABORTS = 10


def measure(rounds: int, note: Callable[[str], None]) -> list[Row]:
    """Every row, or none and a note why."""
    reason = dist.unavailable_reason("nccl")
    if reason is not None:
        note(f"nccl: {reason}")
        return []
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        group = ProcessGroup("b", [0], 0, BackendConfig("cuda:nccl"), store, 60)
        try:
            rows = _host(group, rounds, note)
            rows += _coalescing(group, rounds)
        finally:
            group.shutdown()
        rows.append(_aborts(store))
        store.close()
    return rows


def _host(group: ProcessGroup, rounds: int, note: Callable[[str], None]) -> list[Row]:
    import cupy

    x = cupy.ones(256, cupy.float32)
    contenders: dict[str, Callable[[], Any]] = {
        "rankscope": lambda: dist.all_reduce(x, group=group),
        "nccl4py called bare": _bare(x),
    }
    torchs = _torch(note)
    if torchs is not None:
        contenders["torch's ProcessGroupNCCL"] = torchs
    for run in contenders.values():
        _per_call(run, 100)
    times: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            times[name].append([_per_call(run, OPS)])
    ours = Sample(times.pop("rankscope"))
    return [
        Row.compare(
            f"NCCL all_reduce 1 KiB, 1 rank: host time of a call, against {name}",
            ours,
            Sample(theirs),
            None,
        )
        for name, theirs in times.items()
    ]


def _per_call(run: Callable[[], Any], count: int) -> float:
    import cupy

    cupy.cuda.Device().synchronize()
    began = time.perf_counter()
    for _ in range(count):
        run()
    took = time.perf_counter() - began
    cupy.cuda.Device().synchronize()
    return took / count


def _bare(x: Any) -> Callable[[], Any]:
    import cupy
    from nccl import core

    comm = core.Communicator.init(1, 0, core.get_unique_id())
    stream = cupy.cuda.Stream(non_blocking=True)
    return lambda: comm.allreduce(x, x, core.SUM, stream=stream)


def _torch(note: Callable[[str], None]) -> Callable[[], Any] | None:
    try:
        import torch
        import torch.distributed as theirs
    except ImportError:
        note("torch's ProcessGroupNCCL: torch is not installed in this environment")
        return None
    theirs.init_process_group("nccl", store=theirs.HashStore(), rank=0, world_size=1)
    x = torch.ones(256, device="cuda")
    return lambda: theirs.all_reduce(x)


def _coalescing(group: ProcessGroup, rounds: int) -> list[Row]:
    import cupy

    count = BYTES // 4
    flat = cupy.ones(ARRAYS * count, cupy.float32)
    arrays = [flat[i * count : (i + 1) * count] for i in range(ARRAYS)]

    def coalesced() -> None:
        with dist.coalescing_manager(group):
            for array in arrays:
                dist.all_reduce(array, group=group)

    def single() -> None:
        for array in arrays:
            dist.all_reduce(array, group=group)

    ways: dict[str, Callable[[], Any]] = {
        "coalesced": coalesced,
        "single": single,
        "one flat op": lambda: dist.all_reduce(flat, group=group),
    }
    time_: dict[str, list[list[float]]] = {name: [] for name in ways}
    cpu: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, run in ways.items():
            cupy.cuda.Device().synchronize()
            began, began_cpu = time.perf_counter(), time.thread_time()
            run()
            cpu[name].append([time.thread_time() - began_cpu])
            cupy.cuda.Device().synchronize()
            time_[name].append([time.perf_counter() - began])
    rows = []
    for other, limit in (("single", 0.25), ("one flat op", 1.1)):
        for what, times in (("CPU", cpu), ("time", time_)):
            # The first round made NCCL load what it needs.
            budget = limit if (what == "CPU") == (other == "single") else None
            rows.append(
                Row.compare(
                    f"NCCL 64 all_reduces of 8 MiB, coalesced: {what}, against {other}",
                    Sample(times["coalesced"][1:]),
                    Sample(times[other][1:]),
                    budget,
                )
            )
    return rows


def _aborts(store: dist.FileStore) -> Row:
    import cupy

    took = []
    for number in range(ABORTS):
        group = ProcessGroup(
            f"abort{number}", [0], 0, BackendConfig("cuda:nccl"), store, 60
        )
        dist.all_reduce(cupy.ones(1 << 20), group=group)
        cupy.cuda.Device().synchronize()
        began = time.perf_counter()
        group.abort("measured")
        took.append(time.perf_counter() - began)
    took.sort()
    return Row(
        f"NCCL: abort of a communicator, {ABORTS} times",
        f"{duration(took[len(took) // 2])} ({duration(took[-1])})",
        "",
        "",
        f"≤ {duration(1.0)}",
        took[-1] <= 1.0,
    )
