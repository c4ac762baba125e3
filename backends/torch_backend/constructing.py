"""The constructor of DDP after a rebuild, which some ranks may have behind them.

An abort ends it on some ranks, which call it again, and not on others, which go on: its
ops would meet those of `rejoin`, or of the constructor of another model. So each rank
tells in the store what it calls next. Where that is not the same on all of them, no
constructor issues an op before `rejoin`, which gives the models their values.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..groups.generation import Generation
from ..stores.prefix import PrefixStore
from ..work.user_code import users_frame
from . import private, stale
from .joining import await_key, joining
from .private import Shell

__all__ = ["install", "tell_rejoin"]


#: What `rejoin` tells; the constructor tells the user's lines.
_REJOIN = "rejoin"


@dataclass
class _Told:
    """What this rank has told in a generation of a group."""

    #: How many calls were the same on all ranks.
    count: int = 0
    #: Whether this one is not.
    differs: bool = False


_told: weakref.WeakKeyDictionary[Generation, _Told] = weakref.WeakKeyDictionary()


@functools.cache
def install() -> None:
    """Have DDP's constructor ask the other ranks; later calls do nothing."""
    private.replace(*private.constructor, _asking)


def _asking(construct: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(construct)

    @functools.wraps(construct)
    def made(self: Any, *arguments: Any, **options: Any) -> None:
        given = signature.bind(self, *arguments, **options)
        shell = _shell_of(given.arguments)
        syncs = private.has_init_sync and given.arguments.get("init_sync", True)
        if shell is None or not syncs or _all_construct(shell):
            construct(self, *arguments, **options)
            if shell is not None:
                stale.note_model(self, shell)
            return
        given.arguments["init_sync"] = False
        construct(*given.args, **given.kwargs)
        stale.refuse_model(self)

    return made


def _shell_of(arguments: dict[str, Any]) -> Shell | None:
    """Return the group of a model to be made; ``None``: it is of another backend."""
    group, mesh = arguments.get("process_group"), arguments.get("device_mesh")
    if group is None:
        group = torch.distributed.group.WORLD if mesh is None else mesh.get_group(0)
    shell = None if group is None else private.cpu_backend(group)
    return shell if hasattr(shell, "of_rankscope") else None


def _all_construct(shell: Shell) -> bool:
    """Return whether all ranks of the group are in the same call of the constructor."""
    fresh = joining()
    if fresh is not None and not fresh.in_cells:
        return False  # its first op is `rejoin`
    if not _goes_on(shell):
        return True
    current = shell.group.current
    told = _told.setdefault(current, _Told())
    if not told.differs:
        own = str(_users_lines())
        store = _tell(current, told, own)
        told.differs = any(
            await_key(store, rank, current, _CALL, _LACKS) != own.encode()
            for rank in current.spec.ranks
        )
        told.count += not told.differs
    return not told.differs


def _users_lines() -> list[tuple[str, int, str]]:
    """Return what calls the constructor: module, line and function, up to the script.

    The file of a module may have another path on each host, and a cell another name.
    """
    found = []
    frame = users_frame(sys._getframe(1))
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        found.append((module, frame.f_lineno, frame.f_code.co_name))
        frame = users_frame(frame.f_back)
    return found


_CALL = "the constructor of DistributedDataParallel"
_LACKS = "has called neither it nor rankscope.torch.rejoin(model, optimizer)"


def tell_rejoin(shells: list[Shell], among: list[int]) -> None:
    """Tell that this rank is in `rejoin`, in the groups whose ranks all call it."""
    for shell in shells:
        if _goes_on(shell) and set(shell.group.ranks) <= set(among):
            current = shell.group.current
            told = _told.setdefault(current, _Told())
            if not told.differs:
                _tell(current, told, _REJOIN)
            told.count, told.differs = told.count + 1, False


def _goes_on(shell: Shell) -> bool:
    """Return whether the group was rebuilt, or is of a later round of a launcher."""
    return shell.rebuilt or shell.group.generation > 0


def _tell(current: Generation, told: _Told, call: str) -> PrefixStore:
    """Tell what this rank calls; return where the others do, by rank."""
    store = PrefixStore(f"torch/{told.count}", current.store)
    store.set(str(current.spec.global_rank), call.encode())
    return store
