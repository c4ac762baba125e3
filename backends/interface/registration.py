"""Registration: how a backend is made, where it runs, and why it cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..stores.base import Store

__all__ = [
    "BackendCreator",
    "DistributedBackendOptions",
    "LauncherRendezvous",
    "Registration",
]

#: ``creator(store, rank, world_size, timeout) -> Backend``, or with the extended API
#: ``creator(DistributedBackendOptions, None)``; a creator of a third party may return
#: anything, so `registry.build` checks the result.
BackendCreator = Callable[..., Any]

#: ``(timeout, key) -> (store, rank, world_size)``, or ``None`` in a process that
#: the launcher did not start.
LauncherRendezvous = Callable[[float, bytes | None], tuple[Store, int, int] | None]


@dataclass
class DistributedBackendOptions:
    """What a creator with the extended API is called with, as c10d's class has it.

    `timeout` is a `timedelta` here; `group_id` is the group's ``group_name``.
    """

    store: Store
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: Sequence[int]


@dataclass(frozen=True)
class Registration:
    """A backend that can be made: the arguments of `Backend.register_backend`."""

    name: str
    creator: BackendCreator
    devices: tuple[str, ...]
    unavailable: Callable[[], str | None]
    launcher: str | None
    rendezvous: LauncherRendezvous | None
    on_init: Callable[[], None]
    has_options: Callable[[], bool]
    extended_api: bool = False
