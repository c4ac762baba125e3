"""What is known of each group of torch beyond torch's own registry: `Made`."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from ..groups.abort_reason import AbortReason, FoundCause
from .gloo_sockets import count_connections, listening_sockets
from .patching import replace
from .private.groups import MAKER, Names, names
from .stores import stay_in_step

__all__ = ["Made", "install", "known_groups", "made_of"]

_log = logging.getLogger(__name__)

_places = itertools.count()


@dataclass(eq=False)
class Made:
    """A group of torch: how it was made, its generation, and whether it is aborted."""

    #: Those of torch's function that makes groups, by name; for a group that was made
    #: before the watch began, or was split from another, what torch's registry says.
    arguments: Mapping[str, Any]
    #: The name that a person reads, once the watch has given it one.
    name: str = ""
    #: The number of its rebuilds.
    generation: int = 0
    #: Why it was aborted; ``None`` while it is usable.
    aborted: AbortReason | None = None
    #: How many of the generations before were aborted.
    aborts: int = 0
    #: The op that the abort ended on this rank, if one was in flight, and its line.
    op: str | None = None
    sequence_number: int | None = None
    source: str = ""
    #: Why its ops hang, if a diagnosis over all ranks has found it.
    cause: FoundCause | None = None
    #: Whether Python code issued an op since the end of the last cell, or the abort
    #: ended one.
    used: bool = False
    #: The number of its collectives at the end of the last cell.
    issued_before: int = 0
    #: The inodes of the listening sockets of its gloo backends.
    listeners: frozenset[int] = frozenset()
    #: The number of their connections to other ranks when the group was noted.
    connections: int = 0
    #: Sentences on what cannot use the group after its rebuild.
    stale: list[str] = field(default_factory=list)
    #: Why its gloo backends cannot be aborted; empty where they can.
    unabortable: str = ""
    #: Its place in the order in which this process made, or found, the groups.
    place: int = field(default_factory=lambda: next(_places))


_lock = threading.RLock()
_made: weakref.WeakKeyDictionary[Any, Made] = weakref.WeakKeyDictionary()


def made_of(group: Any) -> Made:
    """Return what is known of `group`, a ``ProcessGroup`` that is in torch's registry.

    Raises `LookupError` where it was destroyed, or is none of this process's groups.
    """
    with _lock:
        known = _made.get(group)
        if known is None:
            if not names().has(group):
                raise LookupError(f"{group!r} is no group of this process any more")
            known = _note(group, _arguments_of(group))
        return known


def known_groups() -> list[tuple[Any, Made]]:
    with _lock:
        return list(_made.items())


def install(
    torch: Names, making: Callable[[Mapping[str, Any]], AbstractContextManager[object]]
) -> Callable[[], None]:
    """Note each group that is made from now on; return the undoing.

    Torch makes each in ``making(arguments)``, with those of its function by name.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def make(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            # The default group's, in which its ranks have met, have none of others.
            if not arguments["global_ranks_in_group"]:
                stay_in_step(arguments["store"], arguments["group_rank"])
            with making(arguments):
                result = original(*args, **kwargs)
                group = result[0]
                # A rank that is not in the group gets a number in place of a group, and
                # a tag that was used before the group of that use.
                if isinstance(group, torch.c10d.ProcessGroup):
                    with _lock:
                        if group not in _made:
                            _note(group, arguments)
                return result

        return make

    return replace(torch.c10d, MAKER, wrap)


def _note(group: Any, arguments: Mapping[str, Any]) -> Made:
    made = Made(dict(arguments))
    kinds = {backend.name() for backend in names().backends(group).values()}
    if "gloo" in kinds and group.size() > 1:
        made.listeners = listening_sockets(_published(group))
        made.connections = count_connections(made.listeners)
        if not made.listeners:
            made.unabortable = (
                f"the sockets of gloo's group {group.group_name!r} were not found, so "
                "it cannot be aborted: interrupt the cell, or wait for its timeout"
            )
            _log.warning(made.unabortable)
    _made[group] = made
    return made


def _published(group: Any) -> list[bytes]:
    """Return what the gloo backends of this rank published in the group's store."""
    store = names().own_store(group)
    values = []
    # The backend of several types of device has the name of one of them in its keys.
    for device in names().device_types(group):
        for context in itertools.count():
            key = f"{device}//{context}/{group.rank()}"
            with contextlib.suppress(RuntimeError):
                if store.check([key]):
                    values.append(store.get(key))
                    continue
            break
    return values


def _arguments_of(group: Any) -> dict[str, Any]:
    """Return the arguments that made `group`, as torch's registry has them."""
    torch = names()
    is_default = group is torch.default
    known = {
        "group_size": group.size(),
        "group_rank": group.rank(),
        "global_ranks_in_group": [] if is_default else list(torch.ranks(group) or ()),
        "backend": torch.backend_name(group),
        "store": None,
        "group_name": torch.registered_name(group),
        "device_id": group.bound_device_id,
        "group_desc": group.group_desc,
    }
    for backend in torch.backends(group).values():
        options, timeout = torch.options(backend)
        if options is not None:
            known["timeout"] = timeout
            if backend.name().startswith("nccl"):
                known[torch.options_argument] = options
    return known
