"""Which groups there are, who is in them, and which one a caller means; as in c10d."""

from __future__ import annotations

import os
import warnings

from ..quantities import as_int
from ..rank_sets import name_ranks
from ..work.flight_recorder import frames_inside
from .process_group import ProcessGroup
from .spec import NON_GROUP_MEMBER, NonGroupMember
from .world import world

__all__ = [
    "Group",
    "GroupMember",
    "get_backend",
    "get_backend_config",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "is_initialized",
    "is_torchelastic_launched",
    "member_group",
    "resolve_group",
]

Group = ProcessGroup | NonGroupMember | None


class _GroupMeta(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group, ``None`` before `init_process_group`."""
        return world.default


class group(metaclass=_GroupMeta):
    """The default group as ``group.WORLD``, for programs written for torch.

    ``group.WORLD`` is ``None`` before `init_process_group`, as in
    ``torch.distributed``.

    Examples
    --------
    >>> dist.group.WORLD.size()
    1
    """


class GroupMember(metaclass=_GroupMeta):
    """``GroupMember.WORLD``, and the object that stands for a group of other ranks.

    Named after ``torch.distributed.GroupMember``. `NON_GROUP_MEMBER` is what
    `new_group` returns on a rank that is not in the new group; see `NonGroupMember`.

    Examples
    --------
    >>> made = dist.new_group([0])
    >>> made is dist.GroupMember.NON_GROUP_MEMBER
    False
    """

    NON_GROUP_MEMBER = NON_GROUP_MEMBER


def is_initialized() -> bool:
    """Return whether the default group exists.

    The semantics are those of ``torch.distributed.is_initialized``.

    Examples
    --------
    >>> dist.is_initialized()
    True
    """
    return world.default is not None


def is_torchelastic_launched() -> bool:
    """Return whether torchrun started this process, which sets ``TORCHELASTIC_RUN_ID``.

    The semantics are those of ``torch.distributed.is_torchelastic_launched``.

    Examples
    --------
    >>> dist.is_torchelastic_launched()
    False
    """
    return "TORCHELASTIC_RUN_ID" in os.environ


def get_pg_count() -> int:
    """Return the number of groups that this rank is in.

    The semantics are those of ``torch.distributed.get_pg_count``.

    Examples
    --------
    >>> dist.get_pg_count()
    1
    """
    return len(world.groups())


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return the rank of this process among those of its host: ``LOCAL_RANK``.

    The semantics are those of ``torch.distributed.get_node_local_rank``. It needs no
    group.

    Parameters
    ----------
    fallback_rank : int, optional
        What is returned where the launcher has not set ``LOCAL_RANK``.

    Raises
    ------
    RuntimeError
        ``LOCAL_RANK`` is no integer, or neither it nor `fallback_rank` is given.

    Examples
    --------
    >>> dist.get_node_local_rank(fallback_rank=0)
    0
    """
    local = os.environ.get("LOCAL_RANK")
    if local is not None:
        try:
            return int(local)
        except ValueError as error:
            raise RuntimeError(
                f"get_node_local_rank: LOCAL_RANK is {local!r}; expected an integer"
            ) from error
    if fallback_rank is None:
        raise RuntimeError(
            "get_node_local_rank: the launcher did not set LOCAL_RANK, and "
            "fallback_rank is missing; expected one of them"
        )
    return as_int(fallback_rank, "get_node_local_rank: fallback_rank")


def get_rank(group: Group = None) -> int:
    """Return this process's rank in `group`; -1 if it is not a member.

    The semantics are those of ``torch.distributed.get_rank``.

    Parameters
    ----------
    group : ProcessGroup, optional
        The group; ``None`` is the default group.

    Raises
    ------
    TypeError, ValueError
        `group` is no group; or it is ``None``, and there is no default group.

    Examples
    --------
    >>> dist.get_rank()
    0
    """
    if isinstance(group, NonGroupMember):
        return -1
    return resolve_group(group, "get_rank").rank()


def get_world_size(group: Group = None) -> int:
    """Return the number of ranks in `group`; -1 if this rank is not a member.

    The semantics are those of ``torch.distributed.get_world_size``.

    Parameters
    ----------
    group : ProcessGroup, optional
        The group; ``None`` is the default group.

    Raises
    ------
    TypeError, ValueError
        `group` is no group; or it is ``None``, and there is no default group.

    Examples
    --------
    >>> dist.get_world_size()
    1
    """
    if isinstance(group, NonGroupMember):
        return -1
    return resolve_group(group, "get_world_size").size()


def get_process_group_ranks(group: Group = None) -> list[int]:
    """Return the global ranks of `group`, in the order of their ranks in the group.

    The semantics are those of ``torch.distributed.get_process_group_ranks``.

    Parameters
    ----------
    group : ProcessGroup, optional
        The group; ``None`` is the default group.

    Raises
    ------
    TypeError, ValueError
        `group` is no group that this rank is in, or ``None`` without a default group.

    Examples
    --------
    >>> dist.get_process_group_ranks()
    [0]
    """
    return list(resolve_group(group, "get_process_group_ranks").ranks)


def get_group_rank(group: Group, global_rank: int) -> int:
    """Return the rank in `group` of a process, given by its global rank.

    The semantics are those of ``torch.distributed.get_group_rank``.

    Parameters
    ----------
    group : ProcessGroup or None
        The group; ``None`` is the default group.
    global_rank : int
        The rank in the world.

    Raises
    ------
    ValueError
        `global_rank` is not in `group`, or this rank is not; or `group` is ``None``,
        and there is no default group.
    TypeError
        `group` is no group, or `global_rank` no integer.

    Examples
    --------
    >>> dist.get_group_rank(dist.group.WORLD, 0)
    0
    """
    pg = resolve_group(group, "get_group_rank")
    global_rank = as_int(global_rank, "get_group_rank: global_rank")
    if global_rank not in pg.ranks:
        raise ValueError(
            f"get_group_rank: rank {global_rank} is not in group {pg.group_desc!r} "
            f"({name_ranks(pg.ranks)})"
        )
    return pg.ranks.index(global_rank)


def get_global_rank(group: Group, group_rank: int) -> int:
    """Return the global rank of a process, given by its rank in `group`.

    The semantics are those of ``torch.distributed.get_global_rank``.

    Parameters
    ----------
    group : ProcessGroup or None
        The group; ``None`` is the default group.
    group_rank : int
        The rank in the group.

    Raises
    ------
    ValueError
        `group` has no such rank, or this rank is not in it; or `group` is ``None``, and
        there is no default group.
    TypeError
        `group` is no group, or `group_rank` no integer.

    Examples
    --------
    >>> dist.get_global_rank(dist.group.WORLD, 0)
    0
    """
    pg = resolve_group(group, "get_global_rank")
    group_rank = as_int(group_rank, "get_global_rank: group_rank")
    if not 0 <= group_rank < pg.size():
        raise ValueError(
            f"get_global_rank: group {pg.group_desc!r} has ranks 0 to {pg.size() - 1}, "
            f"not {group_rank}"
        )
    return pg.ranks[group_rank]


def get_backend_config(group: Group = None) -> str:
    """Return the backend string of `group`, per device type: ``cpu:tcp,cuda:nccl``.

    The semantics are those of ``torch.distributed.get_backend_config``.

    Parameters
    ----------
    group : ProcessGroup, optional
        The group; ``None`` is the default group.

    Raises
    ------
    TypeError, ValueError
        `group` is no group that this rank is in, or ``None`` without a default group.

    Examples
    --------
    >>> dist.get_backend_config()
    'cpu:tcp'
    """
    return str(resolve_group(group, "get_backend_config").config)


def get_backend(group: Group = None) -> str:
    """Return the backend of the group's first device type; deprecated.

    A group may hold several backends: `get_backend_config` names all of them.

    As ``torch.distributed.get_backend``, with a `DeprecationWarning`.

    Parameters
    ----------
    group : ProcessGroup, optional
        The group; ``None`` is the default group.

    Raises
    ------
    TypeError, ValueError
        `group` is no group that this rank is in, or ``None`` without a default group.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     dist.get_backend()
    'tcp'
    """
    warnings.warn(
        "get_backend() names one backend of a group that may hold several; use "
        "get_backend_config()",
        DeprecationWarning,
        stacklevel=2,
    )
    pg = resolve_group(group, "get_backend")
    return pg.config.device_backend_map[pg.first_device()]


def resolve_group(group: Group, op: str) -> ProcessGroup:
    """Return the group that `group` stands for."""
    if group is None:
        return world.get_group()
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(group, NonGroupMember):
        raise ValueError(
            f"{op}: rank {world.rank} is not in the group (new_group returned "
            "GroupMember.NON_GROUP_MEMBER here); call it on the group's ranks only"
        )
    raise TypeError(
        f"{op}: group is a {type(group).__name__}; expected a ProcessGroup "
        "(what new_group returned) or None"
    )


def member_group(group: Group, op: str) -> ProcessGroup | None:
    """Return the group of an op; ``None`` where this rank is not in it.

    A stranger is warned, and the op does nothing there, as in c10d: programs call the
    ops of a group on all ranks. It raises the other errors of `resolve_group`.
    """
    if group is None:
        # Each op comes here: a look-up, and no call.
        return world.current or world.get_group()
    if isinstance(group, ProcessGroup):
        return group
    if not isinstance(group, NonGroupMember):
        return resolve_group(group, op)
    warnings.warn(
        f"{op} does nothing on rank {world.rank}, which is not in the group "
        "(new_group returned GroupMember.NON_GROUP_MEMBER here)",
        stacklevel=1 + frames_inside(),
    )
    return None
