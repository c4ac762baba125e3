"""monitored_barrier: a barrier through the store that says who is missing."""

from __future__ import annotations

import time
from datetime import timedelta

from .errors import DistBackendError, DistError, DistStoreTimeoutError
from .groups import Group, as_seconds, resolve_group
from .process_group import ProcessGroup
from .work import OpType, Work, WorkState

__all__ = ["monitored_barrier"]

# A wait on the store is cut in slices, so that an abort and Ctrl-C get through.
_SLICE = 0.25


def monitored_barrier(
    group: Group = None,
    timeout: float | timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Block until every rank has entered, or say which did not.

    When a rank has not come within `timeout` (seconds or `timedelta`; default
    the group's) all that did raise `DistBackendError` naming it: the first
    one missing, or with `wait_all_ranks` every one. The group stays usable.
    Rank 0 of the group collects, as in ``torch.distributed``.
    """
    pg = resolve_group(group, "monitored_barrier")
    seconds = (
        pg.timeout if timeout is None else as_seconds(timeout, "monitored_barrier")
    )
    work = pg.enter(OpType.MONITORED_BARRIER, seconds, 0)
    try:
        if pg.rank == 0:
            _collect(pg, work, seconds, wait_all_ranks)
        else:
            _report(pg, work, seconds)
    except DistError as error:
        work.mark_failed(error)
    except BaseException as error:
        work.mark_failed(error, WorkState.ABORTED)
        raise
    else:
        work.mark_completed()
    work.wait()


def _collect(pg: ProcessGroup, work: Work, timeout: float, every: bool) -> None:
    deadline = time.monotonic() + timeout
    missing = []
    for rank in range(1, pg.size()):
        if not _await(pg, work, _key(work, rank), deadline):
            missing.append(pg.ranks[rank])
            if not every:
                break
    if not missing:
        pg.store.set(_key(work, "verdict"), b"")
        return
    plural = "s" if len(missing) > 1 else ""
    verdict = (
        f"{work.describe()}: rank{plural} {', '.join(map(str, missing))} did not "
        f"reach it within {timeout:g} s"
    )
    pg.store.set(_key(work, "verdict"), verdict)
    raise DistBackendError(verdict)


def _report(pg: ProcessGroup, work: Work, timeout: float) -> None:
    pg.store.set(_key(work, pg.rank), b"1")
    # Rank 0 may have come last, and then needs its whole timeout.
    deadline = time.monotonic() + 2 * timeout
    if not _await(pg, work, _key(work, "verdict"), deadline):
        raise DistBackendError(
            f"{work.describe()}: rank {pg.ranks[0]} did not reach it within "
            f"{timeout:g} s"
        )
    verdict = pg.store.get(_key(work, "verdict")).decode()
    if verdict:
        raise DistBackendError(verdict)


def _key(work: Work, what: int | str) -> str:
    return f"monitored_barrier/{work.sequence_number}/{what}"


def _await(pg: ProcessGroup, work: Work, key: str, deadline: float) -> bool:
    while not work.is_completed():
        left = deadline - time.monotonic()
        try:
            pg.store.wait([key], timeout=max(0.0, min(_SLICE, left)))
            return True
        except DistStoreTimeoutError:
            if left <= 0:
                return False
    work.wait()  # raises why it was ended
    return False
