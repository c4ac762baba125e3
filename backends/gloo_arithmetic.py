"""What gloo can honestly compute, of which dtypes."""

from __future__ import annotations

import numpy as np

from .gloo_protocol import DTYPES, REDUCTIONS
from .reduce_op import ReduceOp

__all__ = ["REDUCTION_NUMBERS", "arithmetic"]

_DTYPES: dict[np.dtype, int] = {
    np.dtype(name): number for number, name in enumerate(DTYPES)
}
#: The protocol's numbers.
REDUCTION_NUMBERS = {ReduceOp(name): number for number, name in enumerate(REDUCTIONS)}

_COMPLEX_PARTS: dict[np.dtype, np.dtype] = {
    np.dtype(np.complex64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.float64),
}


def arithmetic(dtype: np.dtype, op: ReduceOp) -> tuple[int, int]:
    """gloo's dtype for a reduction, and how many of its elements make one of ours."""
    number = _DTYPES.get(dtype)
    if number is not None:
        return number, 1
    op = ReduceOp.SUM if op is ReduceOp.AVG else op
    # On 0 and 1, PRODUCT and MIN are "and", MAX is "or".
    if dtype == np.bool_ and op is not ReduceOp.SUM:
        return _DTYPES[np.dtype(np.uint8)], 1
    part = _COMPLEX_PARTS.get(dtype)
    if part is not None and op is ReduceOp.SUM:
        return _DTYPES[part], 2
    remedies = {
        "i": "convert it first, for instance x.astype(np.int32)",
        "u": "convert it first, for instance x.astype(np.uint32)",
        "b": "use MAX (or), MIN (and), or convert it: x.astype(np.int32)",
        "c": "SUM and AVG are possible; for others gather and reduce locally",
        "f": "convert it first, for instance x.astype(np.float64)",
    }
    raise TypeError(
        f"gloo cannot compute {op.name} of {dtype} arrays "
        f"(it computes {', '.join(DTYPES)}): {remedies.get(dtype.kind, 'convert it')}"
    )
