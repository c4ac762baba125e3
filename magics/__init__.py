"""What a person types: ``%load_ext rankscope`` and its magics."""

from __future__ import annotations

from typing import Any

from .background import BackgroundCell
from .commands import COMMANDS
from .complete import matcher
from .extension import RankscopeMagics
from .failures import CellError, CellTimeout, CommandError, Interrupted
from .session import current_cluster, use_cluster

__all__ = [
    "BackgroundCell",
    "CellError",
    "CellTimeout",
    "CommandError",
    "Interrupted",
    "current_cluster",
    "load_ipython_extension",
    "unload_ipython_extension",
    "use_cluster",
]


def load_ipython_extension(ip: Any) -> None:
    """Register the magics and their completion; ``%load_ext rankscope``."""
    unload_ipython_extension(ip)
    magics = RankscopeMagics(ip)
    for command in COMMANDS.values():
        kind = "cell" if command.cell else "line"
        method = getattr(magics, command.name)
        ip.register_magic_function(method, kind, command.name)
    ip.Completer.custom_matchers.append(matcher(ip))


def unload_ipython_extension(ip: Any) -> None:
    """Take the magics away. A cluster that runs stays as it is."""
    for command in COMMANDS.values():
        kind = "cell" if command.cell else "line"
        ip.magics_manager.magics[kind].pop(command.name, None)
    ip.Completer.custom_matchers[:] = [
        one
        for one in ip.Completer.custom_matchers
        if getattr(one, "matcher_identifier", None) != "rankscope"
    ]
