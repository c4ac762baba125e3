"""ReduceOp: how values of several ranks become one."""

from __future__ import annotations

import enum
import numbers
from dataclasses import dataclass
from typing import cast

from .enums import direct_members

__all__ = ["PremulSum", "ReduceOp", "make_nccl_premul_sum", "supports_complex"]


@direct_members
class ReduceOp(enum.Enum):
    """The reductions of ``torch.distributed.ReduceOp``.

    Which dtypes have a reduction depends on the backend: see the Notes of `all_reduce`,
    and ``docs/backends.md``.

    Attributes
    ----------
    SUM, PRODUCT, MIN, MAX
        The sum, the product, the smallest and the largest value.
    AVG
        The sum, divided by the number of ranks in the group; of integers, rounded
        towards zero. A backend without it makes it of SUM and a division.
    BAND, BOR, BXOR
        Bitwise "and", "or" and "exclusive or", of integers and bool.
    PREMUL_SUM
        The sum of values times a factor, which `make_nccl_premul_sum` takes: it returns
        what is given in the place of a member.

    Examples
    --------
    >>> x = np.array([1.0, 2.0])
    >>> dist.all_reduce(x, dist.ReduceOp.MAX)
    >>> [op.name for op in dist.ReduceOp][:5]
    ['SUM', 'AVG', 'PRODUCT', 'MIN', 'MAX']
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
    """Return a reduction that multiplies all values by `factor` and adds them up.

    It goes wherever a `ReduceOp` does, for floating-point dtypes, on every backend that
    has SUM. As ``torch.distributed._make_nccl_premul_sum``.

    Parameters
    ----------
    factor : float
        The factor, the same on all ranks.

    Raises
    ------
    TypeError
        `factor` is no number.

    Examples
    --------
    >>> x = np.array([1.0, 2.0])
    >>> dist.all_reduce(x, dist.make_nccl_premul_sum(0.5))
    >>> x
    array([0.5, 1. ])
    """
    # It goes wherever a ReduceOp does.
    return cast(ReduceOp, PremulSum(factor))


def supports_complex(reduceOp: ReduceOp) -> bool:
    """Return whether every backend has the reduction for complex numbers: SUM and AVG.

    As ``torch.distributed.distributed_c10d.supports_complex``, which names PREMUL_SUM,
    too.

    Parameters
    ----------
    reduceOp : ReduceOp
        The reduction.

    Returns
    -------
    bool
        Whether all backends have it. The tcp, mpi and ucx backends have PRODUCT, too,
        for which it is ``False``.

    Examples
    --------
    >>> [dist.supports_complex(op) for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX)]
    [True, False]
    """
    return reduceOp in (ReduceOp.SUM, ReduceOp.AVG)
