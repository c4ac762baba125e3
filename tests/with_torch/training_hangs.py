"""The kinds of hangs of test_training_hangs.py: a cell each, and what is said of it."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from rankscope.backends.observe.verdicts import Fault

__all__ = ["HANGS", "SETUP", "Hang"]

#: A model, data that depends on step and rank alone, and the loop that trains.
SETUP = """\
import contextlib, threading
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
t = torch.ones(4)
never = threading.Event()
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(6, 12)
        self.side = torch.nn.Linear(12, 12)
        self.head = torch.nn.Linear(12, 3)
    def forward(self, x, side=True):
        x = torch.tanh(self.body(x))
        return self.head(self.side(x) if side else x)
def make():
    global model, optimizer, step
    torch.manual_seed(0)
    model, step = DDP(Net()), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
def batch():
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(9 * step + rank))
def backward(**options):
    optimizer.zero_grad()
    model(batch(), **options).square().mean().backward()
def train(steps=1):
    global step
    for _ in range(steps):
        backward()
        optimizer.step()
        step += 1
"""


@dataclass(frozen=True)
class Hang:
    """A cell in which `waiting` hang, and the verdict on it.

    Attributes
    ----------
    said
        A part of the text.
    group
        The group that the verdict is about.
    stopped
        The rank whose process is stopped while the cell runs, if one is.
    """

    name: str
    cell: str
    fault: Fault
    culprits: tuple[int, ...]
    waiting: tuple[int, ...]
    said: str
    group: str = "default_pg"
    stopped: int | None = None


_MISSING, _BUSY = Fault.MISSING_RANKS, Fault.RANK_BUSY_ELSEWHERE

HANGS = [
    Hang(
        "a rank returns early",
        "if rank != 2: train()",
        *(_MISSING, (2,), (0, 1)),
        ": it left cell {cell} at its end; rank 0 waits in it",
    ),
    Hang(
        "a branch that is not taken in forward",
        "backward(side=rank != 2)",
        *(_MISSING, (2,), (0, 1)),
        " (cell 1 line 25",
    ),
    Hang(
        "a branch that is not taken, and the loop goes on",
        "backward(side=rank != 1)\nif rank == 1:\n    never.wait()",
        *(_BUSY, (1,), (0, 2)),
        ": it is at cell {cell} line 3",
    ),
    Hang(
        "an exception in the data loader of one rank",
        "if rank == 1: raise ValueError('bad sample')\ntrain()",
        *(_MISSING, (1,), (0, 2)),
        ": it left cell {cell} with ValueError at line 1",
    ),
    Hang(
        "a rank that sleeps",
        "import time\nif rank == 2:\n    time.sleep(1000)\ntrain()",
        *(_BUSY, (2,), (0, 1)),
        ": it is at cell {cell} line 3",
    ),
    Hang(
        "a rank that computes in Python",
        "if rank == 0:\n    while True:\n        pass\ntrain()",
        *(_BUSY, (0,), (1, 2)),
        ": it is at cell {cell} line ",
    ),
    Hang(
        "a rank whose process is stopped",
        "if rank == 2:\n    never.wait()\ntrain()",
        *(Fault.RANK_NOT_RESPONDING, (2,), (0, 1)),
        "is stopped",
        stopped=2,
    ),
    Hang(
        "another op",
        "dist.broadcast(t, 0) if rank == 2 else dist.all_reduce(t)",
        *(Fault.OP_MISMATCH, (2,), (0, 1)),
        "rank 2 issued broadcast #",
    ),
    Hang(
        "another size",
        "if rank: dist.broadcast(torch.ones(4 if rank == 1 else 9), 0)",
        *(Fault.SIZE_MISMATCH, (1, 2), ()),
        "(cell {cell} line 1) with 4 elements, rank 2 with 9 elements",
    ),
    Hang(
        "another dtype",
        "if rank: dist.broadcast(t if rank == 1 else t.int(), 0)",
        *(Fault.DTYPE_MISMATCH, (1, 2), ()),
        " with dtype float32, rank 2 with dtype int32",
    ),
    Hang(
        "another root",
        "if rank: dist.broadcast(t, 2 if rank == 1 else 0)",
        *(Fault.ROOT_MISMATCH, (1, 2), ()),
        " with root 2, rank 2 with root 0",
    ),
    Hang(
        "another reduction",
        "ops = dist.ReduceOp\n"
        "if rank: dist.all_reduce(t, op=ops.SUM if rank == 1 else ops.MAX)",
        *(Fault.REDUCE_OP_MISMATCH, (1, 2), ()),
        " with reduce op sum, rank 2 with reduce op max",
    ),
    Hang(
        "a recv without a send",
        "if rank == 0: dist.recv(t, 2)",
        *(_MISSING, (2,), (0,)),
        "rank 2 has not issued the send",
    ),
    Hang(
        "a send without a recv",
        "if rank == 0: dist.send(torch.ones(1 << 22), 1)",
        *(_MISSING, (1,), (0,)),
        "rank 1 has not issued the recv",
    ),
    Hang(
        "a barrier that one rank leaves out",
        "if rank != 1: dist.barrier()",
        *(_MISSING, (1,), (0, 2)),
        "rank 1 has not entered barrier",
    ),
    Hang(
        "a monitored barrier that one rank leaves out",
        "if rank != 1: dist.monitored_barrier()",
        *(_MISSING, (1,), (0, 2)),
        "rank 1 has not entered monitored_barrier",
    ),
    Hang(
        "a collective in place of a monitored barrier",
        "dist.all_reduce(t) if rank == 1 else dist.monitored_barrier()",
        *(Fault.OP_MISMATCH, (1,), (0, 2)),
        "rank 1 issued all_reduce",
    ),
    Hang(
        "two groups in opposite orders",
        "if rank == 0: dist.all_reduce(t, group=tp)\n"
        "dist.all_reduce(t)\n"
        "if rank == 1: dist.all_reduce(t, group=tp)",
        *(Fault.DEADLOCK, (0, 1), (2,)),
        "rank 0 in all_reduce #1 of group 'tp' (cell {cell} line 1) for rank 1",
        group="tp",
    ),
    Hang(
        "an op in a subgroup that one of its ranks leaves out",
        "if rank == 0: dist.all_reduce(t, group=tp)",
        *(_MISSING, (1,), (0,)),
        ": it left cell {cell} at its end; rank 0 waits",
        group="tp",
    ),
    Hang(
        "objects that one rank does not gather",
        "if rank != 2: dist.all_gather_object([None] * 3, 'x')",
        *(_MISSING, (2,), (0, 1)),
        "rank 2 has not entered all_gather",
    ),
    Hang(
        "objects that the root does not broadcast",
        "if rank: dist.broadcast_object_list([None], 0)",
        *(_MISSING, (0,), (1, 2)),
        "rank 0 has not entered broadcast",
    ),
    Hang(
        "no_sync on one rank",
        "with model.no_sync() if rank == 2 else contextlib.nullcontext():\n"
        "    backward()",
        *(_MISSING, (2,), (0, 1)),
        "has not entered all_reduce",
    ),
    Hang(
        "unused parameters, and a rank without a backward",
        "other = DDP(Net(), find_unused_parameters=True)\n"
        "loss = other(batch(), side=False).sum()\n"
        "if rank: loss.backward()",
        *(_MISSING, (0,), (1, 2)),
        "(cell {cell} line 3): ",
    ),
    Hang(
        "a reduce_scatter that one rank leaves out",
        "if rank != 1: dist.reduce_scatter_tensor(torch.ones(1), torch.ones(3))",
        *(_MISSING, (1,), (0, 2)),
        "rank 1 has not entered reduce_scatter_tensor",
    ),
    Hang(
        "an all_to_all that one rank leaves out",
        "if rank != 1: dist.all_to_all_single(torch.ones(3), torch.ones(3))",
        *(_MISSING, (1,), (0, 2)),
        "rank 1 has not entered all_to_all_single",
    ),
    Hang(
        "a group that one of its ranks does not make",
        "if rank != 1: late = dist.new_group([0, 1], group_desc='late')",
        *(_MISSING, (1,), (0,)),
        "rank 1 has not entered new_group",
        group="late",
    ),
    Hang(
        "a model that one rank does not make",
        "if rank != 1: DDP(torch.nn.Linear(2, 2))",
        *(_MISSING, (1,), (0, 2)),
        " (cell {cell} line 1): ",
    ),
    Hang(
        "an optimizer that shards its state, and a rank without its step",
        "zero = ZeroRedundancyOptimizer(Net().parameters(), torch.optim.SGD, lr=1.0)\n"
        "for one in zero.param_groups[0]['params']: one.grad = torch.ones_like(one)\n"
        "if rank != 2: zero.step()",
        *(_MISSING, (2,), (0, 1)),
        "(cell {cell} line 3): ",
    ),
    Hang(
        "Join, and a rank that neither trains nor leaves",
        "with Join([model]):\n    if rank == 2: never.wait()\n    backward()",
        *(_BUSY, (2,), (0, 1)),
        ": it is at cell {cell} line 2",
    ),
]

#: Ends and continues the process of `Hang.stopped`.
STOP, CONTINUE = signal.SIGSTOP, signal.SIGCONT
