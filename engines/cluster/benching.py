"""Results of a benchmark: the ranks measure size by size, and each size is a row."""

from __future__ import annotations

import csv
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from os import PathLike
from typing import Any

import numpy as np

from rankscope.backends import BackendConfig
from rankscope.backends.benchmark import check_benchmark
from rankscope.backends.interface.registry import known_backends
from rankscope.backends.work.op_type import algbw, busbw

from ..wire.ipyparallel_private import call_of
from .execution import Execution

__all__ = ["Bench", "BenchResult", "BenchRow", "code_of"]


@dataclass(frozen=True)
class BenchRow:
    """One op at one size with one backend, over all ranks of the group."""

    #: The name of the backend.
    backend: str
    #: The name of the op.
    op: str
    #: The number of ranks.
    ranks: int
    #: Bytes, as nccl-tests counts them.
    size: int
    #: Elements of one rank's input.
    count: int
    #: The dtype of the arrays.
    dtype: str
    #: Microseconds of one op, the mean over the ranks.
    time: float
    #: Microseconds of one op on the fastest rank.
    time_min: float
    #: Microseconds of one op on the slowest rank.
    time_max: float
    #: GB/s (10⁹ bytes): `size` in `time`.
    algbw: float
    #: GB/s (10⁹ bytes) over each rank's link, as nccl-tests has it.
    busbw: float
    #: Elements that were wrong, on all ranks together.
    wrong: int


COLUMNS = tuple(field.name for field in fields(BenchRow))


class BenchResult(Sequence[BenchRow]):
    """The results of a benchmark, as rows, or as columns by name.

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
        """Write the rows as CSV, below a line with the names of the columns.

        Parameters
        ----------
        path : str or path-like
            The file.
        """
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(map(astuple, self._rows))


class Bench:
    """A benchmark that runs on the ranks; `execution` is its cell.

    A `timeout` is the seconds to wait at most.

    ``on_row(row)`` is called, on an I/O thread, for each size that all ranks have
    finished.
    """

    def __init__(
        self,
        execution: Execution,
        total: int,
        on_row: Callable[[BenchRow], None] | None = None,
    ) -> None:
        self.execution = execution
        #: The number of rows at the end.
        self.total = total
        self._on_row = on_row
        self._lock = threading.Lock()
        self._rows: list[BenchRow] = []
        self._parts: dict[str, dict[int, Mapping[str, Any]]] = {}
        execution.on_data(self._add_part)

    @property
    def rows(self) -> list[BenchRow]:
        """The rows so far."""
        with self._lock:
            return list(self._rows)

    def result(self, timeout: float | None = None) -> BenchResult:
        """Wait for the end and return all rows.

        Raises
        ------
        ExecutionError
            A rank failed.
        TimeoutError
            `timeout` passed; the message names the ranks that are not done. The
            benchmark runs on.
        """
        self.execution.result(timeout)
        return BenchResult(self.rows)

    def _add_part(self, rank: int, data: Mapping[str, Any]) -> None:
        with self._lock:
            parts = self._parts.setdefault(data["row"], {})
            parts[rank] = data
            if len(parts) < len(self.execution.ranks):
                return
            row = _row(list(self._parts.pop(data["row"]).values()))
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


def code_of(
    ranks: int, *, backends: Sequence[str], device: str | None, **wanted: Any
) -> str:
    """Return the cell that measures what is `wanted`; see `agent.benchmark`."""
    check_benchmark(ranks=ranks, **wanted)
    for name in backends:
        _check_backend(name, device)
    arguments = {"backends": [*backends], "device": device, **wanted}
    return call_of("benchmark", "measure_on_rank", arguments)


def _check_backend(name: str, device: str | None) -> None:
    """Raise `ValueError` for a name that `device` cannot be measured with."""
    if ":" in name:
        raise ValueError(
            f"backend {name!r}: expected a name alone, such as "
            f"{name.rpartition(':')[2]!r}; --device (device=) is where the arrays are"
        )
    if device is not None:
        BackendConfig(f"{device}:{name}")
    elif name not in known_backends():
        # Raises. A registered backend is made on the ranks, not here.
        BackendConfig(name)
