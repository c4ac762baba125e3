"""The reductions of numpy, by dtype.

They are numpy's and not the library's: they are as fast, exist for every dtype of
numpy (float16, bool, complex), and treat NaN alike on every rank.

numpy adds float16 and bfloat16 in float32 and rounds: of two ranks the sum is rounded
once, of 2**k ranks k times in a small array. To keep float32 from step to step would
send twice the bytes, and convert each array there and back: 512 Ki elements of float16
take 1.2 ms and 2.9 ms (numpy 2.5, one core), where adding them takes 4.8 ms and two
ranks add half of them each, four ranks three quarters.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..work.op_type import OpType
from ..work.reduce_op import ReduceOp
from .algorithms import Ufunc

__all__ = ["REDUCE_OPS", "find", "refusal"]

_SUMS: dict[ReduceOp, Ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
}
_ORDERED: dict[ReduceOp, Ufunc] = {
    **_SUMS,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}
_ALL: dict[ReduceOp, Ufunc] = {
    **_ORDERED,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
# By the dtype's kind: signed and unsigned integers, bool, float, bfloat16 (V), complex.
_UFUNCS = {
    **dict.fromkeys("iub", _ALL),
    **dict.fromkeys("fV", _ORDERED),
    "c": _SUMS,
}
_NONE: dict[ReduceOp, Ufunc] = {}

#: The reductions that some dtype has.
REDUCE_OPS = frozenset(_ALL)


def find(dtype: Any, reduce_op: ReduceOp) -> Ufunc | None:
    """Return the ufunc of `reduce_op`; ``None`` if `dtype` does not have it."""
    return _UFUNCS.get(dtype.kind, _NONE).get(reduce_op)


def refusal(op: OpType, dtype: Any, reduce_op: ReduceOp) -> TypeError:
    """Return the error of a reduction that `dtype` does not have."""
    return TypeError(
        f"{op.value}: ReduceOp.{reduce_op.name} is not defined for arrays of "
        f"{dtype.name}; convert them (astype) or choose another reduction"
    )
