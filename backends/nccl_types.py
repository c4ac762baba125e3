"""How numpy's dtypes and ReduceOps are told to NCCL.

NCCL has no bool, complex or 16-bit integers. What only moves goes as bytes or
as pairs; a reduction is mapped where another one means the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .reduce_op import PremulSum, ReduceOp
from .work import OpType

__all__ = [
    "REDUCE_OPS",
    "Reduction",
    "Wire",
    "check",
    "freight",
    "is_float8",
    "reduction",
    "wire",
]

# ncclDataType_t of nccl.h.
_INT8, _UINT8, _INT32, _UINT32, _INT64, _UINT64 = range(6)
_FLOAT16, _FLOAT32, _FLOAT64, _BFLOAT16, _E4M3, _E5M2 = range(6, 12)

# By name: bfloat16 is that of the package ml_dtypes, the float8s are `Float8`.
_DTYPES = {
    "int8": _INT8,
    "uint8": _UINT8,
    "int32": _INT32,
    "uint32": _UINT32,
    "int64": _INT64,
    "uint64": _UINT64,
    "float16": _FLOAT16,
    "float32": _FLOAT32,
    "float64": _FLOAT64,
    "bfloat16": _BFLOAT16,
    "float8_e4m3fn": _E4M3,
    "float8_e5m2": _E5M2,
}

# ncclRedOp_t of nccl.h.
_SUM, _PROD, _MAX, _MIN, _AVG = range(5)

_OPS = {
    ReduceOp.SUM: _SUM,
    ReduceOp.PRODUCT: _PROD,
    ReduceOp.MAX: _MAX,
    ReduceOp.MIN: _MIN,
    ReduceOp.AVG: _AVG,
}
# Of bytes that are 0 or 1.
_BOOL_OPS = {
    ReduceOp.SUM: _MAX,
    ReduceOp.MAX: _MAX,
    ReduceOp.PRODUCT: _MIN,
    ReduceOp.MIN: _MIN,
}
# Of pairs of real and imaginary part.
_COMPLEX_OPS = {ReduceOp.SUM: _SUM, ReduceOp.AVG: _AVG}

#: The reductions that some dtype has.
REDUCE_OPS = frozenset(_OPS)


@dataclass(frozen=True)
class Wire:
    """How a dtype travels: as `per_element` elements of NCCL's `dtype`."""

    dtype: int
    per_element: int = 1


@dataclass(frozen=True)
class Reduction:
    """A reduction of NCCL, or the factor of a PREMUL_SUM still to be made."""

    op: int
    factor: float | None = None


_wires: dict[Any, Wire] = {}


def wire(dtype: Any) -> Wire:
    """How elements of `dtype` travel where they are reduced."""
    found = _wires.get(dtype)
    if found is None:
        found = _wires[dtype] = _wire(dtype)
    return found


def freight(dtype: Any) -> Wire:
    """How elements of `dtype` travel where they are moved."""
    found = wire(dtype)
    # Any NCCL on any GPU has bytes.
    return Wire(_UINT8) if found.dtype in (_E4M3, _E5M2) else found


def is_float8(dtype: Any) -> bool:
    """Whether `dtype` is one that not every NCCL and GPU can reduce."""
    return wire(dtype).dtype in (_E4M3, _E5M2)


def _wire(dtype: Any) -> Wire:
    if dtype.name in _DTYPES:
        return Wire(_DTYPES[dtype.name])
    if dtype.kind == "c" and dtype.itemsize in (8, 16):
        return Wire(_FLOAT32 if dtype.itemsize == 8 else _FLOAT64, 2)
    return Wire(_UINT8, dtype.itemsize)


def reduction(op: ReduceOp | PremulSum, dtype: Any) -> Reduction:
    """The reduction of NCCL that `op` is for `dtype`; `check` has let it pass."""
    if isinstance(op, PremulSum):
        return Reduction(-1, op.factor)
    return Reduction(_ops_of(dtype)[op])


_reductions: dict[Any, dict[ReduceOp, int]] = {}


def _ops_of(dtype: Any) -> dict[ReduceOp, int]:
    found = _reductions.get(dtype)
    if found is None:
        found = _reductions[dtype] = _find_ops(dtype)
    return found


def _find_ops(dtype: Any) -> dict[ReduceOp, int]:
    if dtype.kind == "b":
        return _BOOL_OPS
    if dtype.kind == "c":
        return _COMPLEX_OPS
    return _OPS if dtype.name in _DTYPES else {}


def check(kind: OpType, dtype: Any, op: ReduceOp | PremulSum) -> None:
    """Raise `TypeError` or `ValueError` where NCCL cannot do `op` on `dtype`."""
    if op is ReduceOp.PREMUL_SUM:
        raise ValueError(
            f"{kind.value}: ReduceOp.PREMUL_SUM needs a factor: "
            "op=make_nccl_premul_sum(0.5)"
        )
    if isinstance(op, PremulSum):
        if dtype.kind in "fV" and dtype.name in _DTYPES:
            return
        raise TypeError(
            f"{kind.value}: PREMUL_SUM is not defined for arrays of {dtype.name}; "
            "NCCL has it for floating-point dtypes"
        )
    found = _ops_of(dtype)
    if op in found:
        return
    if not found:
        raise TypeError(
            f"{kind.value}: NCCL cannot reduce arrays of {dtype.name}; convert them, "
            "for instance x.astype('int32'); moving them (broadcast, all_gather, "
            "send) works as they are"
        )
    names = ", ".join(sorted(one.name for one in found))
    raise TypeError(
        f"{kind.value}: NCCL has no ReduceOp.{op.name} for arrays of {dtype.name}; it "
        f"has {names}"
    )
