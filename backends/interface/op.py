"""Op: one validated call of an op, which is checked, recorded, captured and started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..work.composite import chain
from ..work.op_type import OpType
from ..work.record_fields import Splits
from ..work.reduce_op import PremulSum, ReduceOp
from ..work.work import Work
from .base import Array, Backend

__all__ = ["Op", "fuse"]


@dataclass(slots=True, eq=False)
class Op:
    """One call of an op on this rank; its `kind` names the arguments of the method.

    `arrays` are the validated inputs and then the outputs, as the recorder lists them,
    `args` the arguments of the backend's method but for the reduction, the last one.
    `result` is that of the Work, unless the backend says another one: the caller's own
    objects that this rank receives in. `peer` is a rank in the group: the root, or the
    other side of a message. `splits` are the rows from each rank and those to each.
    `check` ties the op to a backend, whose method `start` then calls.
    """

    kind: OpType
    device: str
    arrays: Sequence[Array]
    args: tuple[Any, ...]
    result: Any = None
    reduce_op: ReduceOp | None = None
    peer: int | None = None
    tag: int | None = None
    splits: Splits | None = None
    # Set by `check`: the backend, what its method gets as the reduction, and what makes
    # the result of a sum, if the backend has SUM in the place of the reduction.
    backend: Backend = field(init=False)
    reduction: Any = field(init=False)
    after: Callable[[], None] | None = field(init=False)
    # The name of the backend's method; empty: that of the op.
    method: str = field(init=False, default="")

    def check(self, backend: Backend) -> None:
        """Raise `TypeError` or `ValueError` where `backend` cannot do the op."""
        self.backend = backend
        reduce_op, arrays = self.reduce_op, self.arrays
        if not arrays:
            return
        dtype = arrays[0].dtype
        self.after = None
        if reduce_op is ReduceOp.AVG and ReduceOp.AVG not in backend.reduce_ops:
            if dtype.kind == "b":
                raise TypeError(
                    f"{self.kind.value} in {backend.place}: "
                    "ReduceOp.AVG is not defined for arrays of "
                    "bool; use MAX (or), MIN (and), or convert them: "
                    "x.astype(np.float32)"
                )
            reduce_op = ReduceOp.SUM
            self.after = self._divide
        elif isinstance(reduce_op, PremulSum) and not self.is_fusible:
            self.args, dtype, self.after = _multiplied(
                self.kind, self.args, dtype, reduce_op.factor, backend.place
            )
            reduce_op = ReduceOp.SUM
        if self.kind.is_p2p:
            backend.check_message(self.kind, *self.args[1:])
        self.reduction = reduction = backend.check(self.kind, dtype, reduce_op)
        if reduction is None and reduce_op is not None:
            raise TypeError(
                f"{self.kind.value} in {backend.place}: "
                f"check() of backend {backend.name!r} returned None "
                f"for ReduceOp.{reduce_op.name}; it has to return reduce_op, or what "
                f"the method {self.kind.value} is to get instead"
            )

    @property
    def is_empty(self) -> bool:
        """Whether the op has arrays, and none of them has an element."""
        arrays = self.arrays
        if not arrays or arrays[0].size:
            return False
        return not any(array.size for array in arrays)

    @property
    def is_fusible(self) -> bool:
        """Whether the backend does the reduction of the op itself, or averages."""
        had = self.backend.reduce_ops
        premul = isinstance(self.reduce_op, PremulSum)
        return not premul or ReduceOp.PREMUL_SUM in had or ReduceOp.SUM not in had

    def start(self) -> Work:
        """Call the method of the backend that `check` was given; return its Work."""
        method = getattr(self.backend, self.method or self.kind.method)
        if self.reduce_op is None:
            work: Work = method(*self.args)
            return work
        work = method(*self.args, self.reduction)
        if self.after is None or self.result is None:
            return work
        return chain(work, self.kind, self.after, self.result)

    def _divide(self) -> None:
        outputs = self.args[0]
        for output in outputs if isinstance(outputs, list) else [outputs]:
            _divide(output, self.backend.size)


def fuse(ops: Sequence[Op]) -> Op:
    """Return one op that does all of `ops`, which are checked, of one fused kind."""
    first = ops[0]
    full = [op for op in ops if not op.is_empty]
    fused = Op(
        first.kind,
        first.device,
        [array for op in ops for array in op.arrays],
        tuple(list(arrays) for arrays in zip(*(op.args for op in full), strict=True)),
        result=[op.result for op in full],
        reduce_op=first.reduce_op,
    )
    fused.backend = first.backend
    fused.method = f"{first.kind.method}_coalesced"
    fused.after = None if first.after is None else fused._divide
    # Of arrays that may differ in dtype: what the backend made of one is not for all.
    fused.reduction = ReduceOp.SUM if first.after is not None else first.reduce_op
    return fused


@np.errstate(all="ignore")
def _divide(output: Array, size: int) -> None:
    if output.dtype.kind in "iu":
        # Towards zero, as NCCL's average of integers; // alone would round down. The
        # least integer has no abs(), and a small dtype may not hold `size`.
        divisor = np.min_scalar_type(size).type(size)
        output[...] = (output + (output < 0) * (divisor - 1)) // divisor
    else:
        output /= size


def _multiplied(
    kind: OpType, args: tuple[Any, ...], dtype: Any, factor: float, place: str
) -> tuple[tuple[Any, ...], Any, Callable[[], None]]:
    """Return what is summed in the place of `args`, its dtype, and what stores the sum.

    Floats of 16 bits are multiplied and summed in float32 and rounded once.
    """
    # Kind "V" is that of bfloat16.
    if dtype.kind not in "fV":
        raise TypeError(
            f"{kind.value} in {place}: "
            f"PREMUL_SUM is not defined for arrays of {dtype.name}; it "
            "is for floating-point dtypes"
        )
    wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype

    @np.errstate(all="ignore")
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

    @np.errstate(all="ignore")
    def store() -> None:
        # A value beyond the dtype becomes infinite without a warning.
        output[...] = total

    return summed, wide, store
