"""Every collective against numpy, for one rank count: what the ranks run.

Inputs are drawn from a generator seeded by rank, so each rank knows what all
of them hold and works out the expected result by itself. Values are small
integers: every sum and product is exact in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import rankscope as dist
from rankscope.backends import ReduceOp

Array = npt.NDArray[Any]

REDUCIBLE = [
    "int8",
    "uint8",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
]
MOVABLE = [*REDUCIBLE, "int16", "uint16", "bool", "complex64", "complex128"]
SIZES = [0, 1, 7, 1009, (1 << 20) + 3]

NUMPY: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


def data(rank: int, size: int, dtype: str, salt: int = 0) -> Array:
    """What `rank` holds: 0 … 3, negative too where the dtype has a sign."""
    generator = np.random.default_rng([rank, size, salt])
    kind = np.dtype(dtype)
    low = -2 if kind.kind in "ifc" else 0
    values = generator.integers(low, 3, size)
    if kind.kind == "c":
        return (values + 1j * generator.integers(low, 3, size)).astype(kind)
    return values.astype(kind)


def reduced(op: ReduceOp, arrays: Sequence[Array]) -> Array:
    """The reduction of `arrays` in their own dtype."""
    if op is ReduceOp.AVG:
        total = reduced(ReduceOp.SUM, arrays)
        if total.dtype.kind in "iu":
            return (np.sign(total) * (abs(total) // len(arrays))).astype(total.dtype)
        return (total / len(arrays)).astype(total.dtype)
    result = arrays[0].copy()
    for array in arrays[1:]:
        result = NUMPY[op](result, array).astype(array.dtype)
    return result


class Checker:
    """Runs one op at a time on this rank, and compares."""

    def __init__(self, async_op: bool, make: Callable[..., Array]) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.async_op = async_op
        self.make = make

    def copy(self, array: Array) -> Array:
        """`array` in memory of the kind under test."""
        result = self.make(array.shape, array.dtype)
        result[...] = array
        return result

    def blank(self, size: int, dtype: str) -> Array:
        """An output whose present content is certainly not the result."""
        result = self.make((size,), np.dtype(dtype))
        result.view(np.uint8)[...] = 1 if dtype == "bool" else 77
        return result

    def everybody(self, size: int, dtype: str, salt: int = 0) -> list[Array]:
        """What each rank holds."""
        return [data(r, size, dtype, salt) for r in range(self.world)]

    def done(self, work: dist.Work | None) -> None:
        """Wait, and check that sync ops gave nothing and async ones a Work."""
        if self.async_op:
            assert work is not None
            assert work.wait()
            assert work.is_success()
        else:
            assert work is None

    # Each method checks one op; the name says which.

    def all_reduce(self, size: int, dtype: str, op: ReduceOp) -> None:
        held = self.everybody(size, dtype)
        x = self.copy(held[self.rank])
        self.done(dist.all_reduce(x, op, async_op=self.async_op))
        np.testing.assert_array_equal(x, reduced(op, held))

    def reduce(self, size: int, dtype: str, op: ReduceOp) -> None:
        held = self.everybody(size, dtype)
        for root in range(self.world):
            x = self.copy(held[self.rank])
            self.done(dist.reduce(x, op=op, group_dst=root, async_op=self.async_op))
            wanted = reduced(op, held) if self.rank == root else held[self.rank]
            np.testing.assert_array_equal(x, wanted)

    def reduce_scatter(self, size: int, dtype: str, op: ReduceOp) -> None:
        sizes = [size + r for r in range(self.world)]
        held = [
            [data(r, n, dtype, part) for part, n in enumerate(sizes)]
            for r in range(self.world)
        ]
        inputs = [self.copy(entry) for entry in held[self.rank]]
        out = self.blank(sizes[self.rank], dtype)
        self.done(dist.reduce_scatter(out, inputs, op, async_op=self.async_op))
        mine = [held[r][self.rank] for r in range(self.world)]
        np.testing.assert_array_equal(out, reduced(op, mine))
        for entry, before in zip(inputs, held[self.rank], strict=True):
            np.testing.assert_array_equal(entry, before)

    def reduce_scatter_tensor(self, size: int, dtype: str, op: ReduceOp) -> None:
        held = self.everybody(size * self.world, dtype)
        source = self.copy(held[self.rank])
        out = self.blank(size, dtype)
        self.done(dist.reduce_scatter_tensor(out, source, op, async_op=self.async_op))
        wanted = reduced(op, held)[self.rank * size : (self.rank + 1) * size]
        np.testing.assert_array_equal(out, wanted)
        np.testing.assert_array_equal(source, held[self.rank])

    def broadcast(self, size: int, dtype: str) -> None:
        held = self.everybody(size, dtype)
        for root in range(self.world):
            x = self.copy(held[self.rank])
            self.done(dist.broadcast(x, root, async_op=self.async_op))
            np.testing.assert_array_equal(x, held[root])

    def all_gather(self, size: int, dtype: str) -> None:
        # Rank r brings r elements more: sizes may differ.
        held = [data(r, size + r, dtype) for r in range(self.world)]
        x = self.copy(held[self.rank])
        outs = [self.blank(size + r, dtype) for r in range(self.world)]
        self.done(dist.all_gather(outs, x, async_op=self.async_op))
        for out, wanted in zip(outs, held, strict=True):
            np.testing.assert_array_equal(out, wanted)
        np.testing.assert_array_equal(x, held[self.rank])

    def all_gather_into_tensor(self, size: int, dtype: str) -> None:
        held = self.everybody(size, dtype)
        x = self.copy(held[self.rank])
        out = self.blank(size * self.world, dtype)
        self.done(dist.all_gather_into_tensor(out, x, async_op=self.async_op))
        np.testing.assert_array_equal(out, np.concatenate(held))
        np.testing.assert_array_equal(x, held[self.rank])

    def gather(self, size: int, dtype: str) -> None:
        held = self.everybody(size, dtype)
        for root in range(self.world):
            x = self.copy(held[self.rank])
            outs = None
            if self.rank == root:
                outs = [self.blank(size, dtype) for _ in range(self.world)]
            self.done(dist.gather(x, outs, root, async_op=self.async_op))
            np.testing.assert_array_equal(x, held[self.rank])
            if outs is not None:
                for out, wanted in zip(outs, held, strict=True):
                    np.testing.assert_array_equal(out, wanted)

    def scatter(self, size: int, dtype: str) -> None:
        for root in range(self.world):
            parts = [data(root, size, dtype, part) for part in range(self.world)]
            inputs = [self.copy(part) for part in parts] if self.rank == root else None
            out = self.blank(size, dtype)
            self.done(dist.scatter(out, inputs, root, async_op=self.async_op))
            np.testing.assert_array_equal(out, parts[self.rank])
            for entry, before in zip(inputs or [], parts, strict=False):
                np.testing.assert_array_equal(entry, before)

    def all_to_all(self, size: int, dtype: str) -> None:
        # From r to q go size + r + 2q elements.
        def between(r: int, q: int) -> Array:
            return data(r, size + r + 2 * q, dtype, q)

        inputs = [self.copy(between(self.rank, q)) for q in range(self.world)]
        wanted = [between(r, self.rank) for r in range(self.world)]
        outs = [self.blank(part.size, dtype) for part in wanted]
        self.done(dist.all_to_all(outs, inputs, async_op=self.async_op))
        for out, part in zip(outs, wanted, strict=True):
            np.testing.assert_array_equal(out, part)
        for q, entry in enumerate(inputs):
            np.testing.assert_array_equal(entry, between(self.rank, q))

    def all_to_all_single(self, size: int, dtype: str) -> None:
        held = self.everybody(size * self.world, dtype)
        source = self.copy(held[self.rank])
        out = self.blank(size * self.world, dtype)
        self.done(dist.all_to_all_single(out, source, async_op=self.async_op))
        mine = slice(self.rank * size, (self.rank + 1) * size)
        wanted = np.concatenate([part[mine] for part in held])
        np.testing.assert_array_equal(out, wanted)
        self._all_to_all_rows(min(size, 40), dtype)

    def _all_to_all_rows(self, size: int, dtype: str) -> None:
        """Uneven splits of the rows of a matrix, some of them empty."""
        rows = [
            [(r + q) % 3 * size for q in range(self.world)] for r in range(self.world)
        ]
        held = [
            data(r, sum(rows[r]) * 2, dtype).reshape(-1, 2) for r in range(self.world)
        ]
        receives = [rows[r][self.rank] for r in range(self.world)]
        out = self.blank(sum(receives) * 2, dtype).reshape(-1, 2)
        source = self.copy(held[self.rank])
        work = dist.all_to_all_single(
            out, source, receives, rows[self.rank], async_op=self.async_op
        )
        self.done(work)
        parts = []
        for r in range(self.world):
            start = sum(rows[r][: self.rank])
            parts.append(held[r][start : start + rows[r][self.rank]])
        np.testing.assert_array_equal(out, np.concatenate(parts))

    def send_and_recv(self, size: int, dtype: str) -> None:
        """Round the ring, both ways at once, blocking and not."""
        if self.world == 1:
            return
        up, down = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        x = self.copy(data(self.rank, size, dtype))
        from_down, from_up = self.blank(size, dtype), self.blank(size, dtype)
        works = [
            dist.isend(x, up, tag=1),
            dist.isend(x, down, tag=2),
            dist.irecv(from_up, up, tag=2),
            dist.irecv(from_down, down, tag=1),
        ]
        for work in works:
            assert work.wait()
        np.testing.assert_array_equal(from_down, data(down, size, dtype))
        np.testing.assert_array_equal(from_up, data(up, size, dtype))
        np.testing.assert_array_equal(x, data(self.rank, size, dtype))
        if self.rank == 0:
            dist.send(x, 1)
        elif self.rank == 1:
            assert dist.recv(from_down, 0) == 0
            np.testing.assert_array_equal(from_down, data(0, size, dtype))


MOVES = [
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "send_and_recv",
]
REDUCTIONS = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"]


def cases(
    sizes: Sequence[int], reducible: Sequence[str], movable: Sequence[str]
) -> Iterator[tuple[Any, ...]]:
    """(op, size, dtype[, reduction]), in one order on all ranks."""
    for size in sizes:
        # The largest size is about bytes and chunks, not about dtypes.
        large = size > 100_000
        for dtype in ["uint8", "float32"] if large else movable:
            for name in MOVES:
                yield name, size, dtype
        for dtype in ["float16", "float64"] if large else reducible:
            for name in REDUCTIONS:
                for op in [ReduceOp.SUM] if large else [*NUMPY, ReduceOp.AVG]:
                    yield name, size, dtype, op


def check_everything(
    async_op: bool,
    make: Callable[..., Array] = np.empty,
    sizes: Sequence[int] = SIZES,
    reducible: Sequence[str] = REDUCIBLE,
    movable: Sequence[str] = MOVABLE,
) -> int:
    """Check every case on this rank, over the default group; return how many."""
    checker, count = Checker(async_op, make), 0
    for name, *arguments in cases(sizes, reducible, movable):
        try:
            getattr(checker, name)(*arguments)
        except Exception as error:
            raise AssertionError(f"{name}{tuple(arguments)}: {error}") from error
        count += 1
    dist.barrier()
    return count
