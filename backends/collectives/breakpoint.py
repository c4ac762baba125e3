"""breakpoint: a debugger on one rank, while the others wait."""

from __future__ import annotations

import pdb
import sys
from collections import Counter
from datetime import timedelta

from ..errors import DistError
from ..groups.membership import get_rank, get_world_size
from ..quantities import as_int, as_positive_seconds
from ..work.flight_recorder import user_frame
from ..work.op_timeout import op_timeout
from ..work.record_fields import Frame
from .data_movement import barrier
from .objects import broadcast_object_list

__all__ = ["breakpoint"]

# How often each line of a program has called it.
_passed: Counter[Frame] = Counter()


def breakpoint(
    rank: int = 0, skip: int = 0, timeout_s: float | timedelta | None = 3600
) -> None:
    """Stop in a debugger on rank `rank`; the other ranks wait until it goes on.

    Every rank of the default group has to call it. The debugger is `pdb`, in the
    terminal of `rank`; type ``up`` to get to the frame that called. A cell of a
    notebook has no terminal: there the call raises on all ranks, and
    ``%dist_debug -r 0`` opens the frame in which it did.

    The semantics are those of ``torch.distributed.breakpoint``.

    Parameters
    ----------
    rank : int, default 0
        The rank that stops.
    skip : int, default 0
        How many calls from the same line to let pass.
    timeout_s : float or timedelta, optional
        How long the others wait, in the place of their group's timeout; ``None``: no
        longer than that.

    Raises
    ------
    ValueError
        There is no such rank.
    DistError
        The rank has no terminal. Raised on all ranks.

    Examples
    --------
    >>> for step in range(3):
    ...     dist.breakpoint(skip=100)  # stops at step 100
    """
    rank = as_int(rank, "breakpoint: rank")
    if not 0 <= rank < get_world_size():
        raise ValueError(
            f"breakpoint: rank={rank}; expected a rank of the default group, 0 to "
            f"{get_world_size() - 1}"
        )
    place = user_frame()
    _passed[place] += 1
    if _passed[place] <= as_int(skip, "breakpoint: skip"):
        return
    here = get_rank() == rank
    told: list[bool | None] = [here and sys.stdin is not None and sys.stdin.isatty()]
    broadcast_object_list(told, src=rank)
    if not told[0]:
        raise DistError(
            f"breakpoint: rank {rank} has no terminal for a debugger; in a notebook, "
            f"`%dist_debug -r {rank}` opens the frame of this error",
            rank=get_rank(),
        )
    if here:
        debugger = pdb.Pdb(nosigint=True)
        debugger.message(f"\nrank {rank}; type 'up' for the frame of dist.breakpoint()")
        debugger.set_trace()
    if timeout_s is None:
        barrier()
        return
    with op_timeout(as_positive_seconds(timeout_s, "breakpoint: timeout_s")):
        barrier()
