"""benchmark: time and bandwidth of a collective in this group, size by size.

Sizes, counts and bandwidths are defined as in NVIDIA's nccl-tests. Before a size
is timed, one op with data of a known result is checked.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .collectives import data_movement, reductions
from .collectives.coalescing import P2POp, batch_isend_irecv
from .collectives.point_to_point import irecv, isend
from .devices.shared_memory import empty
from .errors import DistBackendError
from .groups.membership import Group, get_global_rank, resolve_group
from .groups.process_group import ProcessGroup
from .work.op_type import OpType, spec_of

__all__ = [
    "BENCHMARKS",
    "Measurement",
    "benchmark",
    "check_benchmark",
    "parse_sizes",
    "usual_device",
]

#: The values of the test data repeat after so many elements.
PERIOD = 5
#: The group rank of the root, for ops with a root.
ROOT = 0


@dataclass(frozen=True)
class Measurement:
    """Result of one size on one rank."""

    op: str
    #: Bytes of the op, as nccl-tests counts them.
    size: int
    #: Elements of the input array of one rank.
    count: int
    dtype: str
    #: Mean seconds of one op.
    seconds: float
    #: Wrong elements in this rank's result.
    wrong: int


def benchmark(
    op: str = "all_reduce",
    sizes: Sequence[int] = (1 << 20,),
    *,
    group: Group = None,
    dtype: Any = "float32",
    device: str | None = None,
    iterations: int = 20,
    warmup: int = 5,
    shared: bool = True,
) -> Iterator[Measurement]:
    """Measure `op` for each of `sizes`; every rank of the group calls it alike.

    `op` is one of `BENCHMARKS`. A size is S of nccl-tests in bytes: what one
    rank gives, or for the gathers and scatters the array as a whole; it is
    rounded down to whole elements on every rank. Ops run one after the other
    on one array, ``warmup`` times before the clock starts and ``iterations``
    times while it runs. They are on `device`, ``"cpu"`` or ``"cuda"``; ``None``
    is the group's only one, or its CPU. Arrays for the CPU come from `empty`, so
    that they need not be copied, or with ``shared=False`` from numpy.

    Raises `ValueError` before anything moves if the arguments make no sense,
    and `DistBackendError` where there is no GPU to make arrays on.
    """
    pg = resolve_group(group, "benchmark")
    served = pg.config.device_backend_map
    if device is None:
        device = usual_device(served)
    if device not in served:
        raise ValueError(
            f"group {pg.name!r} has no backend for device {device!r}, it is "
            f"{pg.config}: name another device, or a backend for this one"
        )
    kind = np.dtype(dtype)
    check_benchmark(op, sizes, kind, pg.size(), iterations, warmup)
    for size in sizes:
        case = _Case(pg, op, size, kind, device, shared)
        yield _measure(case, iterations, warmup)


def usual_device(devices: Iterable[str]) -> str:
    """Return the default device type to measure on: the CPU, else the first."""
    there = list(devices)
    return "cpu" if "cpu" in there else there[0]


def check_benchmark(
    op: str,
    sizes: Sequence[int],
    dtype: Any,
    ranks: int,
    iterations: int = 20,
    warmup: int = 5,
) -> None:
    """Raise `ValueError` for arguments that `benchmark` refuses for `ranks` ranks."""
    if op not in BENCHMARKS:
        raise ValueError(f"op {op!r}: expected one of {', '.join(BENCHMARKS)}")
    if iterations < 1 or warmup < 0:
        raise ValueError(
            f"expected at least 1 iteration and 0 to warm up, not {iterations} and "
            f"{warmup}"
        )
    if op == "batch_isend_irecv" and ranks < 2:
        raise ValueError("batch_isend_irecv: a ring needs at least 2 ranks")
    kind = np.dtype(dtype)
    if kind.kind not in "iufc":
        raise ValueError(f"dtype {kind}: expected integers, floats or complex numbers")
    least = kind.itemsize * (ranks if spec_of(op).divided else 1)
    small = [size for size in sizes if size < least]
    if small or not sizes:
        given = f"size {small[0]}" if small else "no size at all"
        raise ValueError(
            f"{given}: {op} of {kind} over {ranks} ranks needs at least {least} bytes"
        )


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_sizes(text: str) -> list[int]:
    """Return the bytes that `text` names, as nccl-tests spells them.

    ``"4K,1M"`` is a list; ``"1K:64M"`` doubles from the first to the last, and
    ``"1K:64M:4"`` takes steps of four times. K, M and G are powers of 1024.
    Raises `ValueError` for anything else.
    """
    sizes: list[int] = []
    for part in text.split(","):
        first, *rest = part.split(":")
        sizes.append(_bytes(first, text))
        if not rest:
            continue
        last = _bytes(rest[0], text)
        try:
            factor = float(rest[1]) if rest[1:] else 2.0
        except ValueError:
            factor = 0.0
        if len(rest) > 2 or last < sizes[-1] or not 1 < factor < math.inf:
            raise ValueError(f"sizes {text!r}: {_GRAMMAR}")
        exact = sizes[-1] * factor
        while exact <= last:
            if int(exact) > sizes[-1]:
                sizes.append(int(exact))
            exact *= factor
    return sizes


_GRAMMAR = "expected FIRST:LAST, FIRST:LAST:FACTOR or a list, such as 1K:64M or 4K,1M"


def _bytes(text: str, whole: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if size < 1:
        raise ValueError(f"sizes {whole!r}: {_GRAMMAR}")
    return size


def _measure(case: _Case, iterations: int, warmup: int) -> Measurement:
    call, fill, result = BENCHMARKS[case.op](case)
    fill()
    call()
    found = result()
    wrong = 0 if found is None else case.count_wrong(*found)
    # Repeated sums would overflow; zeros do not change.
    case.clear()
    for _ in range(warmup):
        call()
    case.settle()
    data_movement.barrier(group=case.group, device=case.device)
    began = time.perf_counter()
    for _ in range(iterations):
        call()
    case.settle()
    seconds = (time.perf_counter() - began) / iterations
    return Measurement(case.op, case.size, case.count, str(case.dtype), seconds, wrong)


class _Case:
    """One op at one size: its arrays, and the data for its check."""

    def __init__(
        self,
        group: ProcessGroup,
        op: str,
        size: int,
        dtype: np.dtype[Any],
        device: str,
        shared: bool,
    ) -> None:
        self.group, self.op, self.dtype, self.device = group, op, dtype, device
        self.ranks, self.rank = group.size(), group.rank
        #: Elements that a rank gives, or, of the divided ops, that a part has.
        self.count = size // dtype.itemsize
        if spec_of(op).divided:
            self.count //= self.ranks
            self.size = self.count * self.ranks * dtype.itemsize
        else:
            self.size = self.count * dtype.itemsize
        self._shared = shared
        self._arrays: list[Any] = []

    @property
    def peers(self) -> dict[str, Any]:
        return {"group": self.group}

    @property
    def root(self) -> int:
        """The root's rank in the default group, as ops require."""
        return get_global_rank(self.group, ROOT)

    def array(self, parts: int = 1) -> Any:
        """Return a new array of `parts` times `count` elements."""
        count = self.count * parts
        made: Any
        if self.device != "cpu":
            made = _array_module(self.device).empty(count, self.dtype)
        elif self._shared:
            made = empty(count, self.dtype)
        else:
            made = np.empty(count, self.dtype)
        self._arrays.append(made)
        return made

    def pattern(self, seed: int) -> np.ndarray:
        """`count` small numbers that depend on `seed`; exact in every dtype."""
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

    @property
    def everyone(self) -> range:
        return range(self.ranks)

    def put(self, array: Any, values: np.ndarray) -> None:
        """Copy host data into an array of this case."""
        if self.device == "cpu":
            array[:] = values
        else:
            array.set(values)

    def count_wrong(self, array: Any, expected: np.ndarray) -> int:
        found = array if self.device == "cpu" else array.get()
        return int(np.count_nonzero(found != expected))

    def clear(self) -> None:
        for array in self._arrays:
            array.fill(0)

    def settle(self) -> None:
        """Block the host until the device has finished."""
        if self.device != "cpu":
            _array_module(self.device).cuda.get_current_stream().synchronize()


def _array_module(device: str) -> Any:
    if device != "cuda":
        raise ValueError(f"device {device!r}: expected cpu or cuda")
    try:
        import cupy
    except ImportError as error:
        raise DistBackendError(
            "arrays on the GPU are made by cupy, which is not installed: "
            "pip install 'rankscope[cuda13]' (CUDA 12: 'rankscope[cuda12]')"
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


def _all_reduce(case: _Case) -> _Parts:
    x = case.array()
    return (
        lambda: reductions.all_reduce(x, **case.peers),
        lambda: case.put(x, case.pattern(case.rank)),
        lambda: (x, case.total()),
    )


def _reduce(case: _Case) -> _Parts:
    x = case.array()
    return (
        lambda: reductions.reduce(x, dst=case.root, **case.peers),
        lambda: case.put(x, case.pattern(case.rank)),
        lambda: (x, case.total()) if case.rank == ROOT else None,
    )


def _broadcast(case: _Case) -> _Parts:
    x = case.array()
    return (
        lambda: data_movement.broadcast(x, src=case.root, **case.peers),
        lambda: case.put(x, case.pattern(case.rank)),
        lambda: (x, case.pattern(ROOT)),
    )


def _all_gather_into_tensor(case: _Case) -> _Parts:
    x, out = case.array(), case.array(case.ranks)
    return (
        lambda: data_movement.all_gather_into_tensor(out, x, **case.peers),
        lambda: case.put(x, case.pattern(case.rank)),
        lambda: (out, case.patterns(case.everyone)),
    )


def _reduce_scatter_tensor(case: _Case) -> _Parts:
    x, out = case.array(case.ranks), case.array()
    seeds = [case.rank + part for part in case.everyone]
    return (
        lambda: reductions.reduce_scatter_tensor(out, x, **case.peers),
        lambda: case.put(x, case.patterns(seeds)),
        lambda: (out, case.total(case.rank)),
    )


def _all_to_all_single(case: _Case) -> _Parts:
    x, out = case.array(case.ranks), case.array(case.ranks)
    sent = [case.rank + 2 * to for to in case.everyone]
    received = [source + 2 * case.rank for source in case.everyone]
    return (
        lambda: data_movement.all_to_all_single(out, x, **case.peers),
        lambda: case.put(x, case.patterns(sent)),
        lambda: (out, case.patterns(received)),
    )


def _gather(case: _Case) -> _Parts:
    x = case.array()
    out = case.array(case.ranks) if case.rank == ROOT else None
    parts = None if out is None else list(out.reshape(case.ranks, case.count))
    return (
        lambda: data_movement.gather(x, parts, dst=case.root, **case.peers),
        lambda: case.put(x, case.pattern(case.rank)),
        lambda: None if out is None else (out, case.patterns(case.everyone)),
    )


def _scatter(case: _Case) -> _Parts:
    out = case.array()
    x = case.array(case.ranks) if case.rank == ROOT else None
    parts = None if x is None else list(x.reshape(case.ranks, case.count))

    def fill() -> None:
        if x is not None:
            case.put(x, case.patterns(case.everyone))

    return (
        lambda: data_movement.scatter(out, parts, src=case.root, **case.peers),
        fill,
        lambda: (out, case.pattern(case.rank)),
    )


def _ring(case: _Case) -> _Parts:
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
BENCHMARKS: dict[str, Callable[[_Case], _Parts]] = {
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
