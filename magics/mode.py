"""CellMode: every cell on the ranks, without a first line, until it is switched off."""

from __future__ import annotations

import re
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

__all__ = ["MODE_CELL", "CellMode"]

#: The cell magic that a cell becomes; nobody types it, and Tab does not offer it.
MODE_CELL = "_dist_mode_cell"

#: Lines at the top of a cell that are not for the ranks: magics, shell commands, help.
_LOCAL = re.compile(r"\s*([%!?]|[^'\"#]*\?\s*$)")
_NOTHING = re.compile(r"\s*(#|$)")


class CellMode:
    """Turns cells into `MODE_CELL` magics while it is `on`: an input transformer."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._depth = 0
        #: The options of ``%%distributed`` for each cell; ``None``: the mode is off.
        self.options: str | None = None

    def install(self) -> None:
        """Look at every cell from now on."""
        self._shell.input_transformers_cleanup.insert(0, self._transform)
        self._shell.events.register("pre_execute", self._began)
        self._shell.events.register("post_execute", self._ended)

    def remove(self) -> None:
        """Leave cells alone again."""
        transformers = self._shell.input_transformers_cleanup
        if self._transform in transformers:
            transformers.remove(self._transform)
            self._shell.events.unregister("pre_execute", self._began)
            self._shell.events.unregister("post_execute", self._ended)

    def local_part(self, text: str) -> int | None:
        """Return how many characters at the top are the notebook's; ``None``: all."""
        if self.options is None:
            return None
        lines = text.splitlines(keepends=True)
        local = _local_lines(lines)
        if lines and local == len(lines):
            return None
        return sum(map(len, lines[:local]))

    def _began(self) -> None:
        self._depth += 1

    def _ended(self) -> None:
        self._depth = max(0, self._depth - 1)

    def _transform(self, lines: list[str]) -> list[str]:
        # Magics transform code as well, %time for one, while their cell runs.
        if self.options is None or self._depth or self._is_of_front_end():
            return lines
        local = _local_lines(lines)
        body = "".join(lines[local:])
        if not body.strip():
            return lines
        call = (
            f"get_ipython().run_cell_magic({MODE_CELL!r}, {self.options!r}, {body!r})"
        )
        return [*lines[:local], f"{call}\n"]

    def _is_of_front_end(self) -> bool:
        """Whether a front end asks on its own: what nobody typed stays here."""
        kernel: Any = getattr(self._shell, "kernel", None)
        if kernel is None:
            return False
        content = kernel.get_parent("shell").get("content", {})
        return bool(content.get("silent")) or not content.get("store_history", True)


def _local_lines(lines: list[str]) -> int:
    """Return how many lines at the top are for the notebook: all, for a cell magic."""
    local = 0
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("%%"):
            return len(lines)
        if _LOCAL.match(line):
            local = number
        elif not _NOTHING.match(line):
            return local
    # Nothing but comments follows.
    return len(lines)
