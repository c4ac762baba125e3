"""One method for each op: run the op on this rank, and compare with numpy."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

import rankscope.backends as dist

from ..groups.process_group import ProcessGroup
from ..work.reduce_op import ReduceOp
from .expect import same
from .reference import Array, data, reduced
from .trial import Arrays, HostArrays
from .waiting import until

__all__ = ["Checker"]


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

    def everybody(self, size: int, dtype: str) -> list[Array]:
        return [data(r, size, dtype) for r in range(self.world)]

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
        same(self.arrays.read(array), wanted)

    def each_same(self, arrays: Sequence[Any], wanted: Sequence[Array]) -> None:
        for array, one in zip(arrays, wanted, strict=True):
            self.same(array, one)

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
        self.each_same(inputs, held[self.rank])

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
        self.each_same(outs, held)
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
                self.each_same(outs, held)

    def scatter(self, size: int, dtype: str) -> None:
        for root in range(self.world):
            parts = [data(root, size, dtype, part) for part in range(self.world)]
            inputs = [self.copy(part) for part in parts] if self.rank == root else None
            out = self.blank(size, dtype)
            self.done(dist.scatter(out, inputs, group_src=root, **self.how))
            self.same(out, parts[self.rank])
            if inputs is not None:
                self.each_same(inputs, parts)

    def all_to_all(self, size: int, dtype: str) -> None:
        # Rank r sends size + r + 2q elements to rank q.
        def between(r: int, q: int) -> Array:
            return data(r, size + r + 2 * q, dtype, q)

        inputs = [self.copy(between(self.rank, q)) for q in range(self.world)]
        wanted = [between(r, self.rank) for r in range(self.world)]
        outs = [self.blank(part.size, dtype) for part in wanted]
        self.done(dist.all_to_all(outs, inputs, **self.how))
        self.each_same(outs, wanted)
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
            assert work is not None
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
