"""benchmark: time and bandwidth of a collective in this group, size by size."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .benchmark_cases import BENCHMARKS, Case
from .collectives.data_movement import barrier
from .did_you_mean import did_you_mean
from .groups.membership import Group, resolve_group
from .work.op_type import spec_of

__all__ = [
    "BENCHMARKS",
    "Measurement",
    "benchmark",
    "check_benchmark",
    "parse_sizes",
    "usual_device",
]


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
) -> Iterator[Measurement]:
    """Measure `op` for each of `sizes`; every rank of the group calls it alike.

    `op` is one of `BENCHMARKS`. A size is S of nccl-tests in bytes: what one
    rank gives, or for the gathers and scatters the array as a whole; it is
    rounded down to whole elements on every rank. Ops run one after the other
    on one array, ``warmup`` times before the clock starts and ``iterations``
    times while it runs. They are on `device`, ``"cpu"`` or ``"cuda"``; ``None``
    is the group's only one, or its CPU.

    Raises `ValueError` before anything moves if the arguments make no sense,
    and `DistBackendError` where there is no GPU to make arrays on.
    """
    pg = resolve_group(group, "benchmark")
    served = pg.config.device_backend_map
    if device is None:
        device = usual_device(served)
    if device not in served:
        raise ValueError(
            f"group {pg.group_desc!r} has no backend for device {device!r}, it is "
            f"{pg.config}: name another device, or a backend for this one"
        )
    kind = np.dtype(dtype)
    check_benchmark(op, sizes, kind, pg.size(), iterations, warmup)
    for size in sizes:
        case = Case(pg, op, size, kind, device)
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
        raise ValueError(
            f"op {op!r}: expected one of {', '.join(BENCHMARKS)}"
            f"{did_you_mean(op, BENCHMARKS)}"
        )
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


def _measure(case: Case, iterations: int, warmup: int) -> Measurement:
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
    barrier(group=case.group, device=case.device)
    began = time.perf_counter()
    for _ in range(iterations):
        call()
    case.settle()
    seconds = (time.perf_counter() - began) / iterations
    return Measurement(case.op, case.size, case.count, str(case.dtype), seconds, wrong)
