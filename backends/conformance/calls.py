"""One call of each op in which rank 0 cannot end without the last rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import rankscope.backends as dist

from ..work.work import Work
from .trial import Trial, Unclaimed

__all__ = ["OPS", "claimed", "claims", "connect", "first_claimed", "start"]

# The tag of the messages for `recv`.
_TAG = 3


class _Call:
    """What the calls of an op in flight have in common: `x`, and arrays of its size."""

    def __init__(self, trial: Trial, x: Any) -> None:
        self.x, self._trial, self._values = x, trial, trial.arrays.read(x)
        self.last = trial.size - 1
        self.is_first, self.is_last = trial.rank == 0, trial.rank == self.last
        self.how: dict[str, Any] = {"group": trial.group, "async_op": True}
        self.device = trial.device

    def full(self, *, blank: bool = False) -> Any:
        """Return a flat array with the elements of all ranks."""
        values = np.concatenate([np.ravel(self._values)] * self._trial.size)
        given = np.zeros_like(values) if blank else values
        return self._trial.array(given, values.dtype)

    def parts(self, *, blank: bool = False) -> list[Any]:
        values = np.zeros_like(self._values) if blank else self._values
        ranks = range(self._trial.size)
        return [self._trial.array(values, values.dtype) for _ in ranks]


def _gather(on: _Call) -> Any:
    into = on.parts(blank=True) if on.is_first else None
    return dist.gather(on.x, into, group_dst=0, **on.how)


def _scatter(on: _Call) -> Any:
    parts = on.parts() if on.is_last else None
    return dist.scatter(on.x, parts, group_src=on.last, **on.how)


def _recv(on: _Call) -> Any:
    """Receive from the last rank, which sends to every other one."""
    how: dict[str, Any] = {"tag": _TAG, "group": on.how["group"]}
    if on.is_last:
        return [dist.isend(on.x, group_dst=rank, **how) for rank in range(on.last)]
    return dist.irecv(on.x, group_src=on.last, **how)


_CALLS: dict[str, Callable[[_Call], Any]] = {
    "broadcast": lambda on: dist.broadcast(on.x, group_src=on.last, **on.how),
    "all_reduce": lambda on: dist.all_reduce(on.x, **on.how),
    "reduce": lambda on: dist.reduce(on.x, group_dst=0, **on.how),
    "all_gather": lambda on: dist.all_gather(on.parts(blank=True), on.x, **on.how),
    "all_gather_into_tensor": lambda on: dist.all_gather_into_tensor(
        on.full(blank=True), on.x, **on.how
    ),
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": lambda on: dist.reduce_scatter(on.x, on.parts(), **on.how),
    "reduce_scatter_tensor": lambda on: dist.reduce_scatter_tensor(
        on.x, on.full(), **on.how
    ),
    "all_to_all": lambda on: dist.all_to_all(
        on.parts(blank=True), on.parts(), **on.how
    ),
    "all_to_all_single": lambda on: dist.all_to_all_single(
        on.full(blank=True), on.full(), **on.how
    ),
    "barrier": lambda on: dist.barrier(device=on.device, **on.how),
    "recv": _recv,
}

#: The ops that can be started; `recv` stands for `send` too.
OPS = tuple(_CALLS)


def start(trial: Trial, name: str, x: Any) -> list[Work]:
    """Start the op called `name` on `x` and arrays of its size; return its Works."""
    works = _CALLS[name](_Call(trial, x))
    return works if isinstance(works, list) else [works]


def claims(trial: Trial, name: str) -> bool:
    """Return whether the backend claims the op; it is tried once, on all ranks."""
    if name not in trial.claims:
        trial.claims[name] = _refusal(trial, name)
    return trial.claims[name] is None


def _refusal(trial: Trial, name: str) -> str | None:
    if name == "recv" and trial.size == 1:
        return "a single rank has no other to receive from"
    try:
        works = start(trial, name, trial.array(np.ones(4)))
    except (NotImplementedError, TypeError, ValueError) as error:
        return str(error)
    for work in works:
        work.wait(trial.options.timeout)
    return None


def claimed(trial: Trial) -> list[str]:
    """Return the ops of `OPS` that the backend claims and that are to be tried."""
    found = [name for name in OPS if claims(trial, name)]
    found = [name for name in found if trial.options.includes(name)]
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


def connect(trial: Trial) -> None:
    """Run one op on all ranks of a new group.

    A backend may connect when it is made, at the first op, and wait for all ranks
    then. A rule in which a rank is absent calls this before.
    """
    for work in start(trial, claimed(trial)[0], trial.array(np.ones(4))):
        work.wait(trial.options.timeout)
