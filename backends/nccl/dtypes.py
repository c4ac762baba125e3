"""The mapping of numpy's dtypes to ncclDataType_t and of ReduceOps to ncclRedOp_t.

NCCL has no bool, complex or 16-bit integer dtypes. An op that only moves elements
sends such an element as bytes, or as a pair of floats (complex). A reduction of bool
or complex is mapped to another reduction of NCCL that has the same result, and is
refused if there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..interface.base import Backend
from ..work.op_type import OpType
from ..work.reduce_op import PremulSum, ReduceOp

__all__ = [
    "REDUCE_OPS",
    "Reduction",
    "is_float8",
    "ops_of",
    "reduce_dtype",
    "reduction",
    "transfer_dtype",
]

# ncclDataType_t of nccl.h, in its order. By name, because numpy has no bfloat16 or
# float8: bfloat16 is of the package ml_dtypes, and the float8 dtypes are `Float8`.
_NAMES = (
    *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
)
_DTYPES = {name: number for number, name in enumerate(_NAMES)}
_FLOAT8 = (_DTYPES["float8_e4m3fn"], _DTYPES["float8_e5m2"])

# ncclRedOp_t of nccl.h.
_SUM, _PROD, _MAX, _MIN, _AVG = range(5)

_OPS = {
    ReduceOp.SUM: _SUM,
    ReduceOp.PRODUCT: _PROD,
    ReduceOp.MAX: _MAX,
    ReduceOp.MIN: _MIN,
    ReduceOp.AVG: _AVG,
}
# For bool arrays, whose elements are bytes of 0 or 1: "or" is the maximum of the
# bytes, "and" is the minimum.
_BOOL_OPS = {
    ReduceOp.SUM: _MAX,
    ReduceOp.MAX: _MAX,
    ReduceOp.PRODUCT: _MIN,
    ReduceOp.MIN: _MIN,
}
# For complex arrays, whose elements are pairs of a real and an imaginary part: a sum
# treats the two parts alike; a product would mix the parts.
_COMPLEX_OPS = {ReduceOp.SUM: _SUM, ReduceOp.AVG: _AVG}

#: The reductions that NCCL has for at least one dtype.
REDUCE_OPS = frozenset({*_OPS, ReduceOp.PREMUL_SUM})


@dataclass(frozen=True)
class NcclDtype:
    """How NCCL sees one element: as `per_element` elements of `dtype`."""

    dtype: int
    per_element: int = 1


@dataclass(frozen=True)
class Reduction:
    """How NCCL reduces arrays of one dtype: the return value of `NCCLBackend.check`."""

    dtype: NcclDtype
    op: int
    #: The factor of a PREMUL_SUM, else ``None``. NCCL creates the ncclRedOp_t of a
    #: PREMUL_SUM for one communicator, when the op is issued; until then `op` is -1.
    factor: float | None = None


_dtypes: dict[Any, NcclDtype] = {}


def reduce_dtype(dtype: Any) -> NcclDtype:
    """Return NCCL's dtype for elements of `dtype` in a reduction."""
    found = _dtypes.get(dtype)
    if found is None:
        found = _dtypes[dtype] = _find_dtype(dtype)
    return found


def transfer_dtype(dtype: Any) -> NcclDtype:
    """Return NCCL's dtype for elements of `dtype` in an op that only moves them."""
    found = reduce_dtype(dtype)
    # Some NCCL versions and GPUs lack float8; every one can move bytes.
    return NcclDtype(_DTYPES["uint8"]) if found.dtype in _FLOAT8 else found


def is_float8(dtype: Any) -> bool:
    """Return whether `dtype` is a float8, which some NCCL versions and GPUs lack."""
    return reduce_dtype(dtype).dtype in _FLOAT8


def _find_dtype(dtype: Any) -> NcclDtype:
    if dtype.name in _DTYPES:
        return NcclDtype(_DTYPES[dtype.name])
    if dtype.kind == "c" and dtype.itemsize in (8, 16):
        return NcclDtype(_DTYPES["float32" if dtype.itemsize == 8 else "float64"], 2)
    return NcclDtype(_DTYPES["uint8"], dtype.itemsize)


def ops_of(dtype: Any) -> dict[ReduceOp, int]:
    """Return the ncclRedOp_t of each reduction that is defined for `dtype`."""
    if dtype.kind == "b":
        return _BOOL_OPS
    if dtype.kind == "c":
        return _COMPLEX_OPS
    return _OPS if dtype.name in _DTYPES else {}


_reductions: dict[tuple[Any, ReduceOp], Reduction] = {}


def reduction(
    backend: Backend, kind: OpType, dtype: Any, op: ReduceOp | PremulSum
) -> Reduction:
    """Return how NCCL applies `op` to `dtype`; the others are for messages."""
    if isinstance(op, PremulSum):
        return _premul_sum(backend, kind, dtype, op)
    found = _reductions.get((dtype, op))
    if found is None:
        number = _number(backend, kind, dtype, op)
        found = _reductions[dtype, op] = Reduction(reduce_dtype(dtype), number)
    return found


def _premul_sum(backend: Backend, kind: OpType, dtype: Any, op: PremulSum) -> Reduction:
    # Kind "V" is that of bfloat16 and the float8 dtypes.
    if dtype.kind in "fV" and dtype.name in _DTYPES:
        return Reduction(reduce_dtype(dtype), -1, op.factor)
    raise TypeError(
        f"{kind.value} in {backend.place}: "
        f"PREMUL_SUM is not defined for arrays of {dtype.name}; "
        "NCCL has it for floating-point dtypes"
    )


def _number(backend: Backend, kind: OpType, dtype: Any, op: ReduceOp) -> int:
    """Return the ncclRedOp_t of `op`; raise if NCCL lacks `op` for `dtype`."""
    if op is ReduceOp.PREMUL_SUM:
        raise ValueError(
            f"{kind.value} in {backend.place}: ReduceOp.PREMUL_SUM needs a factor: "
            "op=make_nccl_premul_sum(0.5)"
        )
    found = ops_of(dtype)
    if op in found:
        return found[op]
    if not found:
        raise TypeError(
            f"{kind.value} in {backend.place}: "
            f"NCCL cannot reduce arrays of {dtype.name}; convert them, "
            "for instance x.astype('int32'); moving them (broadcast, all_gather, "
            "send) works as they are"
        )
    names = ", ".join(sorted(one.name for one in found))
    raise TypeError(
        f"{kind.value} in {backend.place}: "
        f"NCCL has no ReduceOp.{op.name} for arrays of {dtype.name}; it "
        f"has {names}"
    )
