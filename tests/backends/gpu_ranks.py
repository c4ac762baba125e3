"""Ranks on simulated GPUs, as threads of one process; see `gpu_simulation`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

import rankscope as dist
from rankscope.backends.groups.config import BackendConfig
from rankscope.backends.groups.process_group import ProcessGroup
from rankscope.backends.nccl import nccl4py
from tests.backends.gpu_simulation import DeviceArray, Simulation

__all__ = ["Rank", "Ranks"]


class Rank:
    """One rank: its process group, and functions for arrays on its device."""

    def __init__(self, simulation: Simulation, pg: ProcessGroup) -> None:
        self.simulation, self.pg = simulation, pg
        self.rank, self.size = pg.rank(), pg.size()

    def array(self, values: Any, dtype: Any = None) -> DeviceArray:
        return self.simulation.array(values, self.rank, dtype)

    def random(self, count: int, dtype: str, rank: int | None = None) -> DeviceArray:
        """Return the random input of `rank` (default: this rank) as `dtype`.

        The values are integers from 0 to 3, so that reductions are exact; every rank
        computes the same input of a `rank`.
        """
        place = self.rank if rank is None else rank
        generator = np.random.default_rng(17 + place)
        values = generator.integers(0, 4, count)
        if np.dtype(dtype).kind == "c":
            return self.array(values + 1j * generator.integers(0, 4, count), dtype)
        return self.array(values, dtype)

    def everybodys(self, count: int, dtype: str) -> list[np.ndarray]:
        """Return the random inputs of all ranks, in order of rank."""
        return [np.asarray(self.random(count, dtype, r)) for r in range(self.size)]

    def all_reduce(self, value: float = 1.0) -> dist.Work:
        """Issue an all_reduce of a new array of `value`; return the Work."""
        work = dist.all_reduce(self.array([value]), group=self.pg, async_op=True)
        assert work is not None
        return work

    def synchronize(self) -> None:
        """Wait until the current stream of the rank's device has no work."""
        self.simulation.synchronize(self.rank)


class Ranks:
    """The ranks of a test, which are threads of this process."""

    def __init__(self, simulation: Simulation, folder: Path) -> None:
        self.simulation, self.folder = simulation, folder
        self.ranks: list[Rank] = []
        self.stores: list[dist.FileStore] = []
        self.pool: ThreadPoolExecutor | None = None

    def start(self, size: int, timeout: float = 30, name: str = "g") -> Ranks:
        """Create `size` ranks of one group; `timeout` is the group's, in seconds."""
        path = str(self.folder / f"store-{name}")
        nccl4py.load()
        for rank in range(size):
            store = dist.FileStore(path, size)
            self.stores.append(store)
            with self.simulation.cuda.device(rank):
                pg = ProcessGroup(
                    name, range(size), rank, BackendConfig("cuda:nccl"), store, timeout
                )
            self.ranks.append(Rank(self.simulation, pg))
        self.pool = ThreadPoolExecutor(size)
        return self

    def __call__(self, body: Callable[[Rank], Any]) -> list[Any]:
        """Run `body` on every rank; return the results in order of rank.

        Raises the error of the rank that fails first, and `TimeoutError` after 60 s.
        """
        futures = self.futures(body)
        for future in as_completed(futures, timeout=60):
            future.result()
        return [future.result() for future in futures]

    def futures(self, body: Callable[[Rank], Any]) -> list[Any]:
        """Start `body` on every rank; return the futures in order of rank."""
        assert self.pool is not None

        def run(rank: Rank) -> Any:
            with self.simulation.cuda.device(rank.rank):
                return body(rank)

        return [self.pool.submit(run, rank) for rank in self.ranks]

    def close(self) -> None:
        """Shut down the groups, the threads and the stores."""
        for rank in self.ranks:
            rank.pg.shutdown()
        if self.pool is not None:
            self.pool.shutdown()
        for store in self.stores:
            store.close()
