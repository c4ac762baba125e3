"""ReduceOp: how values of several ranks become one."""

from __future__ import annotations

import enum
import numbers
from dataclasses import dataclass
from typing import cast

__all__ = ["PremulSum", "ReduceOp", "make_nccl_premul_sum", "supports_complex"]


class ReduceOp(enum.Enum):
    """The reductions of ``torch.distributed.ReduceOp``.

    AVG divides the sum by the world size and is offered on every backend (by
    SUM and a division where a backend has none). PREMUL_SUM needs a factor:
    `make_nccl_premul_sum` makes one.
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

    # Enum hashes the name, by a Python call, wherever a set of reductions is searched.
    __hash__ = object.__hash__


@dataclass(frozen=True)
class PremulSum:
    """The sum of what the ranks give, each times `factor`.

    It is given where a `ReduceOp` is, for floating-point dtypes. On NCCL it is
    ``ncclRedOpCreatePreMulSum``, elsewhere the SUM of copies that are multiplied.
    """

    factor: float

    #: As messages name it.
    name = ReduceOp.PREMUL_SUM.name

    def __post_init__(self) -> None:
        if isinstance(self.factor, bool) or not isinstance(self.factor, numbers.Real):
            raise TypeError(
                f"make_nccl_premul_sum: factor is a {type(self.factor).__name__}; "
                "expected a number"
            )
        # NCCL's bindings take Python's floats, and not every number of numpy's.
        object.__setattr__(self, "factor", float(self.factor))


def make_nccl_premul_sum(factor: float) -> ReduceOp:
    """A reduction that multiplies every rank's values by `factor` and adds them up.

    As ``torch.distributed._make_nccl_premul_sum``, on every backend that has SUM.
    """
    # It goes wherever a ReduceOp does.
    return cast(ReduceOp, PremulSum(factor))


def supports_complex(reduceOp: ReduceOp) -> bool:
    """Return whether complex numbers have the reduction: SUM and AVG alone.

    In ``torch.distributed`` they have PREMUL_SUM, too.
    """
    return reduceOp in (ReduceOp.SUM, ReduceOp.AVG)
