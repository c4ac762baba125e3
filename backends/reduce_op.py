"""ReduceOp: how values of several ranks become one."""

from __future__ import annotations

import enum

__all__ = ["ReduceOp"]


class ReduceOp(enum.Enum):
    """The reductions of ``torch.distributed.ReduceOp``.

    AVG divides the sum by the world size and is offered on every backend (by
    SUM and a division where a backend has none). PREMUL_SUM is NCCL's alone.
    """

    SUM = "sum"
    AVG = "avg"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    PREMUL_SUM = "premul_sum"
