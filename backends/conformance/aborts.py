"""Level *contract*, continued: aborts, in each op and in each state of an op."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial
from typing import Any

import numpy as np

import rankscope.backends as dist

from ..errors import DistAbortedError, DistError
from ..work.state import WorkState
from ..work.work import Work
from .calls import claimed, claims, connect, first_claimed, start
from .expect import same
from .trial import Rules, Trial, Unclaimed
from .waiting import until

__all__ = ["RULES", "abort_hung_op"]

RULES = Rules()

# Seconds that a rule waits for a late write of the backend.
_TOO_LATE = 0.3


@RULES.contract(
    "abort while hung",
    "an abort ends every wait on an op that hangs, and the group is rebuilt",
)
def abort_in_each_op(trial: Trial) -> None:
    """Hang in each op, with another one queued behind it; abort; rebuild."""
    names = claimed(trial)
    connect(trial)
    longest, hung = 0.0, 0
    for name in names:
        took = abort_hung_op(trial, name, f"hang in {name}")
        if took is None:
            trial.skipped[name] = f"{name} ends on rank 0 without the last rank"
            continue
        hung += 1
        longest = max(longest, took)
        limit = trial.options.abort_seconds
        assert took < limit, (
            f"the waits of {name} ended {took:.2f} s after the abort; expected less "
            f"than {limit:g} s"
        )
        trial.held()
    trial.notes["abort_s"] = longest
    if not hung:
        raise Unclaimed("no op hangs while the last rank is absent")


def abort_hung_op(trial: Trial, name: str, where: str) -> float | None:
    """Abort one op that the last rank does not enter; rebuild, and check the group.

    Return the seconds from the abort to the end of every wait on rank 0 (0 on the
    other ranks); ``None`` if the op does not hang on rank 0.
    """
    group, last = trial.group, trial.size - 1
    x = trial.array(np.ones(trial.options.hung_count))
    works: list[Work] = []
    if trial.rank < last:
        works = start(trial, name, x)
        if first := [one for one in ("all_reduce", "barrier") if claims(trial, one)]:
            works += start(trial, first[0], trial.array(np.ones(3)))
    trial.meet(where)
    if trial.rank == 0:
        trial.store.set(f"hangs/{where}", b"" if works[0].is_completed() else b"hangs")
    hangs = trial.store.get(f"hangs/{where}") == b"hangs"
    took = 0.0
    if trial.rank == 0:
        took = _abort(trial, works, where)
    until(lambda: group.aborted is not None, trial.options.timeout, "the abort")
    if trial.rank < last and trial.rank:
        for work in works:
            # The part of this rank may have been about to end well.
            with contextlib.suppress(DistAbortedError):
                work.wait(trial.options.timeout)
            error = work.exception()
            assert error is None or f"test of {where}" in str(error), repr(error)
    # The aborted op may not write here any more.
    trial.arrays.write(x, float(trial.rank))
    trial.meet(f"aborted, {where}")
    dist.rebuild_process_group(group)
    check_group(trial)
    same(trial.arrays.read(x), trial.rank)
    return took if hangs else None


def _abort(trial: Trial, works: list[Work], where: str) -> float:
    """Abort from one thread while others wait; check the errors of the waits."""
    errors: list[BaseException | None] = [None] * len(works)
    pending = [not work.is_completed() for work in works]
    limit = trial.options.timeout

    def wait(place: int) -> None:
        try:
            works[place].wait(limit)
        except DistError as error:
            errors[place] = error

    waiters = [
        threading.Thread(target=wait, args=[place]) for place in range(len(works))
    ]
    for waiter in waiters:
        waiter.start()
    began = time.monotonic()
    dist.abort_process_group(trial.group, reason=f"test of {where}")
    for waiter in waiters:
        waiter.join(limit)
    took = time.monotonic() - began
    for work, error, was_pending in zip(works, errors, pending, strict=True):
        if was_pending:
            assert isinstance(error, DistAbortedError), f"{work!r} raised {error!r}"
            assert work.state is WorkState.ABORTED
            # Op, number, group, rank, reason.
            for part in (str(work.op_type.value), "#", "rank 0", where):
                assert part in str(error), f"{part!r} is missing in {error}"
    return took


def check_group(trial: Trial) -> None:
    """The group works, on small arrays and on larger ones."""
    if not claims(trial, "all_reduce"):
        connect(trial)
        return
    for count in (5, 50_000):
        y = trial.array(np.full(count, trial.rank + 1.0))
        dist.all_reduce(y, group=trial.group)
        same(trial.arrays.read(y), sum(range(trial.size + 1)))


@RULES.contract(
    "abort while running",
    "an abort ends an op that all ranks are in, and the group is rebuilt",
)
def abort_running(trial: Trial, late: bool = False) -> None:
    """Abort an op that every rank is in, at whatever point; rebuild."""
    first_claimed(trial, "all_reduce")
    options, group = trial.options, trial.group
    x = trial.array(np.ones(options.running_bytes // 8))
    reason = "aborted to see what is written" if late else "aborted while it ran"
    hit = 0
    for turn in range(options.running_times):
        trial.arrays.write(x, 1.0)
        trial.meet(f"run {turn}")
        # With `late` the last rank is absent in every second turn: the op hangs.
        absent = late and turn % 2 and trial.rank == trial.size - 1
        began = time.monotonic()
        try:
            if not absent:
                _run_and_abort(trial, x, turn % 3 == 0, reason)
        except DistAbortedError:
            hit += 1
        except DistError as error:
            raise AssertionError(
                f"all_reduce failed with {type(error).__name__}: {error}; expected "
                "DistAbortedError with the reason of the abort. Report a connection "
                "that a peer's abort closes as ConnectionLostError"
            ) from error
        until(lambda: group.aborted is not None, options.timeout, "the abort")
        trial.notes["abort_s"] = max(
            trial.notes.get("abort_s", 0.0), time.monotonic() - began
        )
        if late:
            trial.arrays.write(x, -1.0)
            time.sleep(_TOO_LATE)
            found = trial.arrays.read(x)
            assert np.all(found == -1.0), (
                "the backend wrote to an array after its Work had ended "
                f"({int(np.sum(found != -1.0))} of {found.size} elements)"
            )
        trial.meet(f"ran {turn}")
        dist.rebuild_process_group(group)
        check_group(trial)
        trial.held()
    trial.notes["aborted_while_running"] = hit


def _run_and_abort(trial: Trial, x: Any, at_once: bool, reason: str) -> None:
    work = dist.all_reduce(x, group=trial.group, async_op=True)
    assert work is not None
    if trial.rank == 0:
        deadline = time.monotonic() + (0 if at_once else 1)
        while work.state is WorkState.SCHEDULED and time.monotonic() < deadline:
            time.sleep(0.002)
        dist.abort_process_group(trial.group, reason=reason)
    work.wait(trial.options.timeout)


RULES.contract(
    "no write after the end",
    "a backend writes to no array whose Work is over, however it ended",
)(partial(abort_running, late=True))
