"""One call of each op in which rank 0 cannot end without the last rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import rankscope.backends as dist

from ..work.work import Work
from .trial import Trial, Unclaimed

__all__ = ["OPS", "claimed", "start"]

OPS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "recv",
)
# The tag of the messages for `recv`.
_TAG = 3


def start(trial: Trial, name: str, x: Any) -> list[Work]:
    """Start the op called `name` on `x` and arrays of its size; return its Works.

    Rank 0 needs the last rank to end it. With a single rank there is no recv.
    """
    size, last = trial.size, trial.size - 1
    first_rank, last_rank = trial.rank == 0, trial.rank == last
    values = trial.arrays.read(x)
    blank, full = np.zeros_like(values), np.concatenate([np.ravel(values)] * size)

    def copies(content: Any) -> list[Any]:
        return [trial.array(content, content.dtype) for _ in range(size)]

    def flat(content: Any) -> Any:
        return trial.array(content, content.dtype)

    how: dict[str, Any] = {"group": trial.group, "async_op": True}
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x, **how),
        "broadcast": lambda: dist.broadcast(x, group_src=last, **how),
        "reduce": lambda: dist.reduce(x, group_dst=0, **how),
        "all_gather": lambda: dist.all_gather(copies(blank), x, **how),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(
            flat(np.zeros_like(full)), x, **how
        ),
        "gather": lambda: dist.gather(
            x, copies(blank) if first_rank else None, group_dst=0, **how
        ),
        "scatter": lambda: dist.scatter(
            x, copies(values) if last_rank else None, group_src=last, **how
        ),
        "reduce_scatter": lambda: dist.reduce_scatter(x, copies(values), **how),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(
            x, flat(full), **how
        ),
        "all_to_all": lambda: dist.all_to_all(copies(blank), copies(values), **how),
        "all_to_all_single": lambda: dist.all_to_all_single(
            flat(np.zeros_like(full)), flat(full), **how
        ),
        "barrier": lambda: dist.barrier(device=trial.device, **how),
    }
    if name != "recv":
        return [calls[name]()]
    group = trial.group
    if last_rank:
        return [
            dist.isend(x, group_dst=rank, tag=_TAG, group=group) for rank in range(last)
        ]
    return [dist.irecv(x, group_src=last, tag=_TAG, group=group)]


def claimed(trial: Trial) -> list[str]:
    """Return the ops of `OPS` that the backend claims; each is tried once."""
    for name in OPS:
        if name in trial.claims:
            continue
        trial.claims[name] = None
        if name == "recv" and trial.size == 1:
            trial.claims[name] = "a single rank has nobody to receive from"
            continue
        try:
            works = start(trial, name, trial.array(np.ones(4)))
        except (NotImplementedError, TypeError, ValueError) as error:
            trial.claims[name] = str(error)
            continue
        for work in works:
            work.wait(trial.options.timeout)
    found = [
        name
        for name in OPS
        if trial.claims[name] is None and trial.options.includes(name)
    ]
    if not found:
        raise Unclaimed("the backend has none of the ops that this needs")
    return found


def first_claimed(trial: Trial, *names: str) -> str:
    """Return the first of `names` that the backend claims."""
    had = claimed(trial)
    for name in names:
        if name in had:
            return name
    raise Unclaimed(f"the backend does not claim {' or '.join(names)}")
