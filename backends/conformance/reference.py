"""Inputs of the ops, and the results that numpy gives for them.

Inputs are drawn from a generator seeded by rank, so each rank knows the inputs of
all ranks and computes the expected result by itself. Values are small integers:
every sum and product is exact in every dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..work.reduce_op import ReduceOp

__all__ = ["LARGE", "MOVABLE", "NUMPY", "REDUCIBLE", "Array", "data", "reduced"]

Array = npt.NDArray[Any]

#: The dtypes that every op is tried with, and those of ops that only move data.
REDUCIBLE = (
    *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64"),
)
MOVABLE = (*REDUCIBLE, "int16", "uint16", "bool", "complex64", "complex128")

#: Elements; larger arrays are not cached, and are tried with few dtypes.
LARGE = 100_000

NUMPY: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


def data(rank: int, size: int, dtype: str, salt: int = 0) -> Array:
    """Return the input of `rank`: 0 … 2, for signed dtypes -2 … 2; read-only."""
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


def reduced(op: ReduceOp, arrays: Sequence[Array]) -> Array:
    """Return the reduction of `arrays` in their own dtype."""
    if op is ReduceOp.AVG:
        total = reduced(ReduceOp.SUM, arrays)
        if total.dtype.kind in "iu":
            # Python's integers: numpy has no abs() of the least one of a dtype.
            exact = total.astype(object)
            return (np.sign(exact) * (abs(exact) // len(arrays))).astype(total.dtype)
        return (total / len(arrays)).astype(total.dtype)
    result = arrays[0].copy()
    for array in arrays[1:]:
        result = NUMPY[op](result, array).astype(array.dtype, copy=False)
    return result
