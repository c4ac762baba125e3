"""Functions that make groups of some of the ranks there are, as in c10d."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ..devices.cuda_device import bound_device
from ..quantities import as_int, as_timeout
from ..work.async_errors import acknowledge
from .config import BackendConfig, bound_index
from .membership import Group, resolve_group
from .non_member import NonGroupMember
from .origin import Origin
from .process_group import ProcessGroup
from .world import DEFAULT, world

__all__ = [
    "SHRINK_ABORT",
    "SHRINK_DEFAULT",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "shrink_group",
    "split_group",
]

#: Flags of `shrink_group`: leave the group as it is, or abort it.
SHRINK_DEFAULT, SHRINK_ABORT = 0, 1


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: float | timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
) -> ProcessGroup | NonGroupMember:
    """Make a group of some of the world's ranks; return it.

    A rank that is not in it gets ``GroupMember.NON_GROUP_MEMBER``.

    `ranks` are global ranks (default: all); they are sorted, as in c10d, unless
    `sort_ranks` is false: ``ranks[i]`` then has rank i in the group. The backend
    string and timeout default to the default group's. `group_desc` is the group's name
    for display and look-up. No rank waits for another: all ranks may call this
    function, or only the members (`use_local_synchronization` is accepted and has no
    effect). Members make their common groups in the same order. `device_id`: as in
    `init_process_group`. If that function was given one, the communicators of NCCL are
    begun there at once, in the background, as in c10d: an error of theirs aborts the
    new group, and its first op raises it.

    Raises `ValueError` for ranks that are not in the world or given twice, and for
    a bad device.
    """
    default = world.get_group(DEFAULT)
    size = default.size()
    where = f"new_group on rank {default.global_rank}"
    chosen = [
        as_int(rank, f"{where}: ranks[{place}]")
        for place, rank in enumerate(range(size) if ranks is None else ranks)
    ]
    if sort_ranks:
        chosen.sort()
    bad = [rank for rank in chosen if not 0 <= rank < size]
    if bad or not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(
            f"{where}: ranks={list(ranks if ranks is not None else [])}; "
            f"expected distinct global ranks, at least one, each from 0 to {size - 1}"
        )
    if group_desc == DEFAULT:
        raise ValueError(
            f"{where}: group_desc={DEFAULT!r} is the name of the default group; "
            "expected another"
        )
    config = default.config if backend is None else BackendConfig(backend)
    index = bound_index(device_id, config, "new_group")
    seconds = as_timeout(timeout, default.timeout, "new_group: timeout")
    # With NCCL the communicators can then be split off those of the default group.
    origin = Origin(default) if chosen == default.ranks else None
    made = world.new_group(chosen, group_desc, config, seconds, origin)
    if index is None:
        index = _early_device(default, config)
    if index is not None and isinstance(made, ProcessGroup):
        made.connect(index)
    return made


def _early_device(parent: ProcessGroup, config: BackendConfig) -> int | None:
    """Return the device on which a new group with `config` is connected at once.

    It is the ``device_id`` of `init_process_group`, which all ranks give: a connection
    that some ranks begin and others never use would time out.
    """
    built = parent.built_backend("cuda")
    name = parent.config.device_backend_map.get("cuda")
    if built is None or not built.supports_split:
        # Other backends are built as they are needed.
        return None
    return bound_device() if config.device_backend_map.get("cuda") == name else None


def new_subgroups(
    group_size: int | None = None,
    group: Group = None,
    timeout: float | timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup, list[ProcessGroup | NonGroupMember]]:
    """Divide `group` into groups of `group_size` ranks; every rank of it calls this.

    Returns the new group that this rank is in, and all of them, in order, with
    ``GroupMember.NON_GROUP_MEMBER`` in the place of those it is not in. Without
    `group_size` it is the number of ranks of this host (``LOCAL_WORLD_SIZE``). Backend
    string and timeout default to the default group's. `pg_options` is accepted for
    c10d's signature.

    Raises `ValueError` unless `group_size` divides the size of `group`.
    """
    pg = resolve_group(group, "new_subgroups")
    where = f"new_subgroups on {pg.describe()}"
    if group_size is None:
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        if not local.isdigit():
            raise ValueError(
                f"{where}: group_size is missing, and the launcher did not set "
                "LOCAL_WORLD_SIZE; expected the number of ranks in each new group"
            )
        group_size = int(local)
    size = as_int(group_size, f"{where}: group_size")
    if size < 1 or pg.size() % size:
        raise ValueError(
            f"{where}: group_size={size}; expected a divisor of {pg.size()}, the "
            "number of ranks in the group"
        )
    lists = [pg.ranks[start : start + size] for start in range(0, pg.size(), size)]
    mine, all_of_them = new_subgroups_by_enumeration(
        lists, timeout, backend, pg_options, group_desc
    )
    assert mine is not None
    return mine, all_of_them


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: float | timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | None, list[ProcessGroup | NonGroupMember]]:
    """Make disjoint groups of the global ranks in each list; every rank calls this.

    Returns the new group that this rank is in, ``None`` where it is in none, and all
    of them, in order, with ``GroupMember.NON_GROUP_MEMBER`` in the place of those it
    is not in. The other parameters are those of `new_group`.

    Raises `ValueError` before any group is made for lists that are empty, overlap, or
    name a rank that is not in the world.
    """
    default = world.get_group(DEFAULT)
    where = f"new_subgroups_by_enumeration on rank {default.global_rank}"
    lists = [
        [as_int(rank, f"{where}: a rank of list {place}") for rank in ranks]
        for place, ranks in enumerate(ranks_per_subgroup_list)
    ]
    if not _are_disjoint(lists, default.size()):
        raise ValueError(
            f"{where}: ranks_per_subgroup_list={lists}; expected lists of distinct "
            "global ranks, none of them empty and no rank in two, each from 0 to "
            f"{default.size() - 1}"
        )
    made = [
        new_group(ranks, timeout, backend, pg_options, group_desc=group_desc)
        for ranks in lists
    ]
    mine = next((one for one in made if isinstance(one, ProcessGroup)), None)
    return mine, made


def _are_disjoint(lists: Sequence[Sequence[int]], size: int) -> bool:
    """Return whether there are lists, none empty, of distinct ranks below `size`."""
    named = [rank for ranks in lists for rank in ranks]
    return (
        all(lists)
        and 0 < len(named) == len(set(named))
        and set(named) <= set(range(size))
    )


def shrink_group(
    ranks_to_exclude: Sequence[int],
    group: Group = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: Any = None,
) -> ProcessGroup:
    """Make a group without some ranks of `group`; only the other ranks call it.

    `ranks_to_exclude` are ranks in `group`, which may be dead or hung. Backend
    string and timeout are those of `group`. NCCL's communicators are derived from
    those of `group` (``ncclCommShrink``, NCCL 2.27) if they are intact on every
    remaining rank; otherwise, and with other backends, they are new.

    With ``SHRINK_DEFAULT`` `group` stays as it is. With ``SHRINK_ABORT`` `group` is
    aborted on every rank: its ops in flight raise `DistAbortedError`, and
    :func:`rebuild_process_group` makes `group` usable once all its ranks are back.
    Returns at once. Unlike in ``torch.distributed``, global ranks and the default
    group do not change: pass the new group as `group`, or to
    ``%%distributed --group``. `pg_options` is accepted for c10d's signature.

    Raises `ValueError` for ranks that are not in `group` or given twice, if
    none or all are excluded, if this rank is, and for unknown flags.
    """
    pg = resolve_group(group, "shrink_group")
    excluded = sorted(
        as_int(rank, f"shrink_group on {pg.describe()}: ranks_to_exclude[{place}]")
        for place, rank in enumerate(ranks_to_exclude)
    )
    bad = [rank for rank in excluded if not 0 <= rank < pg.size()]
    if bad or len(set(excluded)) != len(excluded) or not 0 < len(excluded) < pg.size():
        raise ValueError(
            f"shrink_group on {pg.describe()}: ranks_to_exclude="
            f"{list(ranks_to_exclude)}; expected distinct ranks of the group, at "
            f"least one and not all, each from 0 to {pg.size() - 1}"
        )
    if pg.rank() in excluded:
        raise ValueError(
            f"shrink_group on {pg.describe()}: ranks_to_exclude={excluded} names "
            "this rank; only the ranks that stay call it"
        )
    if shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise ValueError(
            f"shrink_group on {pg.describe()}: shrink_flags={shrink_flags!r}; expected "
            "SHRINK_DEFAULT or SHRINK_ABORT"
        )
    if shrink_flags == SHRINK_ABORT:
        acknowledge(pg.status)
    return world.shrink(pg, excluded, abort=shrink_flags == SHRINK_ABORT)


def split_group(
    parent_pg: Group = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: float | timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Make disjoint groups of ranks of `parent_pg`; return this rank's one.

    `split_ranks` has the ranks of each new group, as ranks in `parent_pg`, the same
    lists on every rank of it; each is sorted, as in c10d. A rank in none of the lists
    gets ``None`` (``NCCL_SPLIT_NOCOLOR``) and need not call this function. Backend
    string and timeout default to those of `parent_pg`. Returns at once, and works with
    every backend: communicators of the new groups are made when `new_group` would make
    them, from a unique id of their own. `pg_options` is accepted for c10d's signature.

    Raises `ValueError` for lists that are empty, overlap, or name a rank that is not in
    the group.
    """
    pg = resolve_group(parent_pg, "split_group")
    what = f"split_group on {pg.describe()}: a rank of split_ranks"
    lists = [
        sorted(as_int(rank, what) for rank in ranks)
        for ranks in (() if split_ranks is None else split_ranks)
    ]
    if not _are_disjoint(lists, pg.size()):
        raise ValueError(
            f"split_group on {pg.describe()}: split_ranks={split_ranks}; expected "
            "lists of distinct ranks of the group, none of them empty and no rank in "
            f"two, each from 0 to {pg.size() - 1}"
        )
    mine = next((ranks for ranks in lists if pg.rank() in ranks), None)
    if mine is None:
        return None
    config = pg.config if backend is None else BackendConfig(backend)
    seconds = as_timeout(timeout, pg.timeout, "split_group: timeout")
    chosen = [pg.ranks[rank] for rank in mine]
    made = world.new_group(chosen, group_desc, config, seconds)
    assert isinstance(made, ProcessGroup)
    index = _early_device(pg, config)
    if index is not None:
        made.connect(index)
    return made
