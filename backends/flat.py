"""Coalesced collectives of host arrays: one op on one flat copy per dtype.

This is what a backend that has nothing better does with a run of captured
ops; the copies are made in the memory of `Backend.scratch`. Arrays of another
kind than numpy's, which a backend of its own device type gets, are not
gathered: there it is one op each.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .composite import chain, join
from .reduce_op import ReduceOp
from .work import OpType, Work

if TYPE_CHECKING:
    from .backend import Backend

__all__ = ["all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"]

Array = Any


def all_reduce(backend: Backend, tensors: Sequence[Array], op: ReduceOp) -> Work:
    """Reduce each of `tensors`, in place."""
    if not _all_numpy(tensors):
        singles = [backend.all_reduce(tensor, op) for tensor in tensors]
        return _all(singles, OpType.ALL_REDUCE)
    works = [
        _all_reduce(backend, [tensors[i] for i in members], op)
        for members in _by_dtype(tensors)
    ]
    return _all(works, OpType.ALL_REDUCE)


def _all_reduce(backend: Backend, arrays: Sequence[Array], op: ReduceOp) -> Work:
    places = _places(arrays)
    flat = backend.scratch(places[-1].stop, arrays[0].dtype)
    for array, place in zip(arrays, places, strict=True):
        flat[place] = array.reshape(-1)

    def unpack() -> None:
        for array, place in zip(arrays, places, strict=True):
            array.reshape(-1)[:] = flat[place]

    return chain(backend.all_reduce(flat, op), OpType.ALL_REDUCE, unpack)


def all_gather_into_tensor(
    backend: Backend, outputs: Sequence[Array], tensors: Sequence[Array]
) -> Work:
    """Gather each of `tensors` of all ranks into its output."""
    kind = OpType.ALL_GATHER_INTO_TENSOR
    if not _all_numpy(tensors):
        pairs = zip(outputs, tensors, strict=True)
        return _all([backend.all_gather_into_tensor(*pair) for pair in pairs], kind)
    works = [
        _all_gather(
            backend, [outputs[i] for i in members], [tensors[i] for i in members]
        )
        for members in _by_dtype(tensors)
    ]
    return _all(works, kind)


def _all_gather(
    backend: Backend, outputs: Sequence[Array], arrays: Sequence[Array]
) -> Work:
    places = _places(arrays)
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
    backend: Backend, outputs: Sequence[Array], tensors: Sequence[Array], op: ReduceOp
) -> Work:
    """Reduce each of `tensors`, and leave this rank's slice in its output."""
    kind = OpType.REDUCE_SCATTER_TENSOR
    if not _all_numpy(tensors):
        pairs = zip(outputs, tensors, strict=True)
        return _all([backend.reduce_scatter_tensor(*pair, op) for pair in pairs], kind)
    works = [
        _reduce_scatter(
            backend, [outputs[i] for i in members], [tensors[i] for i in members], op
        )
        for members in _by_dtype(tensors)
    ]
    return _all(works, kind)


def _reduce_scatter(
    backend: Backend, outputs: Sequence[Array], arrays: Sequence[Array], op: ReduceOp
) -> Work:
    places = _places(outputs)
    total = places[-1].stop
    flat = backend.scratch(total * backend.size, outputs[0].dtype)
    reduced = backend.scratch(total, outputs[0].dtype)
    rows = flat.reshape(backend.size, total)
    for array, place in zip(arrays, places, strict=True):
        rows[:, place] = array.reshape(backend.size, -1)

    def unpack() -> None:
        for output, place in zip(outputs, places, strict=True):
            output.reshape(-1)[:] = reduced[place]

    work = backend.reduce_scatter_tensor(reduced, flat, op)
    return chain(work, OpType.REDUCE_SCATTER_TENSOR, unpack)


def _all(works: Sequence[Work], kind: OpType) -> Work:
    return works[0] if len(works) == 1 else join(works, kind)


def _all_numpy(arrays: Sequence[Array]) -> bool:
    # A subclass may stand for memory elsewhere, and its type has to stay.
    return all(type(array) is np.ndarray for array in arrays)


def _by_dtype(arrays: Sequence[Array]) -> list[list[int]]:
    """The places of `arrays`, one list for each dtype, in order."""
    places: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        places.setdefault(array.dtype, []).append(i)
    return list(places.values())


def _places(arrays: Sequence[Array]) -> list[slice]:
    """Where each of `arrays` lies in their flat concatenation."""
    stops = list(itertools.accumulate(array.size for array in arrays))
    return [slice(a, b) for a, b in zip([0, *stops], stops, strict=False)]
