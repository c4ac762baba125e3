"""Benchmarks: ranks measure a collective, size by size, and the results come here."""

from __future__ import annotations

import csv
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.backends import BackendConfig
from rankscope.backends.backend import known_backends, resolve
from rankscope.backends.bandwidth import algbw, busbw
from rankscope.backends.benchmark import benchmark, usual_device
from rankscope.backends.errors import DistBackendError
from rankscope.backends.groups import (
    destroy_process_group,
    new_group,
    resolve_group,
)

from . import private
from .availability import why_refused
from .execution import DATA_MESSAGE, Execution

if TYPE_CHECKING:
    from .ranks import Ranks

__all__ = ["Bench", "BenchResult", "BenchRow", "measure_on_rank", "start"]


@dataclass(frozen=True)
class BenchRow:
    """One op at one size with one backend, over all ranks of the group."""

    backend: str
    op: str
    ranks: int
    #: Bytes, and elements that one rank gives, as nccl-tests counts them.
    size: int
    count: int
    dtype: str
    #: Microseconds of one op: the mean over the ranks, the fastest, the slowest.
    time: float
    time_min: float
    time_max: float
    #: GB/s (10⁹ bytes).
    algbw: float
    busbw: float
    #: Elements that were wrong, on all ranks together.
    wrong: int


COLUMNS = tuple(field.name for field in fields(BenchRow))


class BenchResult(Sequence[BenchRow]):
    """What was measured: rows, or columns by name.

    ``result["busbw"]`` is a column as a numpy array, ``result[0]`` a row;
    ``pandas.DataFrame(result)`` has both.
    """

    columns = COLUMNS

    def __init__(self, rows: Sequence[BenchRow] = ()) -> None:
        self._rows = list(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[BenchRow]:
        return iter(self._rows)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            if key not in COLUMNS:
                raise KeyError(f"no column {key!r}; there are {', '.join(COLUMNS)}")
            return np.array([getattr(row, key) for row in self._rows])
        found = self._rows[key]
        return type(self)(found) if isinstance(key, slice) else found

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write a table with a line of column names, readable by everything."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(map(astuple, self._rows))

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows as dicts of plain values."""
        return [asdict(row) for row in self._rows]


class Bench:
    """A benchmark that runs on the ranks; `execution` is its cell.

    ``on_row(row)`` is called, on an I/O thread, for each size that all ranks
    are done with.
    """

    def __init__(
        self,
        execution: Execution,
        total: int,
        on_row: Callable[[BenchRow], None] | None = None,
    ) -> None:
        self.execution = execution
        #: Rows there will be.
        self.total = total
        self._on_row = on_row
        self._lock = threading.Lock()
        self._rows: list[BenchRow] = []
        self._parts: dict[str, dict[int, Mapping[str, Any]]] = {}
        execution.on_data(self._take)

    @property
    def rows(self) -> list[BenchRow]:
        """What is known so far."""
        with self._lock:
            return list(self._rows)

    def result(self, timeout: float | None = None) -> BenchResult:
        """Wait for the end and return all rows.

        Raises `ExecutionError` if a rank failed, and `TimeoutError`, naming
        the ranks, after `timeout` seconds; the benchmark then runs on.
        """
        self.execution.result(timeout)
        return BenchResult(self.rows)

    def _take(self, rank: int, data: Mapping[str, Any]) -> None:
        with self._lock:
            parts = self._parts.setdefault(data["place"], {})
            parts[rank] = data
            if len(parts) < len(self.execution.ranks):
                return
            row = _row(list(self._parts.pop(data["place"]).values()))
            self._rows.append(row)
        if self._on_row is not None:
            self._on_row(row)


def _row(parts: Sequence[Mapping[str, Any]]) -> BenchRow:
    one = parts[0]
    seconds = [part["seconds"] for part in parts]
    mean = sum(seconds) / len(seconds)
    return BenchRow(
        backend=one["backend"],
        op=one["op"],
        ranks=len(parts),
        size=one["size"],
        count=one["count"],
        dtype=one["dtype"],
        time=mean * 1e6,
        time_min=min(seconds) * 1e6,
        time_max=max(seconds) * 1e6,
        algbw=algbw(one["size"], mean),
        busbw=busbw(one["op"], one["size"], mean, len(parts)),
        wrong=sum(part["wrong"] for part in parts),
    )


def check_backends(names: Sequence[str], device: str | None) -> None:
    """Raise `ValueError` for names that `device` cannot be measured with."""
    for name in names:
        if ":" in name:
            raise ValueError(
                f"backend {name!r}: expected a name alone, such as "
                f"{name.rpartition(':')[2]!r}; --device (device=) says where the "
                "arrays are"
            )
        if device is not None:
            BackendConfig(f"{device}:{name}")
        elif name not in known_backends():
            # It says so. One that is known is made on the ranks, not here.
            BackendConfig(name)


def start(
    ranks: Ranks,
    request: Mapping[str, Any],
    group: str,
    cell: int | None,
    on_row: Callable[[BenchRow], None] | None,
) -> Bench:
    """Have the ranks of `group` carry out a request of `measure_on_rank`."""
    code = (
        f"__import__('importlib').import_module({__name__!r})"
        f".measure_on_rank({dict(request)!r})"
    )
    execution = ranks.execute(code, group=group, cell=cell)
    total = len(request["sizes"]) * max(1, len(request["backends"]))
    return Bench(execution, total, on_row)


# -- on a rank -------------------------------------------------------------------


def measure_on_rank(request: dict[str, Any]) -> None:
    """Measure in the cell's group, and publish each size as it is done.

    For each of ``request["backends"]`` in a group made for it, or as the
    cell's group is if there are none. Raises `DistBackendError` with the remedy
    for a backend that cannot be used here.
    """
    wanted = dict(request)
    names, device = wanted.pop("backends"), wanted.pop("device")
    own = resolve_group(None, "benchmark")
    if not names:
        served = own.config.device_backend_map
        place = device or usual_device(served)
        _measure(own, served.get(place), place, 0, wanted)
    for order, name in enumerate(names):
        place = device or usual_device(resolve(name).devices)
        config = f"{place}:{name}"
        group = new_group(own.ranks, own.timeout, config, group_desc=f"bench {name}")
        try:
            _measure(group, name, place, order, wanted)
        finally:
            destroy_process_group(group)


def _measure(
    group: Any, name: str | None, device: str, order: int, wanted: Mapping[str, Any]
) -> None:
    reason = None if name is None else why_refused(device, name)
    if reason is not None:
        raise DistBackendError(reason)
    for place, found in enumerate(benchmark(group=group, device=device, **wanted)):
        _publish({"place": f"{order}/{place}", "backend": name, **asdict(found)})


def _publish(data: Mapping[str, Any]) -> None:
    from ipykernel.kernelapp import IPKernelApp

    kernel = IPKernelApp.instance().kernel
    parent = private.message_header(kernel.get_parent("shell"))
    private.publish(kernel, DATA_MESSAGE, data, parent)
