"""The arguments of UCC's collectives, made of flat arrays.

A list of arrays goes without a copy: the base of its parts is address 0, and their
displacements are their addresses. What is only moved is moved as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..messaging.algorithms import Flat
from ..work.reduce_op import ReduceOp
from . import ucc
from .transport import Collective

__all__ = [
    "REDUCE_OPS",
    "Reduction",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "find",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

_C = ucc.CONSTANTS
_BYTE = _C["UCC_DT_UINT8"]
_FLAGS = _C["UCC_COLL_ARGS_FIELD_FLAGS"]
_IN_PLACE = _C["UCC_COLL_ARGS_FLAG_IN_PLACE"]
_64_BIT = (
    _C["UCC_COLL_ARGS_FLAG_COUNT_64BIT"] | _C["UCC_COLL_ARGS_FLAG_DISPLACEMENTS_64BIT"]
)


class Reduction(NamedTuple):
    """A reduction of one dtype, as UCC has it; `name` is that of the `ReduceOp`."""

    name: str
    datatype: int
    op: int


_SUMS = {ReduceOp.SUM: _C["UCC_OP_SUM"], ReduceOp.PRODUCT: _C["UCC_OP_PROD"]}
_ORDERED = {
    **_SUMS,
    ReduceOp.MIN: _C["UCC_OP_MIN"],
    ReduceOp.MAX: _C["UCC_OP_MAX"],
}
_BITS = {
    ReduceOp.BAND: _C["UCC_OP_BAND"],
    ReduceOp.BOR: _C["UCC_OP_BOR"],
    ReduceOp.BXOR: _C["UCC_OP_BXOR"],
}
# A bool is a byte of 0 or 1, whose sum and maximum are "or".
_BOOL = {
    **_BITS,
    **dict.fromkeys((ReduceOp.SUM, ReduceOp.MAX), _C["UCC_OP_BOR"]),
    **dict.fromkeys((ReduceOp.PRODUCT, ReduceOp.MIN), _C["UCC_OP_BAND"]),
}

# By the dtype's kind and bytes. UCC 1.9 reports a reduction that it does not have as
# success: only those that the tests compare with numpy's are here.
_REDUCTIONS = {
    **{
        f"{kind}{size}": (_C[f"UCC_DT_{name}{8 * size}"], {**_ORDERED, **_BITS})
        for kind, name in (("i", "INT"), ("u", "UINT"))
        for size in (1, 2, 4, 8)
    },
    "b1": (_BYTE, _BOOL),
    "f4": (_C["UCC_DT_FLOAT32"], _ORDERED),
    "f8": (_C["UCC_DT_FLOAT64"], _ORDERED),
    "c8": (_C["UCC_DT_FLOAT32_COMPLEX"], _SUMS),
    "c16": (_C["UCC_DT_FLOAT64_COMPLEX"], _SUMS),
}

#: The reductions that some dtype has.
REDUCE_OPS = frozenset({**_ORDERED, **_BITS})


def find(dtype: Any, reduce_op: ReduceOp) -> Reduction | None:
    """Return the reduction of arrays of `dtype`; ``None`` where it is not used."""
    datatype, ops = _REDUCTIONS.get(f"{dtype.kind}{dtype.itemsize}", (0, {}))
    op = ops.get(reduce_op)
    return None if op is None else Reduction(reduce_op.name, datatype, op)


# -- the arguments -----------------------------------------------------------------


def _set(info: Any, array: Flat, datatype: int | None = None) -> None:
    """Fill in a ``ucc_coll_buffer_info_t``; of bytes, unless `datatype` is given."""
    info.buffer = array.ctypes.data
    info.count = array.nbytes if datatype is None else array.size
    info.datatype = _BYTE if datatype is None else datatype


def _set_parts(info: Any, parts: Sequence[Flat]) -> Flat:
    """Fill in a ``ucc_coll_buffer_info_v_t``; return what it points to."""
    places = np.array(
        [[part.nbytes for part in parts], [part.ctypes.data for part in parts]],
        np.uint64,
    )
    info.buffer, info.datatype = None, _BYTE
    info.counts, info.displacements = places[0].ctypes.data, places[1].ctypes.data
    return places


def barrier() -> Collective:
    """Return the collective that ends when every rank has entered."""
    return Collective(ucc.Arguments(coll_type=_C["UCC_COLL_TYPE_BARRIER"]), ())


def broadcast(data: Flat, root: int) -> Collective:
    """Return the copy of `data` of `root` into that of the others."""
    arguments = ucc.Arguments(coll_type=_C["UCC_COLL_TYPE_BCAST"], root=root)
    _set(arguments.src.info, data)
    return Collective(arguments, (data,))


def all_reduce(data: Flat, reduction: Reduction) -> Collective:
    """Return the reduction of `data`, in place."""
    arguments = ucc.Arguments(
        mask=_FLAGS,
        flags=_IN_PLACE,
        coll_type=_C["UCC_COLL_TYPE_ALLREDUCE"],
        op=reduction.op,
    )
    _set(arguments.dst.info, data, reduction.datatype)
    return Collective(arguments, (data,))


def reduce(data: Flat, root: int, is_root: bool, reduction: Reduction) -> Collective:
    """Return the reduction into `data` of `root`; elsewhere it is only read."""
    arguments = ucc.Arguments(
        coll_type=_C["UCC_COLL_TYPE_REDUCE"], root=root, op=reduction.op
    )
    if is_root:
        arguments.mask, arguments.flags = _FLAGS, _IN_PLACE
        _set(arguments.dst.info, data, reduction.datatype)
    else:
        _set(arguments.src.info, data, reduction.datatype)
    return Collective(arguments, (data,))


def all_gather_into_tensor(output: Flat, data: Flat) -> Collective:
    """Return the gathering of parts of one size into `output`, on every rank."""
    arguments = ucc.Arguments(coll_type=_C["UCC_COLL_TYPE_ALLGATHER"])
    _set(arguments.src.info, data)
    _set(arguments.dst.info, output)
    return Collective(arguments, (data, output))


def all_gather(outputs: Sequence[Flat], data: Flat) -> Collective:
    """Return the gathering into `outputs`, whose sizes may differ, on every rank."""
    arguments = _of_parts("UCC_COLL_TYPE_ALLGATHERV")
    _set(arguments.src.info, data)
    places = _set_parts(arguments.dst.info_v, outputs)
    return Collective(arguments, (data, outputs, places))


def gather(outputs: Sequence[Flat] | None, data: Flat, root: int) -> Collective:
    """Return the gathering into `outputs` of `root`."""
    arguments = _of_parts("UCC_COLL_TYPE_GATHERV", root)
    _set(arguments.src.info, data)
    places = None if outputs is None else _set_parts(arguments.dst.info_v, outputs)
    return Collective(arguments, (data, outputs, places))


def scatter(output: Flat, inputs: Sequence[Flat] | None, root: int) -> Collective:
    """Return the distribution of `inputs` of `root`."""
    arguments = _of_parts("UCC_COLL_TYPE_SCATTERV", root)
    _set(arguments.dst.info, output)
    places = None if inputs is None else _set_parts(arguments.src.info_v, inputs)
    return Collective(arguments, (output, inputs, places))


def all_to_all(outputs: Sequence[Flat], inputs: Sequence[Flat]) -> Collective:
    """Return the exchange of a part between any two ranks."""
    arguments = _of_parts("UCC_COLL_TYPE_ALLTOALLV")
    places = (
        _set_parts(arguments.src.info_v, inputs),
        _set_parts(arguments.dst.info_v, outputs),
    )
    return Collective(arguments, (outputs, inputs, places))


def reduce_scatter(
    output: Flat, data: Flat, counts: Sequence[int], reduction: Reduction
) -> Collective:
    """Return the reduction of the parts of `data`, one of `counts` to each rank."""
    arguments = _of_parts("UCC_COLL_TYPE_REDUCE_SCATTERV")
    arguments.op = reduction.op
    _set(arguments.src.info, data, reduction.datatype)
    lengths = np.array(counts, np.uint64)
    info = arguments.dst.info_v
    info.buffer, info.datatype = output.ctypes.data, reduction.datatype
    info.counts = lengths.ctypes.data
    return Collective(arguments, (output, data, lengths))


def _of_parts(kind: str, root: int = 0) -> ucc.Arguments:
    return ucc.Arguments(mask=_FLAGS, flags=_64_BIT, coll_type=_C[kind], root=root)
