"""monitored_barrier: a barrier through the store that names missing ranks."""

from __future__ import annotations

import json
import time
from datetime import timedelta

from ..errors import DistBackendError, DistError, DistStoreTimeoutError
from ..groups.membership import Group, member_group
from ..groups.process_group import ProcessGroup
from ..quantities import as_timeout
from ..rank_sets import name_ranks
from ..work.op_type import OpType
from ..work.state import WorkState
from ..work.work import Work

__all__ = ["monitored_barrier"]

# Seconds of one wait on the store: between waits an abort or Ctrl-C takes effect.
_SLICE = 0.25


def monitored_barrier(
    group: Group = None,
    timeout: float | timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Block until every rank has entered, or raise an error that names the missing.

    Rank 0 of the group collects, as in ``torch.distributed``. The group stays usable.

    The semantics are those of ``torch.distributed.monitored_barrier``, on every
    backend: it goes through the store.

    Parameters
    ----------
    group : ProcessGroup, optional
        As for `all_reduce`.
    timeout : float or timedelta, optional
        How long to wait for the others, in seconds if it is a number; the default is
        the timeout of the group.
    wait_all_ranks : bool, default False
        Whether the error names all missing ranks, not the first one alone.

    Raises
    ------
    TypeError, ValueError
        There is no default group (`init_process_group` makes it), and `group` is
        ``None``; `group` is no group; `timeout` is no positive duration. This rank has
        not entered then.
    DistBackendError
        On every rank that has entered: ranks did not enter within `timeout`; `culprits`
        of the error are their global ranks.
    DistAbortedError
        The group was aborted.

    Examples
    --------
    >>> dist.monitored_barrier(timeout=5)
    """
    pg = member_group(group, "monitored_barrier")
    if pg is None:
        return
    seconds = as_timeout(timeout, pg.timeout, "monitored_barrier: timeout")
    work = pg.enter(OpType.MONITORED_BARRIER, seconds, 0)
    try:
        if pg.rank() == 0:
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
    verdict = (
        f"{work.describe()}: {name_ranks(missing)} did not reach it within "
        f"{timeout:g} s"
    )
    pg.store.set(_key(work, "verdict"), json.dumps([verdict, missing]))
    raise DistBackendError(verdict, culprits=missing)


def _report(pg: ProcessGroup, work: Work, timeout: float) -> None:
    pg.store.set(_key(work, pg.rank()), b"1")
    # Rank 0 may have entered last, and its own wait may last its whole timeout.
    deadline = time.monotonic() + 2 * timeout
    if not _await(pg, work, _key(work, "verdict"), deadline):
        raise DistBackendError(
            f"{work.describe()}: rank {pg.ranks[0]} did not reach it within "
            f"{timeout:g} s",
            culprits=[pg.ranks[0]],
        )
    told = pg.store.get(_key(work, "verdict"))
    if told:
        verdict, missing = json.loads(told)
        raise DistBackendError(verdict, culprits=missing)


def _key(work: Work, what: int | str) -> str:
    return f"monitored_barrier/{work.sequence_number}/{what}"


def _await(pg: ProcessGroup, work: Work, key: str, deadline: float) -> bool:
    while not work.state.is_terminal:
        left = deadline - time.monotonic()
        try:
            pg.store.wait([key], timeout=max(0.0, min(_SLICE, left)))
            return True
        except DistStoreTimeoutError:
            if left <= 0:
                return False
    work.wait()  # raises the reason of the end
    return False
