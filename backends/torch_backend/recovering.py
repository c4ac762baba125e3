"""Going on with the same groups after an abort, or a death."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from ..errors import DistBackendError
from ..groups.api import rebuild_process_group
from ..groups.job import leave_to_rebuild
from ..groups.launched import FRESH, REBUILD, LaunchedStore, await_round
from ..groups.subgroups import SHRINK_ABORT, shrink_group
from ..groups.world import world
from ..rank_sets import name_ranks
from ..work.async_errors import acknowledge
from . import meeting, private
from .joining import joining
from .private import Shell

__all__ = ["rebuild", "reconfigure", "shrink", "whole_groups"]


#: Seconds that a rebuild waits for a rank that is started again, by default.
REBUILD_TIMEOUT = 300.0


def _groups() -> list[Shell]:
    backends = map(private.cpu_backend, private.registered_groups())
    found = [one for one in backends if hasattr(one, "of_rankscope")]
    if not found:
        raise DistBackendError(
            "torch has no group of the backend rankscope here: "
            "init_process_group('rankscope') makes the default group"
        )
    return found


def whole_groups(call: str) -> list[Shell]:
    """Return the groups of this process, none of which has another backend."""
    groups = _groups()
    for group in groups:
        if isinstance(group, private.c10d.Backend):
            raise DistBackendError(
                f"{call}: {group.group.describe()} is a part of a group of torch with "
                "other backends, which stay with its ranks: only "
                "rankscope.torch.rebuild() goes on with it"
            )
    return groups


def rebuild(timeout: float = REBUILD_TIMEOUT) -> None:
    """Do `rankscope.torch.rebuild`."""
    groups = _groups()
    fresh = joining()
    if isinstance(world.store, LaunchedStore):
        if fresh is not None and groups[0].group.aborted is None:
            fresh.end()
        else:
            _go_on(groups, world.store, timeout)
        return
    _abort_others(groups)
    for group in groups:
        rebuild_process_group(group.group)
    if fresh is not None:
        fresh.end()


def _abort_others(groups: Sequence[Shell]) -> None:
    """Abort the groups that are not yet, for the same cause as the first that is.

    To ranks that wait in them the end of this one's connections would be the cause.
    """
    for reason in [one.group.aborted for one in groups if one.group.aborted][:1]:
        for one in groups:
            one.group.current.abort(
                reason.text,
                by=reason.by,
                culprits=reason.culprits,
                diagnosis=reason.diagnosis,
            )


def _go_on(
    groups: Sequence[Shell],
    store: LaunchedStore,
    timeout: float,
    *,
    without_lost: bool = False,
) -> list[int]:
    """Wait for the others in a later round; return the ranks that are lost."""
    assert world.rank is not None
    # Each rank comes to each round, and tries one again that did not begin.
    if store.complete:
        _abort_others(groups)
        for group in groups:
            acknowledge(group.group.status)
        call = "shrink" if without_lost else "rebuild"
        leave_to_rebuild([one.group for one in groups], f"rankscope.torch.{call}()")
        # One that has not rejoined yet comes as a fresh rank once more.
        store = store.next(REBUILD if joining() is None else FRESH)
        world.begin_round(store)
    members = groups[0].group.ranks
    has = world.export_groups()
    return await_round(store, world.rank, members, timeout, has, goes_on=without_lost)


def shrink(
    ranks: Sequence[int] | None = None, timeout: float = REBUILD_TIMEOUT
) -> list[int]:
    """Do `rankscope.torch.shrink`."""
    groups = whole_groups("shrink")
    default = groups[0]
    known = list(default.group.ranks)
    if isinstance(world.store, LaunchedStore):
        if ranks is not None:
            raise ValueError(
                f"shrink: ranks={list(ranks)}; in a job of rankscope.run the launcher "
                "says which ranks are lost: give none"
            )
        missing = _go_on(groups, world.store, timeout, without_lost=True)
        if not missing:
            return []
        ranks = [known.index(one) for one in missing]
    if ranks is None:
        reason = default.group.aborted
        culprits = () if reason is None else reason.culprits
        ranks = [known.index(one) for one in culprits if one in known]
        if not ranks:
            why = "it was not aborted" if reason is None else str(reason)
            raise ValueError(
                f"shrink: which ranks are lost? {default.group.describe()} names none "
                f"({why}); give ranks=[...], the same on every rank that stays"
            )
    lost = sorted(set(ranks))
    if not all(0 <= one < len(known) for one in lost) or len(lost) >= len(known):
        raise ValueError(
            f"shrink: ranks={list(ranks)}; expected ranks of the default group, from 0 "
            f"to {len(known) - 1}, and not all of them"
        )
    if default.rank() in lost:
        raise ValueError(
            f"shrink: {name_ranks(lost)} are to be left out, and this is one of them; "
            "only the ranks that stay call it"
        )
    gone = {known[one] for one in lost}
    staying = [one for one in known if one not in gone]
    for group in groups:
        before = group.group.ranks
        excluded = [place for place, one in enumerate(before) if one in gone]
        if excluded:
            group.replace(shrink_group(excluded, group.group, SHRINK_ABORT))
        elif group.group.aborted is not None:
            rebuild_process_group(group.group)
    # Up to torch 2.7 a mesh finds its groups by their ranks, and `replace` asks it.
    for group in groups:
        private.renumber(group, [staying.index(one) for one in group.group.ranks])
    for one in world.groups():
        if gone & set(one.ranks):
            one.abort(f"shrink: {name_ranks(sorted(gone))} are left out")
    meeting.note_default_ranks(staying)
    return lost


def reconfigure(
    group: Shell, handles: set[str] | list[str], timeout: timedelta | None
) -> None:
    """Go on with the ranks of `handles`: `rebuild` with all of them, or `shrink`."""
    if group is not _groups()[0]:
        raise ValueError(
            f"reconfigure: {group.group.describe()}; expected the default group, whose "
            "other groups go on with it"
        )
    known = [private.HANDLE.format(rank) for rank in group.group.ranks]
    staying = [one for one in known if one in handles]
    strange = sorted(set(handles) - set(known))
    given = handles if isinstance(handles, list) else staying + strange
    if given != staying or not staying:
        raise ValueError(
            f"reconfigure: handles={handles}; expected some of {known}, a list of them "
            "in this order"
        )
    seconds = REBUILD_TIMEOUT if timeout is None else timeout.total_seconds()
    lost = [place for place, one in enumerate(known) if one not in handles]
    if not lost:
        rebuild(seconds)
    else:
        shrink(None if isinstance(world.store, LaunchedStore) else lost, seconds)
