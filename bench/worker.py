"""One rank of one contender.

It runs under the Python of the library that it measures: this module imports the
standard library alone.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["CONTENDERS", "serve"]

_FOREVER = 1e6
# Ops before a block's clock starts: ranks get the request at different times.
WARM_UP = 2


class Contender:
    """float32 SUM all_reduce, in place, by one library."""

    def __init__(self, rank: int, size: int, folder: str) -> None:
        self.rank, self.size, self.folder = rank, size, folder
        self.array: Any = None
        self.dist: Any = None

    def allocate(self, count: int) -> Any:
        """Return an array of `count` float32, contents undefined."""
        import numpy as np

        return np.empty(count, dtype=np.float32)

    def op(self, variant: str) -> Callable[[], object]:
        """Return the call that all-reduces ``self.array`` once."""
        array, all_reduce = self.array, self.dist.all_reduce
        return lambda: all_reduce(array)

    def prepare(self, nbytes: int, variant: str) -> None:
        """Make the array of this size and check one result on it."""
        self.array = None
        gc.collect()
        self.array = self.allocate(nbytes // 4)
        self.array[:] = self.rank + 1
        self.op(variant)()
        expected = self.size * (self.size + 1) / 2
        for index in (0, len(self.array) // 2, -1):
            found = float(self.array[index])
            if found != expected:
                raise ValueError(f"element {index} is {found}, expected {expected}")
        # Repeated sums would overflow; zeros do not change.
        self.array[:] = 0


class Rankscope(Contender):
    """Rankscope's default, or another one of its backends."""

    def __init__(self, rank: int, size: int, folder: str, backend: str = "tcp") -> None:
        super().__init__(rank, size, folder)
        import rankscope as dist

        self.dist = dist
        dist.init_process_group(
            f"cpu:{backend}",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=size,
        )


class Torch(Contender):
    """torch.distributed's gloo backend, or ``rankscope`` over a `transport`."""

    def __init__(
        self, rank: int, size: int, folder: str, transport: str | None = None
    ) -> None:
        Contender.__init__(self, rank, size, folder)
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        name, options = "gloo", None
        if transport is not None:
            import rankscope.torch

            name, options = "rankscope", rankscope.torch.Options(transport)
        dist.init_process_group(
            name,
            init_method=f"file://{folder}/torch",
            rank=rank,
            world_size=size,
            pg_options=options,
        )

    def allocate(self, count: int) -> Any:
        return self.torch.empty(count, dtype=self.torch.float32)


class Training(Torch):
    """A step of DDP, or its all_reduces alone, besides a single one.

    Variants: ``step`` of a model that has `nbytes` of parameters, and
    ``communication``: all_reduces of buckets as DDP makes them of such a model.
    """

    def prepare(self, nbytes: int, variant: str) -> None:
        self.torch.set_num_threads(1)
        if variant == "":
            super().prepare(nbytes, variant)
        elif variant == "step":
            self._make_model(nbytes)
        else:
            first, other = 1 << 20, 25 << 20
            sizes = [first, *[other] * ((nbytes - first) // other)]
            sizes.append(nbytes - sum(sizes))
            self.buckets = [self.torch.zeros(one // 4) for one in sizes if one]

    def _make_model(self, nbytes: int) -> None:
        torch = self.torch
        width = 512 if nbytes <= 16 << 20 else 2048
        layers = range(nbytes // 4 // width**2)
        module = torch.nn.Sequential(
            *(torch.nn.Linear(width, width, bias=False) for _ in layers)
        )
        self.model = torch.nn.parallel.DistributedDataParallel(module)
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        self.batch = torch.randn(8, width)

    def op(self, variant: str) -> Callable[[], object]:
        if variant == "":
            return super().op(variant)
        return self._step if variant == "step" else self._reduce_buckets

    def _step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).pow(2).mean().backward()
        self.optimizer.step()

    def _reduce_buckets(self) -> None:
        all_reduce = self.dist.all_reduce
        for work in [all_reduce(one, async_op=True) for one in self.buckets]:
            work.wait()


class Coalescing(Rankscope):
    """64 arrays: one op each, one block for all, or one flat array."""

    COUNT = 64

    def prepare(self, nbytes: int, variant: str) -> None:
        if variant == "single":
            self.arrays: list[Any] = []
            self.array = None
            gc.collect()
            self.array = self.allocate(nbytes // 4 * self.COUNT)
            self.arrays = [self.allocate(nbytes // 4) for _ in range(self.COUNT)]
        arrays = [self.array] if variant == "flat" else self.arrays
        for array in arrays:
            array[:] = self.rank + 1
        self.op(variant)()
        for array in arrays:
            if float(array[-1]) != self.size * (self.size + 1) / 2:
                raise ValueError(f"{variant}: the last element is {array[-1]}")
            array[:] = 0

    def op(self, variant: str) -> Callable[[], object]:
        all_reduce, arrays = self.dist.all_reduce, self.arrays
        if variant == "flat":
            return super().op("")

        def single() -> None:
            works = [all_reduce(array, async_op=True) for array in arrays]
            for work in works:
                work.wait()

        def coalesced() -> None:
            with self.manager():
                for array in arrays:
                    all_reduce(array)

        return single if variant == "single" else coalesced

    def manager(self) -> Any:
        """Return the library's coalescing manager; the end of its block waits."""
        return self.dist.coalescing_manager()


class TorchCoalescing(Torch, Coalescing):
    """`Coalescing` with torch.distributed's gloo."""

    prepare, op = Coalescing.prepare, Coalescing.op

    def manager(self) -> Any:
        return self.dist._coalescing_manager()


class MPI(Rankscope):
    """Rankscope's MPI backend.

    Variants: all_reduce, and the two of OSU's micro-benchmarks that show a
    library's own cost: ``latency``, a message there and back, and
    ``bandwidth``, a window of messages and one small answer.
    """

    WINDOW = 16

    def __init__(self, rank: int, size: int, folder: str) -> None:
        super().__init__(rank, size, folder, "mpi")

    def prepare(self, nbytes: int, variant: str) -> None:
        if not variant:
            super().prepare(nbytes, variant)
            return
        self.array = self.allocate(max(1, nbytes // 4))
        self.answer = self.allocate(1)
        self.op(variant)()

    def op(self, variant: str) -> Callable[[], object]:
        if not variant:
            return self.reduction()
        array, other, first = self.array, 1 - self.rank, self.rank == 0
        send, recv, isend, irecv = self.messages()
        if variant == "latency":
            steps = (send, recv) if first else (recv, send)
            return lambda: [step(array, other) for step in steps]

        def window() -> None:
            start = isend if first else irecv
            self.wait([start(array, other) for _ in range(self.WINDOW)])
            (recv if first else send)(self.answer, other)

        return window

    def reduction(self) -> Callable[[], object]:
        return super().op("")

    def messages(self) -> tuple[Callable[..., Any], ...]:
        return self.dist.send, self.dist.recv, self.dist.isend, self.dist.irecv

    def wait(self, works: list[Any]) -> None:
        for work in works:
            work.wait()


class BareMPI(MPI):
    """mpi4py called as its documentation shows it."""

    def __init__(self, rank: int, size: int, folder: str) -> None:
        Contender.__init__(self, rank, size, folder)
        from mpi4py import MPI

        self.mpi, self.world = MPI, MPI.COMM_WORLD

    def reduction(self) -> Callable[[], object]:
        mpi, world, array = self.mpi, self.world, self.array
        return lambda: world.Allreduce(mpi.IN_PLACE, array)

    def messages(self) -> tuple[Callable[..., Any], ...]:
        return self.world.Send, self.world.Recv, self.world.Isend, self.world.Irecv

    def wait(self, works: list[Any]) -> None:
        self.mpi.Request.Waitall(works)


CONTENDERS: dict[str, Callable[[int, int, str], Contender]] = {
    "rankscope": Rankscope,
    "rankscope-gloo": partial(Rankscope, backend="gloo"),
    "rankscope-ucx": partial(Rankscope, backend="ucx"),
    "torch": Torch,
    "coalescing": Coalescing,
    "torch-coalescing": TorchCoalescing,
    "training-gloo": Training,
    "training-tcp": partial(Training, transport="tcp"),
    "training-ucx": partial(Training, transport="ucx"),
    "mpi": MPI,
    "bare-mpi": BareMPI,
}


def _cpu_ns() -> int:
    """Return the CPU ns of this process and its children, as the scheduler counts."""
    processes = [f"/proc/{os.getpid()}"]
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
            processes += [f"/proc/{pid}" for pid in file.read().split()]
    total = 0
    for process in processes:
        for task in os.listdir(f"{process}/task"):
            with open(f"{process}/task/{task}/schedstat", encoding="ascii") as file:
                total += int(file.read().split()[0])
    return total


def _run(contender: Contender, iterations: int, variant: str) -> dict[str, Any]:
    op = contender.op(variant)
    for _ in range(WARM_UP):
        op()
    times = []
    clock = time.perf_counter_ns
    cpu = _cpu_ns()
    for _ in range(iterations):
        start = clock()
        op()
        times.append(clock() - start)
    return {"times": times, "cpu": _cpu_ns() - cpu}


def _pin(rank: int) -> None:
    """Bind this thread to one core, in turn by rank; the library's threads stay free.

    Otherwise the kernel at times puts both of two ranks on the same core.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def serve(me: Any, name: str) -> None:
    """Do what requests say, on one rank: prepare arrays, or run a block of ops."""
    contender = CONTENDERS[name](me.rank, me.size, me.folder)
    _pin(me.rank)
    me.report({})
    while True:
        request = me.listen(_FOREVER)
        if "nbytes" in request:
            contender.prepare(**request)
            me.report({})
        else:
            me.report(_run(contender, **request))
