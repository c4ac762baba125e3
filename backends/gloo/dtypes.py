"""Which reductions gloo computes correctly, of which dtypes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..work.reduce_op import ReduceOp
from .side.wire import DTYPES, REDUCTIONS

__all__ = ["Reduction", "arithmetic"]


class Reduction(NamedTuple):
    """A reduction in the numbers of the side process.

    `factor` elements of its `dtype` make one element of the array.
    """

    dtype: int
    op: int
    factor: int


def arithmetic(dtype: np.dtype, op: ReduceOp) -> Reduction:
    """Return how gloo computes `op` of arrays of `dtype`, where its result is right.

    AVG is computed as SUM, which the dispatcher divides. Raises `TypeError`, with
    a remedy, where gloo has no arithmetic for `dtype`.
    """
    found = _REDUCTIONS.get(dtype, _NONE).get(op)
    if found is not None:
        return found
    remedies = {
        "i": "convert it first, for instance x.astype(np.int32)",
        "u": "convert it first, for instance x.astype(np.uint32)",
        "b": "use MAX (or), MIN (and), or convert it: x.astype(np.int32)",
        "c": "SUM and AVG are possible; for others gather and reduce locally",
        "f": "convert it first, for instance x.astype(np.float64)",
    }
    name = ReduceOp.SUM.name if op is ReduceOp.AVG else op.name
    raise TypeError(
        f"gloo cannot compute {name} of {dtype} arrays "
        f"(it computes {', '.join(DTYPES)}): {remedies.get(dtype.kind, 'convert it')}"
    )


def _table() -> dict[np.dtype, dict[ReduceOp, Reduction]]:
    numbers = {ReduceOp(name): number for number, name in enumerate(REDUCTIONS)}
    numbers[ReduceOp.AVG] = total = numbers[ReduceOp.SUM]
    dtypes = {np.dtype(name): number for number, name in enumerate(DTYPES)}
    table = {
        dtype: {op: Reduction(number, code, 1) for op, code in numbers.items()}
        for dtype, number in dtypes.items()
    }
    # On 0 and 1, PRODUCT and MIN are "and", MAX is "or".
    table[np.dtype(np.bool_)] = {
        op: reduction
        for op, reduction in table[np.dtype(np.uint8)].items()
        if reduction.op != total
    }
    for name, part in (("complex64", "float32"), ("complex128", "float64")):
        number = dtypes[np.dtype(part)]
        table[np.dtype(name)] = {
            op: Reduction(number, total, 2) for op in (ReduceOp.SUM, ReduceOp.AVG)
        }
    return table


_REDUCTIONS = _table()
_NONE: dict[ReduceOp, Reduction] = {}
