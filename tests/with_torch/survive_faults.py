"""A training of 500 steps in which aborts and deaths come at random moments.

``python -m rankscope.run -n 3 --max-restarts 10 -m`` this module, and a folder.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rankscope.torch
from tests.with_torch import backend_training as training

STEPS, ABORTS, DEATHS = 500, 50, 10
#: From here on rank 2 lives, and what it and the launcher hold must not grow.
SETTLED = 100


class Faults:
    """What happens in which step, by a seed; each once, whatever process sees it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        chosen = random.Random(7)
        # The first two steps are those before DDP has its final buckets.
        aborts = [0, 1, *chosen.sample(range(2, STEPS), ABORTS - 2)]
        deaths = [0, 1, *chosen.sample(range(2, STEPS), DEATHS - 2)]
        self._faults: dict[int, list[tuple[str, int, float]]] = {}
        for name, steps in ("abort", aborts), ("death", deaths):
            for step in steps:
                rank = chosen.randrange(2 if step >= SETTLED else 3)
                fault = name, rank, chosen.uniform(0, 0.004)
                self._faults.setdefault(step, []).append(fault)

    def begin(self, step: int, rank: int) -> list[threading.Thread]:
        """Have this rank's faults of a step happen, each on a thread of its own."""
        threads = []
        for name, victim, moment in self._faults.get(step, ()):
            if victim == rank and self._is_first(f"{name}-{step}"):
                thread = threading.Thread(target=_happen, args=(name, moment))
                thread.start()
                threads.append(thread)
        return threads

    def _is_first(self, name: str) -> bool:
        try:
            (self._folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _happen(name: str, moment: float) -> None:
    time.sleep(moment)
    if name == "death":
        os.kill(os.getpid(), signal.SIGKILL)
    rankscope.torch.abort(reason="at random")


def held() -> list[int]:
    """Return the descriptors and KiB that this process has, and the launcher's."""
    both = psutil.Process(), psutil.Process(os.getppid())
    found = [(one.num_fds(), one.memory_info().rss >> 10) for one in both]
    return [number for one in found for number in one]


def main() -> None:
    """Train to the end; print what the test compares."""
    dist.init_process_group("rankscope")
    rank, faults = dist.get_rank(), Faults(Path(sys.argv[1]))
    model: Any = DistributedDataParallel(training.Net(), bucket_cap_mb=0.01)
    optimizer = training.adam(model)
    objects = id(model), id(model.process_group)
    step, joined, errors, at_first = 0, False, 0, held()
    while step < STEPS:
        threads: list[threading.Thread] = []
        try:
            if not joined:
                step, joined = rankscope.torch.rejoin(model, optimizer), True
            if step == SETTLED:
                at_first = held()
            threads = faults.begin(step, rank)
            training.do_step(model, optimizer, training.own(step))
            step += 1
        except rankscope.DistAbortedError:
            errors += 1
            rankscope.torch.rebuild()
            joined = False
        finally:
            for thread in threads:
                thread.join()
    assert objects == (id(model), id(model.process_group))
    flat = torch.cat([one.detach().flatten() for one in model.parameters()])
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(found, flat)
    assert all(torch.equal(one, flat) for one in found)
    print("errors", errors, "held", *at_first, *held())
    if rank == 2:
        print("difference", training.difference(model.module, STEPS))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
