"""Coalesced collectives of host arrays: one op on a flat copy of many small ones.

The fallback for a run of captured ops on a backend without coalesced methods. The
copies are made in the memory of `Backend.scratch`. Arrays of `LARGE` bytes and more
are not copied, because the copy would cost more than it saves, and neither are arrays
of other libraries than numpy.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ..work.composite import chain, join
from ..work.op_type import OpType
from ..work.reduce_op import ReduceOp
from ..work.work import Work

__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "reduce_scatter_tensor",
]

Array = Any

#: Bytes from which an array is an op of its own, and of a flat copy at most.
LARGE = 1 << 20
FLAT = 8 << 20


class Fusible(Protocol):
    """What fusion needs of a backend."""

    size: int

    def scratch(self, size: int, dtype: Any) -> Array: ...

    def check(self, op: OpType, dtype: Any, reduce_op: ReduceOp | None) -> Any: ...

    def all_reduce(self, tensor: Array, op: Any) -> Work: ...

    def all_gather(self, tensor_list: Sequence[Array], tensor: Array) -> Work: ...

    def all_gather_into_tensor(self, output: Array, tensor: Array) -> Work: ...

    def reduce_scatter_tensor(self, output: Array, tensor: Array, op: Any) -> Work: ...


def all_reduce(backend: Fusible, tensors: Sequence[Array], op: ReduceOp) -> Work:
    """Reduce each of `tensors`, in place."""
    works = [
        _all_reduce(backend, [tensors[i] for i in members], op)
        for members in _fusion_groups(tensors)
    ]
    return _all(works, OpType.ALL_REDUCE)


def _all_reduce(backend: Fusible, arrays: Sequence[Array], op: ReduceOp) -> Work:
    made = backend.check(OpType.ALL_REDUCE, arrays[0].dtype, op)
    if len(arrays) == 1:
        return backend.all_reduce(arrays[0], made)
    places = _offsets(arrays)
    flat = backend.scratch(places[-1].stop, arrays[0].dtype)
    for array, place in zip(arrays, places, strict=True):
        flat[place] = array.reshape(-1)

    def unpack() -> None:
        for array, place in zip(arrays, places, strict=True):
            array.reshape(-1)[:] = flat[place]

    return chain(backend.all_reduce(flat, made), OpType.ALL_REDUCE, unpack)


def all_gather(
    backend: Fusible, lists: Sequence[Sequence[Array]], tensors: Sequence[Array]
) -> Work:
    """Gather each of `tensors` of all ranks into the list beside it."""
    # The tensors may differ in size from rank to rank; a list has one size of each.
    largest = [max(outputs, key=lambda output: output.nbytes) for outputs in lists]
    works = [
        _all_gather_lists(
            backend, [lists[i] for i in members], [tensors[i] for i in members]
        )
        for members in _fusion_groups(largest)
    ]
    return _all(works, OpType.ALL_GATHER)


def _all_gather_lists(
    backend: Fusible, lists: Sequence[Sequence[Array]], arrays: Sequence[Array]
) -> Work:
    if len(arrays) == 1:
        return backend.all_gather(lists[0], arrays[0])
    dtype = arrays[0].dtype
    places = _offsets(arrays)
    flat = backend.scratch(places[-1].stop, dtype)
    for array, place in zip(arrays, places, strict=True):
        flat[place] = array.reshape(-1)
    of_ranks = [[outputs[rank] for outputs in lists] for rank in range(backend.size)]
    gathered = [
        backend.scratch(sum(output.size for output in outputs), dtype)
        for outputs in of_ranks
    ]

    def unpack() -> None:
        for outputs, row in zip(of_ranks, gathered, strict=True):
            for output, place in zip(outputs, _offsets(outputs), strict=True):
                output.reshape(-1)[:] = row[place]

    return chain(backend.all_gather(gathered, flat), OpType.ALL_GATHER, unpack)


def all_gather_into_tensor(
    backend: Fusible, outputs: Sequence[Array], tensors: Sequence[Array]
) -> Work:
    """Gather each of `tensors` of all ranks into its output."""
    works = [
        _all_gather_whole(
            backend, [outputs[i] for i in members], [tensors[i] for i in members]
        )
        for members in _fusion_groups(tensors)
    ]
    return _all(works, OpType.ALL_GATHER_INTO_TENSOR)


def _all_gather_whole(
    backend: Fusible, outputs: Sequence[Array], arrays: Sequence[Array]
) -> Work:
    if len(arrays) == 1:
        return backend.all_gather_into_tensor(outputs[0], arrays[0])
    places = _offsets(arrays)
    total = places[-1].stop
    flat = backend.scratch(total, arrays[0].dtype)
    gathered = backend.scratch(total * backend.size, arrays[0].dtype)
    for array, place in zip(arrays, places, strict=True):
        flat[place] = array.reshape(-1)

    def unpack() -> None:
        rows = gathered.reshape(backend.size, total)
        for output, place in zip(outputs, places, strict=True):
            output.reshape(backend.size, -1)[:] = rows[:, place]

    work = backend.all_gather_into_tensor(gathered, flat)
    return chain(work, OpType.ALL_GATHER_INTO_TENSOR, unpack)


def reduce_scatter_tensor(
    backend: Fusible, outputs: Sequence[Array], tensors: Sequence[Array], op: ReduceOp
) -> Work:
    """Reduce each of `tensors`, and leave this rank's slice in its output."""
    works = [
        _reduce_scatter(
            backend, [outputs[i] for i in members], [tensors[i] for i in members], op
        )
        for members in _fusion_groups(tensors)
    ]
    return _all(works, OpType.REDUCE_SCATTER_TENSOR)


def _reduce_scatter(
    backend: Fusible, outputs: Sequence[Array], arrays: Sequence[Array], op: ReduceOp
) -> Work:
    made = backend.check(OpType.REDUCE_SCATTER_TENSOR, arrays[0].dtype, op)
    if len(arrays) == 1:
        return backend.reduce_scatter_tensor(outputs[0], arrays[0], made)
    places = _offsets(outputs)
    total = places[-1].stop
    flat = backend.scratch(total * backend.size, outputs[0].dtype)
    reduced = backend.scratch(total, outputs[0].dtype)
    rows = flat.reshape(backend.size, total)
    for array, place in zip(arrays, places, strict=True):
        rows[:, place] = array.reshape(backend.size, -1)

    def unpack() -> None:
        for output, place in zip(outputs, places, strict=True):
            output.reshape(-1)[:] = reduced[place]

    work = backend.reduce_scatter_tensor(reduced, flat, made)
    return chain(work, OpType.REDUCE_SCATTER_TENSOR, unpack)


def _all(works: Sequence[Work], kind: OpType) -> Work:
    return works[0] if len(works) == 1 else join(works, kind)


def _fusion_groups(arrays: Sequence[Array]) -> list[list[int]]:
    """Return lists of indices of `arrays`: each list is one flat copy.

    The lists depend on sizes and dtypes alone, which are the same on every rank.
    """
    found: list[list[int]] = []
    # dtype → the list that is being filled, and its bytes.
    open_lists: dict[Any, tuple[list[int], int]] = {}
    for place, array in enumerate(arrays):
        # A subclass may stand for memory elsewhere, and its type has to stay.
        if type(array) is not np.ndarray or array.nbytes >= LARGE:
            found.append([place])
            continue
        members, nbytes = open_lists.get(array.dtype, ([], FLAT))
        if nbytes + array.nbytes > FLAT:
            members, nbytes = [], 0
            found.append(members)
        members.append(place)
        open_lists[array.dtype] = members, nbytes + array.nbytes
    return found


def _offsets(arrays: Sequence[Array]) -> list[slice]:
    """Return the slice of each of `arrays` in their flat concatenation."""
    stops = list(itertools.accumulate(array.size for array in arrays))
    return [slice(a, b) for a, b in zip([0, *stops], stops, strict=False)]
