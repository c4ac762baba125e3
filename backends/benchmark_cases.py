"""What a benchmark measures: the arrays, the call and the check of each op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .collectives import data_movement, reductions
from .collectives.coalescing import P2POp, batch_isend_irecv
from .collectives.point_to_point import irecv, isend
from .devices.cuda_install import install_command
from .errors import DistBackendError
from .groups.membership import get_global_rank
from .groups.process_group import ProcessGroup
from .work.op_type import OpType, spec_of

__all__ = ["BENCHMARKS", "Case", "array_module"]

#: The values of the test data repeat after so many elements.
PERIOD = 5
#: The group rank of the root, for ops with a root.
ROOT = 0


class Case:
    """One op at one size: its arrays, and the data for its check."""

    def __init__(
        self, group: ProcessGroup, op: str, size: int, dtype: np.dtype[Any], device: str
    ) -> None:
        self.group, self.op, self.dtype, self.device = group, op, dtype, device
        self.ranks, self.rank = group.size(), group.rank()
        self.everyone = range(self.ranks)
        #: Elements that a rank gives, or, of the divided ops, that a part has.
        self.count = size // dtype.itemsize
        if spec_of(op).divided:
            self.count //= self.ranks
            self.size = self.count * self.ranks * dtype.itemsize
        else:
            self.size = self.count * dtype.itemsize
        self._arrays: list[Any] = []

    @property
    def root(self) -> int:
        """The root's rank in the default group, as ops require."""
        return get_global_rank(self.group, ROOT)

    def array(self, parts: int = 1) -> Any:
        """Return a new array of `parts` times `count` elements."""
        count = self.count * parts
        made: Any
        if self.device != "cpu":
            made = array_module(self.device).empty(count, self.dtype)
        else:
            made = np.empty(count, self.dtype)
        self._arrays.append(made)
        return made

    def pattern(self, seed: int) -> np.ndarray:
        """Return `count` small numbers that depend on `seed`; exact in every dtype."""
        return np.resize((np.arange(PERIOD) + seed) % PERIOD, self.count).astype(
            self.dtype
        )

    def patterns(self, seeds: Sequence[int]) -> np.ndarray:
        """Return the patterns of several seeds, one after the other."""
        return np.concatenate([self.pattern(seed) for seed in seeds])

    def total(self, part: int = 0) -> np.ndarray:
        """Return the sum over all ranks of their pattern, or of their part's."""
        tile = sum((np.arange(PERIOD) + rank + part) % PERIOD for rank in self.everyone)
        return np.resize(tile, self.count).astype(self.dtype)

    def put(self, array: Any, values: np.ndarray) -> None:
        """Copy host data into an array of this case."""
        if self.device == "cpu":
            array[:] = values
        else:
            array.set(values)

    def count_wrong(self, array: Any, expected: np.ndarray) -> int:
        """Return how many elements of an array of this case differ."""
        found = array if self.device == "cpu" else array.get()
        return int(np.count_nonzero(found != expected))

    def clear(self) -> None:
        """Set every array of this case to zero."""
        for array in self._arrays:
            array.fill(0)

    def settle(self) -> None:
        """Block the host until the device has finished."""
        if self.device != "cpu":
            array_module(self.device).cuda.get_current_stream().synchronize()


def array_module(device: str) -> Any:
    """Return cupy; raise `DistBackendError` where it or a GPU is missing."""
    if device != "cuda":
        raise ValueError(f"device {device!r}: expected cpu or cuda")
    try:
        import cupy
    except ImportError as error:
        raise DistBackendError(
            "arrays on the GPU are made by cupy, which is not installed: "
            f"{install_command()}"
        ) from error
    try:
        cupy.cuda.runtime.getDevice()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DistBackendError(
            f"there is no GPU here to make arrays on ({error}): measure on the CPU, "
            "--device cpu (device='cpu')"
        ) from error
    return cupy


# -- ops -------------------------------------------------------------------------

#: The op, what fills its arrays, and (array, expected) of this rank, if any.
_Parts = tuple[
    Callable[[], object],
    Callable[[], None],
    Callable[[], "tuple[Any, np.ndarray] | None"],
]


def _all_reduce(case: Case) -> _Parts:
    x = case.array()
    return (
        lambda: reductions.all_reduce(x, group=case.group),
        lambda: case.put(x, case.pattern(case.rank)),
        lambda: (x, case.total()),
    )


def _reduce(case: Case) -> _Parts:
    x = case.array()
    return (
        lambda: reductions.reduce(x, dst=case.root, group=case.group),
        lambda: case.put(x, case.pattern(case.rank)),
        lambda: (x, case.total()) if case.rank == ROOT else None,
    )


def _broadcast(case: Case) -> _Parts:
    x = case.array()
    return (
        lambda: data_movement.broadcast(x, src=case.root, group=case.group),
        lambda: case.put(x, case.pattern(case.rank)),
        lambda: (x, case.pattern(ROOT)),
    )


def _all_gather_into_tensor(case: Case) -> _Parts:
    x, out = case.array(), case.array(case.ranks)
    return (
        lambda: data_movement.all_gather_into_tensor(out, x, group=case.group),
        lambda: case.put(x, case.pattern(case.rank)),
        lambda: (out, case.patterns(case.everyone)),
    )


def _reduce_scatter_tensor(case: Case) -> _Parts:
    x, out = case.array(case.ranks), case.array()
    seeds = [case.rank + part for part in case.everyone]
    return (
        lambda: reductions.reduce_scatter_tensor(out, x, group=case.group),
        lambda: case.put(x, case.patterns(seeds)),
        lambda: (out, case.total(case.rank)),
    )


def _all_to_all_single(case: Case) -> _Parts:
    x, out = case.array(case.ranks), case.array(case.ranks)
    sent = [case.rank + 2 * to for to in case.everyone]
    received = [source + 2 * case.rank for source in case.everyone]
    return (
        lambda: data_movement.all_to_all_single(out, x, group=case.group),
        lambda: case.put(x, case.patterns(sent)),
        lambda: (out, case.patterns(received)),
    )


def _gather(case: Case) -> _Parts:
    x = case.array()
    out = case.array(case.ranks) if case.rank == ROOT else None
    parts = None if out is None else list(out.reshape(case.ranks, case.count))
    return (
        lambda: data_movement.gather(x, parts, dst=case.root, group=case.group),
        lambda: case.put(x, case.pattern(case.rank)),
        lambda: None if out is None else (out, case.patterns(case.everyone)),
    )


def _scatter(case: Case) -> _Parts:
    out = case.array()
    x = case.array(case.ranks) if case.rank == ROOT else None
    parts = None if x is None else list(x.reshape(case.ranks, case.count))

    def fill() -> None:
        if x is not None:
            case.put(x, case.patterns(case.everyone))

    return (
        lambda: data_movement.scatter(out, parts, src=case.root, group=case.group),
        fill,
        lambda: (out, case.pattern(case.rank)),
    )


def _ring(case: Case) -> _Parts:
    """Return the parts of a ring: send to the next rank, receive from the previous."""
    x, out = case.array(), case.array()
    after, before = (case.rank + 1) % case.ranks, (case.rank - 1) % case.ranks

    def ring() -> None:
        works = batch_isend_irecv(
            [
                P2POp(isend, x, group=case.group, group_peer=after),
                P2POp(irecv, out, group=case.group, group_peer=before),
            ]
        )
        for work in works:
            work.wait()

    return (
        ring,
        lambda: case.put(x, case.pattern(case.rank)),
        lambda: (out, case.pattern(before)),
    )


#: What can be measured: the name of the op → what makes its arrays and the call.
#: Ops with `OpSpec.measured`, and one pattern of sends and receives.
BENCHMARKS: dict[str, Callable[[Case], _Parts]] = {
    OpType.ALL_REDUCE.value: _all_reduce,
    OpType.BROADCAST.value: _broadcast,
    OpType.REDUCE.value: _reduce,
    OpType.ALL_GATHER_INTO_TENSOR.value: _all_gather_into_tensor,
    OpType.REDUCE_SCATTER_TENSOR.value: _reduce_scatter_tensor,
    OpType.ALL_TO_ALL_SINGLE.value: _all_to_all_single,
    OpType.GATHER.value: _gather,
    OpType.SCATTER.value: _scatter,
    "batch_isend_irecv": _ring,
}
