"""A rank of a real run, of our groups or of torch's: the program of late_jobs.py.

Its arguments: the loop, steps, a seed, the injected sleep, the folder for its records.
The line of each joint op has its name as a comment, by which a finding is judged.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

if os.environ.get("LATE_TORCH"):
    import torch
    import torch.distributed as dist
else:
    import rankscope as dist


def array(count: int) -> Any:
    """Return an array, or a tensor, of ones."""
    if os.environ.get("LATE_TORCH"):
        return torch.ones(count)
    return np.ones(count, np.float32)


def work(ms: float) -> None:
    """Keep the core busy in Python for about so long."""
    end = time.perf_counter() + ms / 1e3
    while time.perf_counter() < end:
        pass


class Rank:
    """What a loop needs: who it is, its noise, and what is injected."""

    def __init__(self, steps: int, seed: int, sleeps: str) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.steps = steps
        self.rng = random.Random(1000 * seed + self.rank)
        # One of: "", "one:2:10", "two:1,3:10", "turns::10"; ms are last.
        self.how, who, ms = (sleeps or "::0").split(":")
        self.late = {int(one) for one in who.split(",") if one}
        self.ms = float(ms)
        self.small, self.large = array(1000), array(100_000)

    def is_late(self, step: int) -> bool:
        """Return whether the rank sleeps in this step."""
        if self.how == "turns":
            return step % self.size == self.rank
        return self.rank in self.late

    def compute(self, ms: float = 1.0) -> None:
        """Work for about `ms`, unevenly, by less than what is worth a word."""
        work(ms * self.rng.lognormvariate(0.0, 0.2))

    def inject(self, step: int) -> None:
        """Sleep if it is this rank's turn."""
        if self.is_late(step):
            time.sleep(self.ms / 1e3)  # injected

    def batches(self) -> Iterator[int]:
        """Load what a step needs."""
        for step in range(self.steps):
            self.inject(step)
            yield step


def only_all_reduce(me: Rank) -> None:
    """One op after the other, with nothing between."""
    for step in range(me.steps):
        me.inject(step)
        dist.all_reduce(me.small)  # joint


def compute_and_reduce(me: Rank) -> None:
    """Work, then an op."""
    for step in range(me.steps):
        me.compute(3.0)
        me.inject(step)
        dist.all_reduce(me.small)  # joint


def data_loader(me: Rank) -> None:
    """Data, work, then an op."""
    for _ in me.batches():
        me.compute(3.0)
        dist.all_reduce(me.large)  # joint


def buckets(me: Rank) -> None:
    """As DDP: asynchronous ops while the rank computes, then waits."""
    for step in range(me.steps):
        me.inject(step)
        works = []
        for _ in range(4):
            me.compute(1.0)
            works.append(dist.all_reduce(me.large, async_op=True))  # joint
        for one in works:
            one.wait()


def callback(me: Rank) -> None:
    """Work in a callback at the end of each step."""

    def at_end(step: int) -> None:
        me.inject(step)

    for step in range(me.steps):
        me.compute(2.0)
        dist.all_reduce(me.small)  # joint
        at_end(step)


def barriers(me: Rank) -> None:
    """Work between barriers."""
    for step in range(me.steps):
        me.compute(1.0)
        me.inject(step)
        dist.barrier()  # joint


def several_groups(me: Rank) -> None:
    """Pairs, pairs across, and all."""
    groups = [
        [dist.new_group([i, i + 1]) for i in range(0, me.size, 2)],
        [dist.new_group([i, i + me.size // 2]) for i in range(me.size // 2)],
    ]
    tensor_parallel = groups[0][me.rank // 2]
    data_parallel = groups[1][me.rank % (me.size // 2)]
    for step in range(me.steps):
        for _ in range(2):
            me.compute(1.0)
            dist.all_reduce(me.small, group=tensor_parallel)  # joint
        me.inject(step)
        dist.all_reduce(me.large, group=data_parallel)  # joint
        dist.all_reduce(me.small)  # joint


def pipeline(me: Rank) -> None:
    """Stages that send forward and back; then one op of all."""
    for _ in range(me.steps):
        if me.rank:
            dist.recv(me.large, me.rank - 1)
        me.compute(2.0)
        if me.rank < me.size - 1:
            dist.send(me.large, me.rank + 1)
            dist.recv(me.large, me.rank + 1)
        me.compute(2.0)
        if me.rank:
            dist.send(me.large, me.rank - 1)
        dist.all_reduce(me.small)  # joint


def microbatches(me: Rank) -> None:
    """Stages of unequal length with two microbatches, sent without waiting at once."""
    for _ in range(me.steps):
        sent = []
        for _ in range(2):
            if me.rank:
                dist.irecv(me.large, me.rank - 1).wait()
            me.compute(2.0 + 4.0 * (me.rank == me.size - 1))
            if me.rank < me.size - 1:
                sent.append(dist.isend(me.large, me.rank + 1))
        for one in sent:
            one.wait()
        dist.all_reduce(me.small)  # joint


def experts(me: Rank) -> None:
    """Tokens go to experts of which the first has more, and works for longer."""
    for _ in range(me.steps):
        me.compute(1.0)
        parts = [5, *[1] * (me.size - 1)]
        tokens, mine = array(sum(parts)), [parts[me.rank]] * me.size
        got = array(sum(mine))
        dist.all_to_all_single(got, tokens, mine, parts)
        me.compute(2.0 * parts[me.rank])
        dist.all_to_all_single(tokens, got, parts, mine)
        dist.all_reduce(me.small)  # joint


def checkpoints(me: Rank) -> None:
    """Rank 0 writes a checkpoint now and then."""
    every = (2, 5, 10, 25)[me.steps % 4]
    for step in range(me.steps):
        me.compute(2.0)
        if me.rank == 0 and step % every == 0:
            me.compute(20.0)
        dist.all_reduce(me.small)  # joint
        dist.all_reduce(me.large)  # joint


def warm_up(me: Rank) -> None:
    """The first steps take long, on some ranks longer."""
    for step in range(me.steps):
        me.compute(1.0)
        if step < 3:
            me.compute(150.0 * (1 + me.rank) / (1 + step))
        dist.all_reduce(me.small)  # joint


def evaluation(me: Rank) -> None:
    """Rank 0 evaluates each ten steps; the others wait in a barrier."""
    for step in range(me.steps):
        me.compute(2.0)
        dist.all_reduce(me.large)  # joint
        if step % 10 == 9:
            if me.rank == 0:
                me.compute(30.0)
            dist.barrier()  # joint


def gathers(me: Rank) -> None:
    """Ops of several kinds, objects among them."""
    parts = [array(1000) for _ in range(me.size)]
    for step in range(me.steps):
        me.compute(1.0)
        me.inject(step)
        dist.all_gather(parts, me.small)  # joint
        me.compute(1.0)
        found: list[Any] = [None] * me.size
        dist.all_gather_object(found, {"loss": step})  # joint
        dist.broadcast(me.small, 0)
        if step % 5 == 0:
            dist.reduce(me.small, 0)


def coalesced(me: Rank) -> None:
    """Small ops as one, in a block."""
    parts = [array(1000) for _ in range(3)]
    for step in range(me.steps):
        me.compute(2.0)
        me.inject(step)
        with dist._coalescing_manager():  # joint
            for part in parts:
                dist.all_reduce(part)  # joint
        dist.all_reduce(me.large)  # joint


def halves(me: Rank) -> None:
    """An asynchronous op of each half, while the rank computes; then one of all."""
    half = me.size // 2
    groups = [dist.new_group([*range(half)]), dist.new_group([*range(half, me.size)])]
    for step in range(me.steps):
        mine = groups[me.rank // half]
        work = dist.all_reduce(me.large, group=mine, async_op=True)  # joint
        me.compute(2.0)
        work.wait()
        me.inject(step)
        dist.all_reduce(me.small)  # joint


def ddp(me: Rank) -> None:
    """DDP of torch: its gradients are reduced by C++."""
    layers = [torch.nn.Linear(200, 200) for _ in range(6)]
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*layers), bucket_cap_mb=0.2
    )
    for step in range(me.steps):
        me.inject(step)
        model(torch.ones(8, 200)).sum().backward()  # joint
        dist.all_reduce(me.small)  # joint


LOOPS: dict[str, Callable[[Rank], None]] = {
    one.__name__: one
    for one in (
        *(only_all_reduce, compute_and_reduce, data_loader, buckets, callback),
        *(barriers, several_groups, pipeline, checkpoints, warm_up, evaluation),
        *(gathers, microbatches, experts, coalesced, halves, ddp),
    )
}


def main() -> None:
    """Run a loop, and leave the records."""
    loop, steps, seed, sleeps, folder = sys.argv[1:]
    dist.init_process_group(os.environ.get("LATE_TORCH") or None)
    me = Rank(int(steps), int(seed), sleeps)
    LOOPS[loop](me)
    from rankscope.backends.hang_report.last_line import last_ops

    records = json.dumps(last_ops(20_000))
    Path(folder, f"{me.rank}.json").write_text(records, encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
