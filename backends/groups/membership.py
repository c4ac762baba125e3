"""Which groups there are, who is in them, and which one a caller means; as in c10d."""

from __future__ import annotations

import warnings

from ..rank_sets import name_ranks
from .non_member import NonGroupMember
from .process_group import ProcessGroup
from .world import world

__all__ = [
    "Group",
    "GroupMember",
    "get_backend",
    "get_backend_config",
    "get_global_rank",
    "get_group_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "is_initialized",
    "resolve_group",
]

Group = ProcessGroup | NonGroupMember | None


class _GroupMeta(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group, ``None`` before `init_process_group`."""
        return world.default


class group(metaclass=_GroupMeta):
    """``group.WORLD`` is the default group, as in ``torch.distributed``."""


class GroupMember(metaclass=_GroupMeta):
    """``GroupMember.WORLD``, and the type that stands for a group of other ranks."""

    NON_GROUP_MEMBER = NonGroupMember


def is_initialized() -> bool:
    """Return whether the default group exists."""
    return world.default is not None


def get_rank(group: Group = None) -> int:
    """Return this rank in `group` (default: the default group); -1: not a member."""
    if isinstance(group, NonGroupMember):
        return -1
    return resolve_group(group, "get_rank").rank()


def get_world_size(group: Group = None) -> int:
    """Return the number of ranks in `group`; -1 if this rank is not a member."""
    if isinstance(group, NonGroupMember):
        return -1
    return resolve_group(group, "get_world_size").size()


def get_process_group_ranks(group: Group = None) -> list[int]:
    """Return the global ranks of `group`, by group rank."""
    if isinstance(group, NonGroupMember):
        return list(group.ranks)
    return list(resolve_group(group, "get_process_group_ranks").ranks)


def get_group_rank(group: Group, global_rank: int) -> int:
    """Return the rank in `group` of `global_rank`; `ValueError` if not a member."""
    pg = resolve_group(group, "get_group_rank")
    if global_rank not in pg.ranks:
        raise ValueError(
            f"get_group_rank: rank {global_rank} is not in group {pg.group_desc!r} "
            f"({name_ranks(pg.ranks)})"
        )
    return pg.ranks.index(global_rank)


def get_global_rank(group: Group, group_rank: int) -> int:
    """Return the global rank of `group_rank` in `group`; `ValueError` if none."""
    pg = resolve_group(group, "get_global_rank")
    if not 0 <= group_rank < pg.size():
        raise ValueError(
            f"get_global_rank: group {pg.group_desc!r} has ranks 0 to {pg.size() - 1}, "
            f"not {group_rank}"
        )
    return pg.ranks[group_rank]


def get_backend_config(group: Group = None) -> str:
    """Return the backend string of `group`, per device: ``cpu:gloo,cuda:nccl``."""
    return str(resolve_group(group, "get_backend_config").config)


def get_backend(group: Group = None) -> str:
    """Return the backend of the first device. Deprecated: a group has several."""
    warnings.warn(
        "get_backend() names one backend of a group that may hold several; use "
        "get_backend_config()",
        DeprecationWarning,
        stacklevel=2,
    )
    pg = resolve_group(group, "get_backend")
    return pg.config.device_backend_map[pg.first_device()]


def resolve_group(group: Group, op: str) -> ProcessGroup:
    """Return the group that `group` stands for.

    Raises `ValueError` where this rank is not in it and where there is no default
    group yet, `TypeError` for anything but a group or ``None``.
    """
    if group is None:
        return world.get_group()
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(group, NonGroupMember):
        group.refuse(op)
    raise TypeError(
        f"{op}: group is a {type(group).__name__}; expected a ProcessGroup "
        "(what new_group returned) or None"
    )
