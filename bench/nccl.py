"""NCCL: what an op costs the host, coalescing, aborts, rebuilds; on one GPU.

With one rank NCCL launches nothing for a sum in place, and an average op by op,
also in a group: what is compared there is the host's part. Two ranks that share
the GPU (`tests.gpu.ranks`) talk over loopback sockets: slower than any link, but
a group is one launch, and an op can hang.

PyTorch's figures for its coalescing manager, on its own machine: 22.19 ms and
2865 µs of CPU for 64 × 8 MiB before it captured ops in Python, 16.93 ms and
635 µs after, 16.38 ms and 131 µs for one flattened op.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import rankscope as dist

# Absolute names: the two ranks are given this file by its path.
from bench.table import Row, Sample
from rankscope.backends.conformance.ranks import Rank, RankFailure, run_ranks
from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups.config import BackendConfig
from rankscope.backends.groups.process_group import ProcessGroup
from rankscope.backends.groups.world import world as groups
from tests.gpu.ranks import aborted_meanwhile, world

__all__ = ["measure", "versions"]

OPS = 2000
ARRAYS, BYTES = 64, 8 << 20
ABORTS, HANGS = 10, 5
OURS, BARE, TORCHS = "rankscope", "nccl4py called bare", "torch's ProcessGroupNCCL"
#: Timeout in seconds of the two ranks, for all their measurements.
RANKS_TIMEOUT = 180
#: DESIGN §7, where a group is one launch: the CPU of single ops, the time of a
#: flat one; and the seconds in which an abort has ended what hung, and in which a
#: rebuilt group has done an op.
CPU_BUDGET, TIME_BUDGET, ABORT_BUDGET, REBUILD_BUDGET = 0.25, 1.1, 1.0, 2.0


def versions() -> dict[str, str]:
    """Return the GPU, its driver and the libraries; needs a usable NCCL."""
    import cupy
    from nccl import core

    device = cupy.cuda.Device()
    properties = cupy.cuda.runtime.getDeviceProperties(device.id)
    cuda = cupy.cuda.runtime.driverGetVersion()
    library = core.get_version().libnccl
    found = {
        "GPU": properties["name"].decode(),
        "driver": _driver(),
        "CUDA": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "NCCL": str(library.version) if library else "none",
        "nccl4py": importlib.metadata.version("nccl4py"),
        "cupy": cupy.__version__,
        "cuda-bindings": importlib.metadata.version("cuda-bindings"),
    }
    if importlib.util.find_spec("torch") is not None:
        found["torch beside it"] = importlib.metadata.version("torch")
    return found


def _driver() -> str:
    try:
        said = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    number = re.search(r"\d+\.\d+(\.\d+)?", said)
    return number[0] if number else "unknown"


def measure(
    found: dict[str, str],
    rounds: int,
    say: Callable[[str], None],
    left_out: Callable[[str], None],
) -> list[Row]:
    """Return all rows, and add the versions to those `found`; `say` each row.

    `left_out` is called with the reason where something cannot be measured.
    """
    rows: list[Row] = []

    def add(measured: Iterable[Row]) -> None:
        for row in measured:
            rows.append(row)
            shown = (row.what, row.ours, row.ratio, row.budget, row.verdict)
            say("  " + "; ".join(filter(None, shown)))

    reason = dist.unavailable_reason("nccl")
    if reason is not None:
        left_out(f"nccl: {reason}")
        return []
    found |= versions()
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        group = ProcessGroup("b", [0], 0, BackendConfig("cuda:nccl"), store, 60)
        try:
            add(_host(group, rounds, left_out))
            add(_coalescing("1 rank", group, rounds, None, None))
        finally:
            group.shutdown()
        add([_idle_aborts(store)])
        store.close()
    try:
        add(run_ranks(2, two_ranks, rounds, timeout=RANKS_TIMEOUT)[0])
    except RankFailure as failure:
        left_out(f"nccl, 2 ranks on one GPU: {failure}")
    return rows


# -- the host's part of an op -------------------------------------------------


def _host(group: ProcessGroup, rounds: int, note: Callable[[str], None]) -> list[Row]:
    import cupy

    x = cupy.ones(256, cupy.float32)
    synchronize = cupy.cuda.Device().synchronize
    times: dict[str, list[list[float]]] = {OURS: [], BARE: [], TORCHS: []}
    # Torch in a process of its own: where it is at work on the GPU, our streams
    # are ordered behind its stream as well.
    apart = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with apart, _bare(x) as bare:
        missing = apart.submit(_torch_lacks).result()
        if missing:
            note(f"{TORCHS}: {missing}")
            del times[TORCHS]
        for _ in range(rounds):
            ours = _per_call(lambda: dist.all_reduce(x, group=group), synchronize)
            times[OURS].append([ours])
            times[BARE].append([_per_call(bare, synchronize)])
            if not missing:
                times[TORCHS].append([apart.submit(_torch).result()])
    what = "NCCL all_reduce 1 KiB, 1 rank, nothing launched: host time of a call"
    return [
        Row.compare(f"{what}, against {name}", Sample(times[OURS]), Sample(rest), None)
        for name, rest in times.items()
        if name != OURS
    ]


def _per_call(call: Callable[[], Any], synchronize: Callable[[], Any]) -> float:
    for _ in range(OPS // 20):
        call()
    synchronize()
    began = time.perf_counter()
    for _ in range(OPS):
        call()
    took = time.perf_counter() - began
    synchronize()
    return took / OPS


@contextlib.contextmanager
def _bare(x: Any) -> Iterator[Callable[[], Any]]:
    import cupy
    from nccl import core

    comm = core.Communicator.init(1, 0, core.get_unique_id())
    stream = cupy.cuda.Stream(non_blocking=True)
    try:
        yield lambda: comm.allreduce(x, x, core.SUM, stream=stream)
    finally:
        stream.synchronize()
        comm.destroy()


def _torch_lacks() -> str:
    """Return why torch cannot use NCCL in this environment; empty if it can."""
    try:
        import torch
        import torch.distributed as theirs
    except ImportError:
        return "torch is not installed in this environment"
    if not torch.cuda.is_available() or not theirs.is_nccl_available():
        return "the torch of this environment cannot use NCCL"
    return ""


def _torch() -> float:
    import torch
    import torch.distributed as theirs

    theirs.init_process_group("nccl", store=theirs.HashStore(), rank=0, world_size=1)
    try:
        x = torch.ones(256, device="cuda")
        return _per_call(lambda: theirs.all_reduce(x), torch.cuda.synchronize)
    finally:
        theirs.destroy_process_group()


# -- coalescing ---------------------------------------------------------------


def _coalescing(
    where: str,
    group: ProcessGroup,
    rounds: int,
    cpu_budget: float | None,
    time_budget: float | None,
) -> list[Row]:
    """Three ways to reduce the same memory; CPU is that of the calling thread.

    An average of floats, since with one rank NCCL does nothing for a sum.
    """
    import cupy

    count = BYTES // 4
    flat = cupy.ones(ARRAYS * count, cupy.float32)
    arrays = [flat[i * count : (i + 1) * count] for i in range(ARRAYS)]

    def reduce(array: Any) -> None:
        dist.all_reduce(array, dist.ReduceOp.AVG, group=group)

    def single() -> None:
        for array in arrays:
            reduce(array)

    def coalesced() -> None:
        with dist.coalescing_manager(group):
            single()

    ways: dict[str, Callable[[], Any]] = {
        "coalesced": coalesced,
        "single": single,
        "one flat op": lambda: reduce(flat),
    }
    times: dict[str, list[list[float]]] = {name: [] for name in ways}
    cpu: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, run in ways.items():
            dist.barrier(group, device="cuda")
            cupy.cuda.Device().synchronize()
            began, began_cpu = time.perf_counter(), time.thread_time()
            run()
            cpu[name].append([time.thread_time() - began_cpu])
            cupy.cuda.Device().synchronize()
            times[name].append([time.perf_counter() - began])
    return [
        Row.compare(
            f"NCCL {ARRAYS} all_reduces of 8 MiB, {where}, coalesced: "
            f"{what}, against {other}",
            # The first round made NCCL load what it needs.
            Sample(measured["coalesced"][1:]),
            Sample(measured[other][1:]),
            budget,
        )
        for what, measured, other, budget in (
            ("CPU", cpu, "single", cpu_budget),
            ("CPU", cpu, "one flat op", None),
            ("time", times, "single", None),
            ("time", times, "one flat op", time_budget),
        )
    ]


# -- aborts, and what takes two ranks -----------------------------------------


def _idle_aborts(store: dist.FileStore) -> Row:
    import cupy

    took = []
    for number in range(ABORTS):
        group = ProcessGroup(
            f"abort{number}", [0], 0, BackendConfig("cuda:nccl"), store, 60
        )
        work = dist.all_reduce(cupy.ones(1 << 20), group=group, async_op=True)
        assert work is not None
        # After a mere wait() the abort could find it in flight.
        work.synchronize()
        began = time.perf_counter()
        group.abort("measured")
        took.append(time.perf_counter() - began)
    what = f"NCCL: abort of an idle communicator, 1 rank, {ABORTS} times"
    return Row.within(what, took, ABORT_BUDGET)


def two_ranks(me: Rank, rounds: int) -> list[Row]:
    """Return the rows of coalescing, hangs and rebuilds; two ranks share one GPU."""
    where = "2 ranks on one GPU"
    with world(me) as cupy:
        group = groups.get_group()
        rows = _coalescing(where, group, rounds, CPU_BUDGET, TIME_BUDGET)
        took, rebuilt = list[float](), list[float]()
        x = cupy.ones(1000)
        dist.all_reduce(x)
        cupy.cuda.Device().synchronize()
        for _ in range(HANGS):
            if me.rank == 0:
                with aborted_meanwhile(group, "measured") as began:
                    dist.all_reduce(x)
                    cupy.cuda.Device().synchronize()
                    took.append(time.monotonic() - began[0])
            else:
                until(lambda: group.aborted is not None, 60)
                took.append(0.0)
            began_rebuild = time.monotonic()
            dist.rebuild_process_group()
            dist.all_reduce(x)
            cupy.cuda.Device().synchronize()
            rebuilt.append(time.monotonic() - began_rebuild)
    hang = "NCCL: abort of an op that hangs → synchronize() is back"
    rebuild = "NCCL: rebuild → the first all_reduce is done, communicator included"
    return [
        *rows,
        Row.within(f"{hang}, {where}, {HANGS} times", took, ABORT_BUDGET),
        Row.within(f"{rebuild}, {where}, {HANGS} times", rebuilt, REBUILD_BUDGET),
    ]
