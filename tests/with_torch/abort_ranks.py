"""What the ranks of test_abort.py run: ``abort_ranks.py PROGRAM RANK SIZE PORT``.

Each rank is a process with torch's gloo, a store of Rankscope's for the rebuilds and
for the order of events. A program returns what the test asserts, printed as JSON.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from rankscope.backends import TCPStore
from rankscope.backends.groups.abort_reason import AbortReason
from rankscope.backends.torch_watch import creation, errors
from rankscope.backends.torch_watch.aborting import abort
from rankscope.backends.torch_watch.private.groups import probe
from rankscope.backends.torch_watch.rebuilding import rebuild
from rankscope.torch import rewrap

WAIT = 60.0


class Rank:
    """One rank: its store, and what it has in common with the others."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        self.rank, self.size = rank, size
        self.store = TCPStore("127.0.0.1", port, is_master=False, timeout=WAIT)

    def init(self, **options: Any) -> None:
        """Make torch's default group over a file-free store of torch's own."""
        if self.rank == 0:
            served = dist.TCPStore(
                "127.0.0.1", 0, is_master=True, wait_for_workers=False
            )
            self.store.set("torch", str(served.port))
        else:
            port = int(self.store.get("torch"))
            served = dist.TCPStore(
                "127.0.0.1", port, is_master=False, wait_for_workers=False
            )
        dist.init_process_group(
            "gloo", store=served, rank=self.rank, world_size=self.size, **options
        )

    def meet(self, name: str) -> None:
        """Wait until every rank has come here."""
        self.store.set(f"meet/{name}/{self.rank}", b"1")
        self.store.wait([f"meet/{name}/{one}" for one in range(self.size)], WAIT)


class Aborter(threading.Thread):
    """Aborts a group once the main thread has been in one C call for a while."""

    def __init__(self, group: Any, reason: str) -> None:
        super().__init__(daemon=True)
        self.group, self.reason = group, reason
        self.at = 0.0
        self.start()

    def run(self) -> None:
        """Wait until the main thread is at one instruction five times in a row."""
        main = threading.main_thread().ident
        assert main is not None
        seen, times = None, 0
        while times < 5:
            time.sleep(0.02)
            frame = sys._current_frames()[main]
            here = (id(frame), frame.f_lasti)
            elsewhere = frame.f_code.co_filename.endswith(("threading.py", "wire.py"))
            times = times + 1 if here == seen and not elsewhere else 0
            seen = here
        self.at = time.monotonic()
        abort(self.group, AbortReason(self.reason, "the test"))


def descriptors() -> list[str]:
    """Return what this process has open."""
    found = []
    for one in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{one}").partition(":")[0])
        except FileNotFoundError:
            continue
    return sorted(found)


def threads() -> list[str]:
    """Return the names of this process's threads, those of other languages too."""
    found = []
    for one in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{one}/comm") as name:
                found.append(name.read().strip())
        except FileNotFoundError:
            continue
    return sorted(found)


class SharedStep(torch.optim.SGD):  # type: ignore[misc]
    """An optimizer that reduces in `step`, as those do that shard their state."""

    def step(self, closure: Any = None) -> None:
        for one in self.param_groups[0]["params"]:
            if one.grad is not None:
                dist.all_reduce(one.grad)
        super().step(closure)


def make_model() -> DistributedDataParallel:
    """Return a small model over the default group, equal on every rank."""
    torch.manual_seed(0)
    return DistributedDataParallel(
        torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
        )
    )


def ops(model: Any, optimizer: Any) -> dict[str, Callable[[], Any]]:
    """Return a call of each op, in which rank 0 waits for rank 1."""
    t = torch.ones(4)

    def step() -> None:
        for one in model.parameters():
            one.grad = torch.ones_like(one)
        optimizer.step()

    return {
        "all_reduce": lambda: dist.all_reduce(t),
        "broadcast": lambda: dist.broadcast(t, 1),
        "recv": lambda: dist.recv(t, 1),
        "reduce": lambda: dist.reduce(t, 0),
        "gather": lambda: dist.gather(t, [torch.ones(4), torch.ones(4)], 0),
        "scatter": lambda: dist.scatter(t, None, 1),
        "all_gather": lambda: dist.all_gather([torch.ones(4), torch.ones(4)], t),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.ones(4), t),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.ones(2), t),
        "barrier": dist.barrier,
        "monitored_barrier": dist.monitored_barrier,
        "all_gather_object": lambda: dist.all_gather_object([None, None], "x"),
        "wait": lambda: dist.all_reduce(t, async_op=True).wait(),
        "backward": lambda: model(torch.ones(2, 8)).sum().backward(),
        "optimizer.step": step,
    }


def each_op(rank: Rank) -> Any:
    """Abort each op, first from rank 0, then from both ranks; rebuild each time."""
    rank.init()
    model = make_model()
    optimizer = SharedStep(model.parameters(), lr=0.1)
    seconds, sums, generation = {}, [], 0
    for by in ("one", "all"):
        for name in ops(model, optimizer):
            generation += 1
            place = f"{by}/{name}"
            # An abort ends what the other rank still has of the last op.
            rank.meet(place)
            if rank.rank == 0:
                aborter = Aborter(dist.group.WORLD, "a test")
                try:
                    ops(model, optimizer)[name]()
                except RuntimeError as error:
                    seconds[place] = time.monotonic() - aborter.at
                    print(place, error, file=sys.stderr)
                aborter.join()
                rank.store.set(f"ended/{place}", b"1")
            else:
                rank.store.wait([f"ended/{place}"], WAIT)
                if by == "all":
                    abort(dist.group.WORLD, AbortReason("a test", "the test"))
            rebuild(dist.group.WORLD, generation, rank.store)
            t = torch.ones(1)
            dist.all_reduce(t)
            sums.append(t.item())
    return {"seconds": seconds, "sums": sums, "generation": generation}


def train(rank: Rank, faults: int) -> tuple[torch.nn.Module, list[int], list[Any]]:
    """Train for 40 steps, with a hang in backward in the first `faults` of them."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(rank.rank)
    left: list[Any] = []
    for step in range(40):
        x = torch.randn(4, 8, generator=data)
        if step < faults:
            generation = step + 1
            # An abort ends what the other rank still has of the last step.
            rank.meet(f"step {step}")
            optimizer.zero_grad()
            # The ranks take turns in not taking part.
            if step % rank.size == rank.rank:
                rank.store.wait([f"failed/{step}"], WAIT)
            else:
                aborter = Aborter(dist.group.WORLD, f"hang {step}")
                try:
                    model(x).square().mean().backward()
                except RuntimeError:
                    assert aborter.at
                aborter.join()
                rank.store.set(f"failed/{step}", b"1")
            rebuild(dist.group.WORLD, generation, rank.store)
            gc.collect()
            left.append((descriptors(), threads()))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model, [], left


def thirty_faults(rank: Rank) -> Any:
    """Train through 30 hangs, then undisturbed; compare the weights."""
    rank.init()
    disturbed, _, left = train(rank, 30)
    undisturbed, _, _ = train(rank, 0)
    pairs = zip(disturbed.parameters(), undisturbed.parameters(), strict=True)
    return {
        "equal": [torch.equal(one, other) for one, other in pairs],
        "before": left[3],
        "after": left[-1],
    }


def rewrapped(rank: Rank) -> Any:
    """Wrap the module of a model anew after a rebuild; say what is as before."""
    rank.init()
    model = DistributedDataParallel(
        make_model().module, bucket_cap_mb=3, find_unused_parameters=True
    )
    parameters = list(model.parameters())
    rebuild(dist.group.WORLD, 1, rank.store)
    made = rewrap(model)
    made(torch.ones(2, 8) * (rank.rank + 1)).sum().backward()
    mean = parameters[0].grad.clone()
    dist.all_reduce(mean)
    pairs = zip(parameters, made.parameters(), strict=True)
    return {
        "another": made is not model,
        "parameters": [one is other for one, other in pairs],
        "options": [made.find_unused_parameters, made._bucket_config.bucket_cap_mb],
        "reduced": torch.allclose(mean, 2 * parameters[0].grad),
    }


def explained(rank: Rank) -> dict[str, Any]:
    """Which errors are those of the abort: rank 1 aborts before rank 0 knows why."""
    rank.init()
    group = dist.group.WORLD
    # An abort before the other rank knows the group would find it without connections.
    rank.meet("made")
    if rank.rank == 1:
        abort(group, AbortReason("a branch not taken", "the test"))
        return {}
    errors.VERDICT_WAIT = WAIT  # type: ignore[attr-defined]
    late = threading.Timer(
        0.2, abort, (group, AbortReason("a branch not taken", "the test"))
    )
    try:
        dist.all_reduce(torch.ones(4))
    except RuntimeError as error:
        late.start()
        shown = errors.explain(error)
        found = {
            "error": [type(shown).__name__, str(shown)],
            "once": errors.explain(error) is shown,
            "cause": shown.__cause__ is error,
        }
    try:
        raise RuntimeError("of the user")
    except RuntimeError as error:
        found["own"] = errors.explain(error) is error
    errors.settle()
    try:
        torch.ones(2) + torch.ones(3)
    except RuntimeError as error:
        found["next cell"] = errors.explain(error) is error
    return found


def main() -> None:
    # The test asks for the stacks of a rank that does not end.
    faulthandler.register(signal.SIGUSR1)
    # What the imports made takes a third of a second of each collection.
    gc.freeze()
    program, rank, size, port = sys.argv[1:]
    creation.install(probe(distributed_c10d), lambda _: contextlib.nullcontext())
    result = globals()[program](Rank(int(rank), int(size), int(port)))
    print(json.dumps(result), flush=True)
    # The others may still read from a store that this process serves.
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
