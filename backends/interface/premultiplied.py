"""PREMUL_SUM on a backend that has SUM alone: the sum of copies that are multiplied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..work.op_type import OpType

__all__ = ["multiplied"]

Array = Any


def multiplied(
    kind: OpType, args: tuple[Any, ...], dtype: Any, factor: float
) -> tuple[tuple[Any, ...], Any, Callable[[], None]]:
    """Return what is summed in the place of `args`, its dtype, and what follows.

    The first are the arguments of the method of `kind`, with copies that hold the
    inputs times `factor`; the last copies the sum to where the result belongs. Floats
    of 16 bits are multiplied and summed in float32 and rounded once. Raises `TypeError`
    for a dtype that is no float.
    """
    # Kind "V" is that of bfloat16.
    if dtype.kind not in "fV":
        raise TypeError(
            f"{kind.value}: PREMUL_SUM is not defined for arrays of {dtype.name}; it "
            "is for floating-point dtypes"
        )
    wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype

    def copy(array: Array) -> Array:
        made = array.astype(wide, order="C", copy=True)
        made *= factor
        return made

    output, *rest = args
    if kind is OpType.REDUCE_SCATTER:
        total = output.astype(wide)
        summed = (total, [copy(one) for one in rest[0]])
    elif kind is OpType.REDUCE_SCATTER_TENSOR:
        total = output.astype(wide)
        summed = (total, copy(rest[0]))
    else:  # in place; a reduce has its root, too
        total = copy(output)
        summed = (total, *rest)

    def store() -> None:
        # A value beyond the dtype becomes infinite without a warning.
        with np.errstate(over="ignore"):
            output[...] = total

    return summed, wide, store
