"""Level *exact*: every op against numpy, for one number of ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import rankscope.backends as dist

from ..work.reduce_op import ReduceOp
from .checker import Checker
from .reference import LARGE, NUMPY
from .trial import Rule, Trial, Unclaimed
from .waiting import until

__all__ = ["OPS", "RULES", "WITHOUT_REDUCE_OP", "WITH_REDUCE_OP", "cases_of", "check"]

WITHOUT_REDUCE_OP = [
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "send_and_recv",
]
WITH_REDUCE_OP = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"]
#: The names of the rules that try one op.
OPS = (*WITH_REDUCE_OP, *WITHOUT_REDUCE_OP)


def cases_of(
    name: str, sizes: Sequence[int], dtypes: Sequence[str]
) -> Iterator[tuple[Any, ...]]:
    """(size, dtype[, reduction]) of the op `name`."""
    for size in sizes:
        # The largest size tests chunking, for which few dtypes suffice.
        large = size > LARGE
        if name in WITHOUT_REDUCE_OP:
            for dtype in ["uint8", "float32"] if large else dtypes:
                yield size, dtype
        else:
            for dtype in ["float16", "float64"] if large else dtypes:
                for op in [ReduceOp.SUM] if large else [*NUMPY, ReduceOp.AVG]:
                    yield size, dtype, op


def check(checker: Checker, name: str, arguments: tuple[Any, ...]) -> None:
    """Check one case; an `AssertionError` names the case that failed."""
    try:
        getattr(checker, name)(*arguments)
    except Exception as error:
        raise AssertionError(f"{_case(name, arguments)}: {error}") from error


def _case(name: str, arguments: tuple[Any, ...]) -> str:
    """``all_reduce(7, int8, SUM)``: a case, for messages."""
    words = [getattr(one, "name", str(one)) for one in arguments]
    return f"{name}({', '.join(words)})"


def _op_is_exact(name: str, trial: Trial) -> None:
    """Every case of one op that the backend claims."""
    options = trial.options
    checker = Checker(trial.arrays, async_op=options.async_op, group=trial.group)
    # An op on empty arrays does not reach the backend: the others come first.
    sizes = sorted(options.sizes, key=lambda size: size == 0)
    dtypes = options.movable if name in WITHOUT_REDUCE_OP else options.reducible
    for arguments in cases_of(name, sizes, dtypes):
        status = trial.group.status
        issued = status.collective_seq, status.p2p_seq
        try:
            check(checker, name, arguments)
        except AssertionError as failure:
            refusal = failure.__cause__
            if isinstance(refusal, NotImplementedError) and not trial.cases:
                # A rank that left now would be the error of the others.
                trial.meet("refused")
                raise Unclaimed(str(refusal)) from None
            # A refusal comes from `Backend.check`, before the op has a number.
            if not isinstance(refusal, NotImplementedError) and (
                not isinstance(refusal, TypeError | ValueError)
                or issued != (status.collective_seq, status.p2p_seq)
            ):
                raise
            trial.skipped[_case(name, arguments)] = str(refusal)
        else:
            trial.held()


def _barrier_holds(trial: Trial) -> None:
    """No rank leaves a barrier before the last one has entered."""
    for turn, async_op in enumerate((False, True)):
        key = f"entered/{turn}"
        if trial.rank == trial.size - 1:
            # Long enough for the others to leave a barrier that does not hold.
            time.sleep(0.2)
            trial.store.set(key, b"")
        try:
            work = dist.barrier(group=trial.group, async_op=async_op)
        except NotImplementedError as error:
            trial.meet("refused")
            raise Unclaimed(str(error)) from None
        if work is not None:
            work.wait()
            until(work.is_completed, what=f"the end of {work!r}")
        assert trial.store.check([key]), (
            f"rank {trial.rank} left barrier {turn + 1} before rank {trial.size - 1} "
            "entered"
        )
        trial.held()


_WHAT = {
    "send_and_recv": "send and recv move every dtype and size between neighbours",
    **{
        name: f"{name} is exact in every dtype, reduction and size"
        for name in WITH_REDUCE_OP
    },
}

RULES = [
    *(
        Rule(
            "exact",
            name,
            _WHAT.get(name, f"{name} moves every dtype and size as numpy would"),
            partial(_op_is_exact, name),
            ranks=2 if name == "send_and_recv" else 1,
            op=name.replace("send_and_recv", "recv"),
        )
        for name in OPS
    ),
    Rule(
        "exact",
        "barrier",
        "no rank leaves before the last enters",
        _barrier_holds,
        op="barrier",
    ),
]
