"""The IPython extension: ``%load_ext rankscope`` and its magics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rankscope.engines.wire.ipykernel_private import send_replies_through_stream

from .arguments import parse
from .cell_code import help_of_ranks
from .cells.background import BackgroundCell
from .complete import matcher
from .extension import RankscopeMagics
from .language.commands import COMMANDS, DISTRIBUTED
from .language.options import Command
from .mode import MODE_CELL, CellMode
from .output.failures import CellError, CellTimeout, CommandError, Interrupted
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


#: Those that are installed: of the last load.
_modes: list[CellMode] = []


def load_ipython_extension(ip: Any) -> None:
    """Register the magics and their completion; ``%load_ext rankscope``."""
    unload_ipython_extension(ip)
    magics = RankscopeMagics(ip)
    for command in COMMANDS.values():
        kind = "cell" if command.cell else "line"
        method = getattr(magics, command.name)
        ip.register_magic_function(_parsing(method, command), kind, command.name)
    # IPython refuses a cell magic without a cell: a line magic answers --help.
    ip.register_magic_function(
        _with_help(magics.distributed_line, DISTRIBUTED), "line", DISTRIBUTED.name
    )
    mode_cell = partial(magics.distributed, in_mode=True)
    ip.register_magic_function(_parsing(mode_cell, DISTRIBUTED), "cell", MODE_CELL)
    magics.mode.install()
    _modes.append(magics.mode)
    ip.Completer.custom_matchers.append(matcher(ip, magics.mode))
    if getattr(ip, "kernel", None) is not None:
        send_replies_through_stream(ip.kernel)
        ip.kernel.do_inspect = help_of_ranks(ip.kernel.do_inspect, magics.mode)


def unload_ipython_extension(ip: Any) -> None:
    """Remove the magics and their completion. A running cluster is not changed."""
    kernel = getattr(ip, "kernel", None)
    if kernel is not None:
        # It hides the method of the kernel's class.
        vars(kernel).pop("do_inspect", None)
    while _modes:
        _modes.pop().remove()
    for registered in ip.magics_manager.magics.values():
        for name in (*COMMANDS, MODE_CELL):
            registered.pop(name, None)
    ip.Completer.custom_matchers[:] = [
        one
        for one in ip.Completer.custom_matchers
        if getattr(one, "matcher_identifier", None) != "rankscope"
    ]


def _parsing(method: Callable[..., Any], command: Command) -> Callable[..., Any]:
    """Return the magic that calls `method` with the values of its line."""

    def parsing(line: str, *cell: str) -> Any:
        values = parse(command, line)
        return None if values is None else method(command, values, *cell)

    return _with_help(parsing, command)


def _with_help(method: Callable[..., Any], command: Command) -> Callable[..., Any]:
    """Return `method` with the command's help for ``%name?`` to show."""

    def magic(*arguments: str) -> Any:
        return method(*arguments)

    magic.__doc__ = command.help()
    magic.__name__ = command.name
    return magic
