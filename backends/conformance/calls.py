"""One call of each op in which rank 0 cannot end without the last rank."""

from __future__ import annotations

from typing import Any

import numpy as np

import rankscope.backends as dist

from ..work.op_type import OpType
from ..work.work import Work
from .trial import Trial, Unclaimed

__all__ = ["OPS", "claimed", "claims", "connect", "first_claimed", "start"]

# The tag of the messages for `recv`.
_TAG = 3


class _Call:
    """One op in flight on `x` and on arrays of its size; a method for each op."""

    def __init__(self, trial: Trial, x: Any) -> None:
        self._x, self._trial = x, trial
        self._is_first = trial.rank == 0
        self._last = trial.size - 1
        self._is_last = trial.rank == self._last
        self._values = trial.arrays.read(x)
        self._how: dict[str, Any] = {"group": trial.group, "async_op": True}

    def _array(self, values: Any) -> Any:
        return self._trial.array(values, values.dtype)

    def _full(self, *, blank: bool = False) -> Any:
        """Return a flat array with the elements of all ranks."""
        values = np.concatenate([np.ravel(self._values)] * self._trial.size)
        return self._array(np.zeros_like(values) if blank else values)

    def _parts(self, *, blank: bool = False) -> list[Any]:
        """Return an array for each rank."""
        values = np.zeros_like(self._values) if blank else self._values
        return [self._array(values) for _ in range(self._trial.size)]

    def all_reduce(self) -> Any:
        return dist.all_reduce(self._x, **self._how)

    def broadcast(self) -> Any:
        return dist.broadcast(self._x, group_src=self._last, **self._how)

    def reduce(self) -> Any:
        return dist.reduce(self._x, group_dst=0, **self._how)

    def all_gather(self) -> Any:
        return dist.all_gather(self._parts(blank=True), self._x, **self._how)

    def all_gather_into_tensor(self) -> Any:
        return dist.all_gather_into_tensor(self._full(blank=True), self._x, **self._how)

    def gather(self) -> Any:
        into = self._parts(blank=True) if self._is_first else None
        return dist.gather(self._x, into, group_dst=0, **self._how)

    def scatter(self) -> Any:
        parts = self._parts() if self._is_last else None
        return dist.scatter(self._x, parts, group_src=self._last, **self._how)

    def reduce_scatter(self) -> Any:
        return dist.reduce_scatter(self._x, self._parts(), **self._how)

    def reduce_scatter_tensor(self) -> Any:
        return dist.reduce_scatter_tensor(self._x, self._full(), **self._how)

    def all_to_all(self) -> Any:
        return dist.all_to_all(self._parts(blank=True), self._parts(), **self._how)

    def all_to_all_single(self) -> Any:
        return dist.all_to_all_single(self._full(blank=True), self._full(), **self._how)

    def barrier(self) -> Any:
        return dist.barrier(device=self._trial.device, **self._how)

    def recv(self) -> Any:
        """Receive from the last rank, which sends to every other one."""
        group = self._trial.group
        if self._is_last:
            return [
                dist.isend(self._x, group_dst=rank, tag=_TAG, group=group)
                for rank in range(self._last)
            ]
        return dist.irecv(self._x, group_src=self._last, tag=_TAG, group=group)


#: The ops, by the names of their methods; `recv` stands for `send` too.
OPS = tuple(op.value for op in OpType if hasattr(_Call, op.value))


def start(trial: Trial, name: str, x: Any) -> list[Work]:
    """Start the op called `name` on `x` and arrays of its size; return its Works.

    Rank 0 needs the last rank to end it. With a single rank there is no recv.
    """
    works = getattr(_Call(trial, x), name)()
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
    """Return the ops of `OPS` that the backend claims and that are to be tried.

    Raises `Unclaimed` if there is none.
    """
    found = [name for name in OPS if claims(trial, name)]
    found = [name for name in found if trial.options.includes(name)]
    if not found:
        raise Unclaimed("the backend has none of the ops that this needs")
    return found


def first_claimed(trial: Trial, *names: str) -> str:
    """Return the first of `names` that the backend claims.

    Raises `Unclaimed` if there is none.
    """
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
