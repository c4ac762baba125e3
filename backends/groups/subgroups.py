"""Functions that make groups of some of the ranks there are, as in c10d."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ..devices.cuda_device import bound_device
from ..quantities import as_int, as_ints, as_list, as_timeout
from ..work.async_errors import acknowledge
from .config import BackendConfig, bound_index
from .membership import Group, resolve_group
from .process_group import ProcessGroup
from .spec import NonGroupMember, Origin
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
    """Return a group of some of the world's ranks, made here and now.

    No rank waits for another: all ranks may call this function, or only the members,
    which make their common groups in the same order.

    Parameters
    ----------
    ranks : sequence of int, optional
        The global ranks of the members; ``None``: all.
    timeout : float or timedelta, optional
        Bounds every op of the group, from its start; in seconds if it is a number. The
        default is that of the group that this one is made from.
    backend : str, optional
        The backends of the group: one name, or one per device type (see
        `BackendConfig`). The default is that of the group that this one is made from.
    pg_options : object, optional
        Not used: accepted for c10d's signature.
    use_local_synchronization : bool, default False
        Not used, as no rank waits: accepted for c10d's signature.
    group_desc : str, optional
        The name that messages and the board show; the default is made of the ranks.
    device_id : int, cupy.cuda.Device or torch.device, optional
        The CUDA device of this process. The backend of ``cuda`` is then built, and
        connected, at once.
    sort_ranks : bool, default True
        Whether `ranks` are sorted, as in c10d; else ``ranks[i]`` has rank i in the
        group.

    Returns
    -------
    ProcessGroup or NonGroupMember
        The group; ``GroupMember.NON_GROUP_MEMBER`` on a rank that is not in it.

    Raises
    ------
    ValueError
        Ranks that are not in the world or given twice, or none; a bad backend string,
        timeout or device; ``"default"`` as `group_desc`; or there is no default group.
    TypeError
        An argument is of another type.
    DistBackendError
        With `device_id`: the backend of ``cuda`` cannot be made.

    Notes
    -----
    The semantics are those of ``torch.distributed.new_group``. If `init_process_group`
    got a `device_id`, the communicators of NCCL are begun there at once, in the
    background, as in c10d: an error of theirs aborts the new group, and its first op
    raises it.

    Examples
    --------
    >>> half = dist.new_group([0], group_desc="half")
    >>> x = np.ones(2)
    >>> dist.all_reduce(x, group=half)
    >>> half.group_desc, half.ranks
    ('half', [0])
    """
    default = world.get_group(DEFAULT)
    size = default.size()
    where = f"new_group on rank {default.global_rank}"
    chosen = as_ints(range(size) if ranks is None else ranks, f"{where}: ranks")
    if sort_ranks:
        chosen.sort()
    bad = [rank for rank in chosen if not 0 <= rank < size]
    if bad or not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(
            f"{where}: ranks={list(ranks if ranks is not None else [])}; "
            f"expected distinct global ranks, at least one, each from 0 to {size - 1}"
        )
    _check_description(group_desc, where)
    config = default.config if backend is None else BackendConfig(backend)
    index = bound_index(device_id, config, "new_group")
    seconds = as_timeout(timeout, default.timeout, "new_group: timeout")
    # With NCCL the communicators can then be split off those of the default group.
    origin = Origin(default.built_backend) if chosen == default.ranks else None
    made = world.new_group(chosen, group_desc, config, seconds, origin)
    if index is None:
        index = _early_device(default, config)
    if index is not None and isinstance(made, ProcessGroup):
        made.connect(index)
    return made


def _check_description(group_desc: str | None, where: str) -> None:
    """Raise `TypeError` or `ValueError` unless `group_desc` can name a group."""
    if group_desc is not None and not isinstance(group_desc, str):
        raise TypeError(f"{where}: group_desc={group_desc!r}; expected a str")
    if group_desc and not group_desc.isascii():
        try:
            group_desc.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: group_desc={group_desc!r}: {error}") from None
    if group_desc == DEFAULT:
        raise ValueError(
            f"{where}: group_desc={DEFAULT!r} is the name of the default group; "
            "expected another"
        )


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

    The semantics are those of ``torch.distributed.new_subgroups``.

    Parameters
    ----------
    group_size : int, optional
        The number of ranks in each; ``None`` is that of this host
        (``LOCAL_WORLD_SIZE``).
    group : ProcessGroup, optional
        The group; ``None`` is the default group.
    timeout, backend, pg_options, group_desc : optional
        As for `new_group`.

    Returns
    -------
    tuple of ProcessGroup and list
        The new group that this rank is in, and all of them, in order, with
        ``GroupMember.NON_GROUP_MEMBER`` in the place of those it is not in.

    Raises
    ------
    ValueError
        `group_size` does not divide the size of `group`, or is not known; a bad backend
        string or timeout; this rank is not in `group`, it was destroyed, or there is no
        default group.
    TypeError
        `group` is no group, or another argument is of another type.

    Examples
    --------
    >>> mine, all_of_them = dist.new_subgroups(group_size=1)
    >>> mine.ranks, len(all_of_them)
    ([0], 1)
    """
    pg = _parent(group, "new_subgroups")
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

    The semantics are those of ``torch.distributed.new_subgroups_by_enumeration``.

    Parameters
    ----------
    ranks_per_subgroup_list : sequence of sequence of int
        The global ranks of each group; no rank is in two.
    timeout, backend, pg_options, group_desc : optional
        As for `new_group`.

    Returns
    -------
    tuple of (ProcessGroup or None) and list
        The new group that this rank is in, ``None`` where it is in none, and all of
        them, in order, with ``GroupMember.NON_GROUP_MEMBER`` in the place of those it
        is not in.

    Raises
    ------
    ValueError
        Lists that are empty, overlap, or name a rank that is not in the world; a bad
        backend string or timeout; or there is no default group. No group was made.
    TypeError
        An argument is of another type.

    Examples
    --------
    >>> mine, all_of_them = dist.new_subgroups_by_enumeration([[0]])
    >>> mine.ranks
    [0]
    """
    default = world.get_group(DEFAULT)
    where = f"new_subgroups_by_enumeration on rank {default.global_rank}"
    lists = _lists(ranks_per_subgroup_list, f"{where}: ranks_per_subgroup_list")
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


def _parent(group: Group, op: str) -> ProcessGroup:
    """Return the group of which `op` makes others."""
    pg = resolve_group(group, op)
    pg._check_exists(op)
    return pg


def _lists(value: Any, what: str) -> list[list[int]]:
    """Return lists of ranks as Python's; ``None`` is none, which the caller refuses."""
    given = as_list(() if value is None else value, what, "lists of ranks")
    return [as_ints(ranks, f"{what}[{place}]") for place, ranks in enumerate(given)]


def _are_disjoint(lists: Sequence[Sequence[int]], size: int) -> bool:
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
    """Return a group without some ranks of `group`; only the other ranks call it.

    Returns at once. Backend string and timeout are those of `group`.

    Parameters
    ----------
    ranks_to_exclude : sequence of int
        Ranks in `group`, which may be dead or hung.
    group : ProcessGroup, optional
        The group; ``None`` is the default group.
    shrink_flags : int, default SHRINK_DEFAULT
        With ``SHRINK_DEFAULT`` `group` stays as it is. With ``SHRINK_ABORT`` it is
        aborted on every rank: its ops in flight raise `DistAbortedError`, and
        `rebuild_process_group` makes it usable once all its ranks are back.
    pg_options : object, optional
        Not used: accepted for c10d's signature.

    Raises
    ------
    ValueError
        Ranks that are not in `group` or given twice; none or all are excluded, or this
        rank is; unknown flags; this rank is not in `group`, it was destroyed, or there
        is no default group.
    TypeError
        `group` is no group, or a rank no integer.

    Notes
    -----
    As ``torch.distributed.shrink_group``, except that global ranks and the default
    group do not change: pass the new group as `group`, or to ``%%distributed --group``.
    NCCL's communicators are derived from those of `group` (``ncclCommShrink``, NCCL
    2.27) if they are intact on every remaining rank; otherwise, and with other
    backends, they are new.

    Examples
    --------
    >>> if dist.get_rank() == 0:  # rank 1 of two is dead, or hung
    ...     rest = dist.shrink_group([1])
    ...     assert rest.ranks == [0]
    """
    pg = _parent(group, "shrink_group")
    excluded = sorted(
        as_ints(ranks_to_exclude, f"shrink_group on {pg.describe()}: ranks_to_exclude")
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

    Returns at once, and works with every backend.

    As ``torch.distributed.split_group``. Communicators of the new groups are made when
    `new_group` would make them, from a unique id of their own.

    Parameters
    ----------
    parent_pg : ProcessGroup, optional
        The group that is divided; ``None`` is the default group.
    split_ranks : sequence of sequence of int
        The ranks of each new group, as ranks in `parent_pg`, the same lists on every
        rank of it; each is sorted, as in c10d.
    timeout, pg_options, group_desc, backend : optional
        As for `new_group`.

    Returns
    -------
    ProcessGroup or None
        The new group; ``None`` on a rank in none of the lists (``NCCL_SPLIT_NOCOLOR``),
        which need not call this function.

    Raises
    ------
    ValueError
        Lists that are missing, empty, overlap, or name a rank that is not in the group;
        a bad backend string or timeout; this rank is not in `parent_pg`, it was
        destroyed, or there is no default group.
    TypeError
        `parent_pg` is no group, or another argument is of another type.

    Examples
    --------
    >>> mine = dist.split_group(split_ranks=[[0]], group_desc="part")
    >>> mine.ranks
    [0]
    """
    pg = _parent(parent_pg, "split_group")
    what = f"split_group on {pg.describe()}: split_ranks"
    _check_description(group_desc, f"split_group on {pg.describe()}")
    lists = [sorted(ranks) for ranks in _lists(split_ranks, what)]
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
