"""Which reductions gloo computes correctly, of which dtypes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..work.reduce_op import ReduceOp
from .side.wire import BITWISE, DTYPES, REDUCTIONS, WIDENED

__all__ = ["WIDE_DTYPES", "Reduction", "arithmetic"]

#: The dtypes that the numbers of some dtypes are reduced as.
WIDE_DTYPES = {DTYPES.index(name): np.dtype(wide) for name, wide in WIDENED.items()}


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
    # By name, as numpy knows the dtype only once ml_dtypes is imported.
    if dtype.name == "bfloat16" and op in _BFLOAT16:
        return _BFLOAT16[op]
    remedies = {
        "c": "SUM and AVG are possible; for others gather and reduce locally",
        "f": "convert it first, for instance x.astype(np.float64)",
    }
    if dtype.char == "G":  # clongdouble
        remedies["c"] = "convert it first, for instance x.astype(np.complex128)"
    if op.value in BITWISE:
        bitwise = "bitwise reductions are defined for integers and bool"
        remedies = dict.fromkeys("fcV", bitwise)
    name = ReduceOp.SUM.name if op is ReduceOp.AVG else op.name
    computed = [one.name for one, has in _REDUCTIONS.items() if op in has]
    if op in _BFLOAT16:
        computed.append("bfloat16")
    raise TypeError(
        f"gloo cannot compute {name} of {dtype} arrays (it computes that of "
        f"{', '.join(computed)}): {remedies.get(dtype.kind, 'convert it')}"
    )


def _all_of(number: int) -> dict[ReduceOp, Reduction]:
    """Return the reductions of the dtype `number`."""
    names: tuple[str, ...] = REDUCTIONS
    if not DTYPES[number].startswith(("float", "bfloat")):
        names = (*REDUCTIONS, *BITWISE)
    codes = {ReduceOp(name): code for code, name in enumerate(names)}
    codes[ReduceOp.AVG] = codes[ReduceOp.SUM]
    return {op: Reduction(number, code, 1) for op, code in codes.items()}


def _table() -> dict[np.dtype, dict[ReduceOp, Reduction]]:
    total = REDUCTIONS.index("sum")
    dtypes = {
        np.dtype(name): number
        for number, name in enumerate(DTYPES)
        if name != "bfloat16"
    }
    table = {dtype: _all_of(number) for dtype, number in dtypes.items()}
    # On 0 and 1, PRODUCT and MIN are "and", MAX is "or", and SUM is "or" as in numpy.
    table[np.dtype(np.bool_)] = bits = dict(table[np.dtype(np.uint8)])
    bits[ReduceOp.SUM] = bits[ReduceOp.MAX]
    del bits[ReduceOp.AVG]
    for name, part in (("complex64", "float32"), ("complex128", "float64")):
        number = dtypes[np.dtype(part)]
        table[np.dtype(name)] = {
            op: Reduction(number, total, 2) for op in (ReduceOp.SUM, ReduceOp.AVG)
        }
    return table


_REDUCTIONS = _table()
_BFLOAT16 = _all_of(DTYPES.index("bfloat16"))
_NONE: dict[ReduceOp, Reduction] = {}
