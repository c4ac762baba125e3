"""Registration: how a backend is made, where it runs, and why it cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..stores.base import Store

__all__ = ["BackendCreator", "LauncherRendezvous", "Registration"]

#: ``creator(store, rank, world_size, timeout) -> Backend``; a creator of a third party
#: may return anything, so `registry.build` checks the result.
BackendCreator = Callable[[Store, int, int, float], Any]

#: ``(timeout, key) -> (store, rank, world_size)``, or ``None`` in a process that
#: the launcher did not start.
LauncherRendezvous = Callable[[float, bytes | None], tuple[Store, int, int] | None]


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
