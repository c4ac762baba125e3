"""Level *exact*: every op against numpy, for one number of ranks.

Inputs are drawn from a generator seeded by rank, so each rank knows what all
of them hold and works out the expected result by itself. Values are small
integers: every sum and product is exact in every dtype.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import rankscope.backends as dist

from ..groups.process_group import ProcessGroup
from ..work.reduce_op import ReduceOp
from .trial import Arrays, HostArrays, Rule, Trial, Unclaimed
from .waiting import until

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
#: Elements; above are one size alone and few dtypes.
LARGE = 100_000
SIZES = [0, 1, 7, 1009, (1 << 20) + 3]

NUMPY: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


def data(rank: int, size: int, dtype: str, salt: int = 0) -> Array:
    """Return the input of `rank`: 0 … 3, negative too for signed dtypes; read-only.

    Small arrays are cached, because many cases use the same ones.
    """
    make = _drawn_once if size <= LARGE else _drawn
    return make(rank, size, dtype, salt)


def _drawn(rank: int, size: int, dtype: str, salt: int) -> Array:
    generator = np.random.default_rng([rank, size, salt])
    kind = np.dtype(dtype)
    low = -2 if kind.kind in "ifc" else 0
    values = generator.integers(low, 3, size, dtype=np.int8)
    if kind.kind == "c":
        values = values + 1j * generator.integers(low, 3, size, dtype=np.int8)
    result = values.astype(kind)
    result.flags.writeable = False
    return result


_drawn_once = functools.lru_cache(maxsize=256)(_drawn)


def assert_same(found: Array, wanted: Array) -> None:
    """Call `np.testing.assert_array_equal`, which is slow, only if arrays differ."""
    if not np.array_equal(found, wanted):
        np.testing.assert_array_equal(found, wanted)


def reduced(op: ReduceOp, arrays: Sequence[Array]) -> Array:
    """Return the reduction of `arrays` in their own dtype."""
    if op is ReduceOp.AVG:
        total = reduced(ReduceOp.SUM, arrays)
        if total.dtype.kind in "iu":
            return (np.sign(total) * (abs(total) // len(arrays))).astype(total.dtype)
        return (total / len(arrays)).astype(total.dtype)
    result = arrays[0].copy()
    for array in arrays[1:]:
        result = NUMPY[op](result, array).astype(array.dtype, copy=False)
    return result


class Checker:
    """Runs one op at a time on this rank, and compares."""

    def __init__(
        self,
        arrays: Arrays | None = None,
        *,
        async_op: bool | None = False,
        group: ProcessGroup | None = None,
    ) -> None:
        """`group`: the default group; `async_op` ``None``: every second op."""
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.arrays = arrays or HostArrays()
        self.group = group
        self._async_op, self._turn = async_op, False

    @property
    def how(self) -> dict[str, Any]:
        """The keyword arguments of the op that is checked now."""
        return {"group": self.group, "async_op": self.async_op}

    @property
    def async_op(self) -> bool:
        """Whether the op that is checked now is called with ``async_op=True``."""
        return self._turn if self._async_op is None else self._async_op

    def copy(self, values: Array) -> Any:
        """`values` in memory of the kind under test."""
        result = self.arrays.empty(values.shape, values.dtype)
        self.arrays.write(result, values)
        return result

    def blank(self, size: int, dtype: str, columns: int = 0) -> Any:
        """Return an output array whose content differs from any result."""
        values = np.empty(size, dtype)
        values.view(np.uint8)[...] = 1 if dtype == "bool" else 77
        return self.copy(values.reshape(-1, columns) if columns else values)

    def everybody(self, size: int, dtype: str, salt: int = 0) -> list[Array]:
        """Return the inputs of all ranks."""
        return [data(r, size, dtype, salt) for r in range(self.world)]

    def done(self, work: dist.Work | None) -> None:
        """Wait; check that sync ops returned ``None`` and async ops a Work."""
        if self.async_op:
            assert work is not None
            assert work.wait()
            if self.arrays.wait_blocks_host:
                assert work.is_success(), f"wait() returned, and the state is {work!r}"
            else:
                until(work.is_success, what=f"the end of {work!r}")
        else:
            assert work is None
        self._turn = not self._turn

    def same(self, array: Any, wanted: Array) -> None:
        """Check the content of `array`."""
        assert_same(self.arrays.read(array), wanted)

    # Each method checks one op; the name says which.

    def all_reduce(self, size: int, dtype: str, op: ReduceOp) -> None:
        held = self.everybody(size, dtype)
        x = self.copy(held[self.rank])
        self.done(dist.all_reduce(x, op, **self.how))
        self.same(x, reduced(op, held))

    def reduce(self, size: int, dtype: str, op: ReduceOp) -> None:
        held = self.everybody(size, dtype)
        for root in range(self.world):
            x = self.copy(held[self.rank])
            self.done(dist.reduce(x, op=op, group_dst=root, **self.how))
            wanted = reduced(op, held) if self.rank == root else held[self.rank]
            self.same(x, wanted)

    def reduce_scatter(self, size: int, dtype: str, op: ReduceOp) -> None:
        sizes = [size + r for r in range(self.world)]
        held = [
            [data(r, n, dtype, part) for part, n in enumerate(sizes)]
            for r in range(self.world)
        ]
        inputs = [self.copy(entry) for entry in held[self.rank]]
        out = self.blank(sizes[self.rank], dtype)
        self.done(dist.reduce_scatter(out, inputs, op, **self.how))
        mine = [held[r][self.rank] for r in range(self.world)]
        self.same(out, reduced(op, mine))
        for entry, before in zip(inputs, held[self.rank], strict=True):
            self.same(entry, before)

    def reduce_scatter_tensor(self, size: int, dtype: str, op: ReduceOp) -> None:
        held = self.everybody(size * self.world, dtype)
        source = self.copy(held[self.rank])
        out = self.blank(size, dtype)
        self.done(dist.reduce_scatter_tensor(out, source, op, **self.how))
        wanted = reduced(op, held)[self.rank * size : (self.rank + 1) * size]
        self.same(out, wanted)
        self.same(source, held[self.rank])

    def broadcast(self, size: int, dtype: str) -> None:
        held = self.everybody(size, dtype)
        for root in range(self.world):
            x = self.copy(held[self.rank])
            self.done(dist.broadcast(x, group_src=root, **self.how))
            self.same(x, held[root])

    def all_gather(self, size: int, dtype: str) -> None:
        # Rank r has r elements more: sizes may differ.
        held = [data(r, size + r, dtype) for r in range(self.world)]
        x = self.copy(held[self.rank])
        outs = [self.blank(size + r, dtype) for r in range(self.world)]
        self.done(dist.all_gather(outs, x, **self.how))
        for out, wanted in zip(outs, held, strict=True):
            self.same(out, wanted)
        self.same(x, held[self.rank])

    def all_gather_into_tensor(self, size: int, dtype: str) -> None:
        held = self.everybody(size, dtype)
        x = self.copy(held[self.rank])
        out = self.blank(size * self.world, dtype)
        self.done(dist.all_gather_into_tensor(out, x, **self.how))
        self.same(out, np.concatenate(held))
        self.same(x, held[self.rank])

    def gather(self, size: int, dtype: str) -> None:
        held = self.everybody(size, dtype)
        for root in range(self.world):
            x = self.copy(held[self.rank])
            outs = None
            if self.rank == root:
                outs = [self.blank(size, dtype) for _ in range(self.world)]
            self.done(dist.gather(x, outs, group_dst=root, **self.how))
            self.same(x, held[self.rank])
            if outs is not None:
                for out, wanted in zip(outs, held, strict=True):
                    self.same(out, wanted)

    def scatter(self, size: int, dtype: str) -> None:
        for root in range(self.world):
            parts = [data(root, size, dtype, part) for part in range(self.world)]
            inputs = [self.copy(part) for part in parts] if self.rank == root else None
            out = self.blank(size, dtype)
            self.done(dist.scatter(out, inputs, group_src=root, **self.how))
            self.same(out, parts[self.rank])
            for entry, before in zip(inputs or [], parts, strict=False):
                self.same(entry, before)

    def all_to_all(self, size: int, dtype: str) -> None:
        # Rank r sends size + r + 2q elements to rank q.
        def between(r: int, q: int) -> Array:
            return data(r, size + r + 2 * q, dtype, q)

        inputs = [self.copy(between(self.rank, q)) for q in range(self.world)]
        wanted = [between(r, self.rank) for r in range(self.world)]
        outs = [self.blank(part.size, dtype) for part in wanted]
        self.done(dist.all_to_all(outs, inputs, **self.how))
        for out, part in zip(outs, wanted, strict=True):
            self.same(out, part)
        for q, entry in enumerate(inputs):
            self.same(entry, between(self.rank, q))

    def all_to_all_single(self, size: int, dtype: str) -> None:
        held = self.everybody(size * self.world, dtype)
        source = self.copy(held[self.rank])
        out = self.blank(size * self.world, dtype)
        self.done(dist.all_to_all_single(out, source, **self.how))
        mine = slice(self.rank * size, (self.rank + 1) * size)
        wanted = np.concatenate([part[mine] for part in held])
        self.same(out, wanted)
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
        out = self.blank(sum(receives) * 2, dtype, columns=2)
        source = self.copy(held[self.rank])
        work = dist.all_to_all_single(
            out, source, receives, rows[self.rank], **self.how
        )
        self.done(work)
        parts = []
        for r in range(self.world):
            start = sum(rows[r][: self.rank])
            parts.append(held[r][start : start + rows[r][self.rank]])
        self.same(out, np.concatenate(parts))

    def send_and_recv(self, size: int, dtype: str) -> None:
        """Send around the ring in both directions at once, blocking and not."""
        if self.world == 1:
            return
        up, down = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        x = self.copy(data(self.rank, size, dtype))
        from_down, from_up = self.blank(size, dtype), self.blank(size, dtype)
        # On a device messages are matched in the order of issue, without tags.
        upwards, downwards = (1, 2) if self.arrays.wait_blocks_host else (0, 0)
        with self._batch():
            works = [
                dist.isend(x, group_dst=up, tag=upwards, group=self.group),
                dist.isend(x, group_dst=down, tag=downwards, group=self.group),
                dist.irecv(from_up, group_src=up, tag=downwards, group=self.group),
                dist.irecv(from_down, group_src=down, tag=upwards, group=self.group),
            ]
        for work in works:
            assert work.wait()
        self.same(from_down, data(down, size, dtype))
        self.same(from_up, data(up, size, dtype))
        self.same(x, data(self.rank, size, dtype))
        if self.rank == 0:
            dist.send(x, group_dst=1, group=self.group)
        elif self.rank == 1:
            assert dist.recv(from_down, group_src=0, group=self.group) == 0
            self.same(from_down, data(0, size, dtype))

    def _batch(self) -> contextlib.AbstractContextManager[Any]:
        # Sends on one stream of a device block one another, unless batched.
        if self.arrays.wait_blocks_host:
            return contextlib.nullcontext()
        return dist.coalescing_manager(self.group)


WITHOUT_REDUCE_OP = [
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "send_and_recv",
]
WITH_REDUCE_OP = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"]
#: The names of the rules that try one op.
OPS = (*WITH_REDUCE_OP, *WITHOUT_REDUCE_OP)


def cases(
    sizes: Sequence[int], reducible: Sequence[str], movable: Sequence[str]
) -> Iterator[tuple[Any, ...]]:
    """(op, size, dtype[, reduction]), in one order on all ranks."""
    for size in sizes:
        for name in WITHOUT_REDUCE_OP:
            for arguments in cases_of(name, [size], movable):
                yield name, *arguments
        for name in WITH_REDUCE_OP:
            for arguments in cases_of(name, [size], reducible):
                yield name, *arguments


def cases_of(
    name: str, sizes: Sequence[int], dtypes: Sequence[str]
) -> Iterator[tuple[Any, ...]]:
    """(size, dtype[, reduction]) of the op `name`."""
    for size in sizes:
        # The largest size tests chunking, for which few dtypes suffice.
        large = size > LARGE
        if name in WITHOUT_REDUCE_OP:
            for dtype in ["uint8", "float32"] if large else dtypes:
                yield size, dtype
        else:
            for dtype in ["float16", "float64"] if large else dtypes:
                for op in [ReduceOp.SUM] if large else [*NUMPY, ReduceOp.AVG]:
                    yield size, dtype, op


def check(checker: Checker, name: str, arguments: tuple[Any, ...]) -> None:
    """Check one case; an `AssertionError` names the case that failed."""
    try:
        getattr(checker, name)(*arguments)
    except Exception as error:
        raise AssertionError(f"{case(name, arguments)}: {error}") from error


def case(name: str, arguments: tuple[Any, ...]) -> str:
    """``all_reduce(7, int8, SUM)``: a case, for messages."""
    words = [getattr(one, "name", str(one)) for one in arguments]
    return f"{name}({', '.join(words)})"


def check_everything(
    checker: Checker,
    sizes: Sequence[int] = SIZES,
    reducible: Sequence[str] = REDUCIBLE,
    movable: Sequence[str] = MOVABLE,
    lacking: Collection[str] = (),
) -> int:
    """Check every case on this rank; return how many. Nothing may be refused.

    The ops `lacking`, which the backend does not have, are not tried.
    """
    count = 0
    for name, *arguments in cases(sizes, reducible, movable):
        if name in lacking:
            continue
        check(checker, name, tuple(arguments))
        count += 1
    dist.barrier(group=checker.group)
    return count


# -- as rules ------------------------------------------------------------------


def _op_is_exact(name: str, trial: Trial) -> None:
    """Every case of one op that the backend claims."""
    options = trial.options
    if not options.includes(name.replace("send_and_recv", "send")):
        raise Unclaimed("not among the ops that were asked for")
    checker = Checker(trial.arrays, async_op=options.async_op, group=trial.group)
    # An op on empty arrays does not reach the backend: the others come first.
    sizes = sorted(options.sizes, key=lambda size: size == 0)
    dtypes = options.movable if name in WITHOUT_REDUCE_OP else options.reducible
    for arguments in cases_of(name, sizes, dtypes):
        status = trial.group.status
        issued = status.collective_seq, status.p2p_seq
        try:
            check(checker, name, arguments)
        except AssertionError as failure:
            refusal = failure.__cause__
            if isinstance(refusal, NotImplementedError) and not trial.cases:
                raise Unclaimed(str(refusal)) from None
            # A refusal comes from `Backend.check`, before the op has a number.
            if not isinstance(refusal, NotImplementedError) and (
                not isinstance(refusal, TypeError | ValueError)
                or issued != (status.collective_seq, status.p2p_seq)
            ):
                raise
            trial.skipped[case(name, arguments)] = str(refusal)
        else:
            trial.held()


def _barrier_holds(trial: Trial) -> None:
    """No rank leaves a barrier before the last one has entered."""
    if not trial.options.includes("barrier"):
        raise Unclaimed("not among the ops that were asked for")
    for turn, async_op in enumerate((False, True)):
        key = f"entered/{turn}"
        if trial.rank == trial.size - 1:
            # Long enough for the others to leave a barrier that does not hold.
            time.sleep(0.2)
            trial.store.set(key, b"")
        try:
            work = dist.barrier(group=trial.group, async_op=async_op)
        except NotImplementedError as error:
            raise Unclaimed(str(error)) from None
        if work is not None:
            work.wait()
            until(work.is_completed, what=f"the end of {work!r}")
        assert trial.store.check([key]), (
            f"rank {trial.rank} left barrier {turn + 1} before rank {trial.size - 1} "
            "entered"
        )
        trial.held()


_WHAT = {
    "send_and_recv": "send and recv move every dtype and size between neighbours",
    **{
        name: f"{name} is exact in every dtype, reduction and size"
        for name in WITH_REDUCE_OP
    },
}

RULES = [
    *(
        Rule(
            "exact",
            name,
            _WHAT.get(name, f"{name} moves every dtype and size as numpy would"),
            functools.partial(_op_is_exact, name),
            ranks=2 if name == "send_and_recv" else 1,
        )
        for name in OPS
    ),
    Rule("exact", "barrier", "no rank leaves before the last enters", _barrier_holds),
]
