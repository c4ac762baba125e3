"""Level *recover*: a rank dies in each op; a new group then works.

The last rank ends its own process while the others are in the op. The launcher
starts a fresh process in its place, and all ranks make a new group; under
``mpiexec``, which replaces no rank, the others shrink the group.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import numpy as np

import rankscope.backends as dist

from ..errors import DistError
from ..groups.process_group import ProcessGroup
from ..work.reduce_op import ReduceOp
from .calls import OPS, start
from .checker import Checker
from .trial import Rule, Trial, Unclaimed
from .waiting import until

__all__ = ["RULES"]


def recovers(name: str, trial: Trial) -> None:
    """Lose the last rank in the op `name`, then run the op again, exactly."""
    if not trial.own_process:
        raise Unclaimed("the ranks are threads: none can die alone")
    last = trial.size - 1
    if not trial.again:
        try:
            for work in start(trial, name, trial.array(np.ones(1000))):
                work.wait(trial.options.timeout)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise Unclaimed(str(error)) from None
        trial.meet("before the death")
        if trial.rank == last:
            others = [f"in the op/{rank}" for rank in range(last)]
            trial.store.wait(others, trial.options.timeout)
            os.kill(os.getpid(), signal.SIGKILL)
        _survive(trial, name)
    if trial.replaces_dead:
        trial.close()
        _check_op(trial, name, trial.open("again"))
        trial.meet("again")
    else:
        group = dist.shrink_group([last], trial.group)
        assert isinstance(group, ProcessGroup)
        _check_op(trial, name, group)
    trial.held()


def _survive(trial: Trial, name: str) -> None:
    """Check that the op raises in time on this rank when the last rank dies."""
    group, limit = trial.group, trial.options.timeout
    works = start(trial, name, trial.array(np.ones(1000)))
    trial.store.set(f"in the op/{trial.rank}", b"")
    began = time.monotonic()
    until(
        lambda: group.aborted is not None,
        limit,
        f"the group to be aborted after the death of rank {trial.size - 1}",
    )
    for work in works:
        try:
            work.wait(limit)
        except DistError:
            continue
        assert work.is_success() or work.on_device, f"{work!r} after the death"
    trial.notes["death_to_error_s"] = time.monotonic() - began


def _check_op(trial: Trial, name: str, group: ProcessGroup) -> None:
    """The op `name` is exact on `group`."""
    checker = Checker(trial.arrays, group=group)
    if name == "barrier":
        dist.barrier(group=group, device=trial.device)
    elif name == "recv":
        checker.send_and_recv(7, "float32")
    elif name.endswith("reduce") or name.startswith("reduce"):
        getattr(checker, name)(7, "float32", ReduceOp.SUM)
    else:
        getattr(checker, name)(7, "float32")


RULES = [
    Rule(
        "recover",
        name,
        f"{name} fails when a rank dies in it, and works in the group made anew",
        partial(recovers, name),
        ranks=2,
        kills=True,
        op=name,
    )
    for name in OPS
]
