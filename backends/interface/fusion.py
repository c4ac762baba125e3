"""Coalesced collectives of host arrays: one op on a flat copy of many small ones.

The fallback for a run of captured ops on a backend without coalesced methods. Arrays of
`LARGE` bytes and more are not copied, because the copy would cost more than it saves,
and neither are arrays of other libraries than numpy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
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

    def check(self, op: OpType, dtype: Any, reduce_op: ReduceOp | None) -> Any: ...

    def all_reduce(self, tensor: Array, op: Any) -> Work: ...

    def all_gather(self, tensor_list: Sequence[Array], tensor: Array) -> Work: ...

    def all_gather_into_tensor(self, output: Array, tensor: Array) -> Work: ...

    def reduce_scatter_tensor(self, output: Array, tensor: Array, op: Any) -> Work: ...


def all_reduce(backend: Fusible, tensors: Sequence[Array], op: ReduceOp) -> Work:
    kind = OpType.ALL_REDUCE

    def fused(arrays: Sequence[Array]) -> Work:
        reduction = backend.check(kind, arrays[0].dtype, op)
        if len(arrays) == 1:
            return backend.all_reduce(arrays[0], reduction)
        flat = _packed(arrays)
        work = backend.all_reduce(flat, reduction)
        return chain(work, kind, lambda: _unpack(flat, arrays))

    return _run(kind, tensors, fused, tensors)


def all_gather(
    backend: Fusible, lists: Sequence[Sequence[Array]], tensors: Sequence[Array]
) -> Work:
    kind = OpType.ALL_GATHER

    def fused(lists: Sequence[Sequence[Array]], arrays: Sequence[Array]) -> Work:
        if len(arrays) == 1:
            return backend.all_gather(lists[0], arrays[0])
        by_rank = list(zip(*lists, strict=True))
        gathered = [
            np.empty(sum(output.size for output in outputs), arrays[0].dtype)
            for outputs in by_rank
        ]

        def unpack() -> None:
            for flat, outputs in zip(gathered, by_rank, strict=True):
                _unpack(flat, outputs)

        work = backend.all_gather(gathered, _packed(arrays))
        return chain(work, kind, unpack)

    # The tensors may differ in size from rank to rank; a list has one size of each.
    largest = [max(outputs, key=lambda output: output.nbytes) for outputs in lists]
    return _run(kind, largest, fused, lists, tensors)


def all_gather_into_tensor(
    backend: Fusible, outputs: Sequence[Array], tensors: Sequence[Array]
) -> Work:
    kind = OpType.ALL_GATHER_INTO_TENSOR

    def fused(outputs: Sequence[Array], arrays: Sequence[Array]) -> Work:
        if len(arrays) == 1:
            return backend.all_gather_into_tensor(outputs[0], arrays[0])
        flat = _packed(arrays)
        gathered = np.empty(flat.size * backend.size, flat.dtype)

        def unpack() -> None:
            rows = gathered.reshape(backend.size, flat.size)
            for output, place in zip(outputs, _offsets(arrays), strict=True):
                output.reshape(backend.size, -1)[:] = rows[:, place]

        work = backend.all_gather_into_tensor(gathered, flat)
        return chain(work, kind, unpack)

    return _run(kind, tensors, fused, outputs, tensors)


def reduce_scatter_tensor(
    backend: Fusible, outputs: Sequence[Array], tensors: Sequence[Array], op: ReduceOp
) -> Work:
    kind = OpType.REDUCE_SCATTER_TENSOR

    def fused(outputs: Sequence[Array], arrays: Sequence[Array]) -> Work:
        reduction = backend.check(kind, arrays[0].dtype, op)
        if len(arrays) == 1:
            return backend.reduce_scatter_tensor(outputs[0], arrays[0], reduction)
        places = _offsets(outputs)
        total, dtype = places[-1].stop, outputs[0].dtype
        flat = np.empty(total * backend.size, dtype)
        reduced = np.empty(total, dtype)
        rows = flat.reshape(backend.size, total)
        for array, place in zip(arrays, places, strict=True):
            rows[:, place] = array.reshape(backend.size, -1)
        work = backend.reduce_scatter_tensor(reduced, flat, reduction)
        return chain(work, kind, lambda: _unpack(reduced, outputs))

    return _run(kind, tensors, fused, outputs, tensors)


def _run(
    kind: OpType,
    sized: Sequence[Array],
    fused: Callable[..., Work],
    *arguments: Sequence[Any],
) -> Work:
    """Call `fused` on what one flat copy takes of each of `arguments`, by `sized`."""
    works = [
        fused(*([argument[i] for i in members] for argument in arguments))
        for members in _fusion_groups(sized)
    ]
    return works[0] if len(works) == 1 else join(works, kind)


def _fusion_groups(arrays: Sequence[Array]) -> list[list[int]]:
    """Return lists of indices of `arrays`: each list is one flat copy."""
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
    stops = list(itertools.accumulate(array.size for array in arrays))
    return [slice(a, b) for a, b in zip([0, *stops], stops, strict=False)]


def _packed(arrays: Sequence[Array]) -> Array:
    places = _offsets(arrays)
    flat = np.empty(places[-1].stop, arrays[0].dtype)
    for array, place in zip(arrays, places, strict=True):
        flat[place] = array.reshape(-1)
    return flat


def _unpack(flat: Array, arrays: Sequence[Array]) -> None:
    for array, place in zip(arrays, _offsets(arrays), strict=True):
        array.reshape(-1)[:] = flat[place]
