"""Completion and help in cells for the ranks, as the ranks know their names."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from IPython.core.completer import SimpleCompletion
from IPython.core.error import UsageError

from rankscope.engines import Cluster

from .language.commands import DISTRIBUTED, RANK
from .language.options import Command
from .language.values import parse_ranks
from .mode import CellMode
from .session import session

__all__ = ["CellCode", "help_of_ranks", "names_on_ranks"]

_FIRST_LINE = re.compile(r"\n*\s*%%(distributed|rank)(?: (.*))?\n")
#: The name, or the attribute of a name, in front of the cursor.
_NAME = re.compile(r"(?:(\w+)\.)?(\w*)$")
#: The type of a completion whose type is not known, as IPython writes it.
UNKNOWN = "<unknown>"


@dataclass(frozen=True)
class CellCode:
    """The code of a cell that is for the ranks, and who runs it."""

    code: str
    #: Place in `code`.
    cursor: int
    cluster: Cluster
    ranks: Sequence[int]

    @classmethod
    def of(cls, text: str, cursor: int, mode: CellMode) -> CellCode | None:
        """Return what of a cell with `text` the ranks run; `cursor` is in `text`."""
        match = _FIRST_LINE.match(text)
        above = mode.local_part(text) if match is None else match.end()
        cluster = session.cluster
        if above is None or cursor < above or not isinstance(cluster, Cluster):
            return None
        command, line = DISTRIBUTED, mode.options
        if match is not None:
            command, line = (RANK if match[1] == "rank" else DISTRIBUTED), match[2]
        ranks = _ranks(command, line or "", cluster)
        return cls(text[above:], cursor - above, cluster, ranks)

    def completions(self) -> tuple[str, list[SimpleCompletion]]:
        """Return the incomplete word at the cursor, and what it may become."""
        introspection = self.cluster.introspection
        reply = introspection.ask("complete", self.ranks, self.code, self.cursor)
        if reply is None:
            return self._from_names(introspection.names(self.ranks))
        types = {
            one["text"]: one.get("type", "")
            for one in reply["metadata"].get("_jupyter_types_experimental", ())
        }
        word, matches = self.code[reply["cursor_start"] : self.cursor], reply["matches"]
        # Some versions of IPython complete ".re" to ".real".
        dot = 1 if word.startswith(".") else 0
        return word[dot:], [
            SimpleCompletion(text[dot:], type=types.get(text) or UNKNOWN)
            for text in matches
        ]

    def _from_names(
        self, names: Mapping[str, str]
    ) -> tuple[str, list[SimpleCompletion]]:
        match = _NAME.search(self.code[: self.cursor])
        assert match is not None
        owner, word = match.groups()
        found = names
        if owner is not None:
            found = dict.fromkeys(_public(names.get(owner, "")), UNKNOWN)
        return word, [
            SimpleCompletion(name, type=kind.partition(":")[0])
            for name, kind in sorted(found.items())
            if name.startswith(word)
        ]

    def inspect(self, detail: int, omitted: Collection[str]) -> Any:
        """Return a rank's ``inspect_reply``; ``None`` if it is not known there."""
        arguments = self.code, self.cursor, detail, sorted(omitted)
        reply = self.cluster.introspection.ask("inspect", self.ranks, *arguments)
        return reply if reply is not None and reply["found"] else None


def _ranks(command: Command, line: str, cluster: Cluster) -> Sequence[int]:
    """Return the ranks that the options name; all where that is not valid yet."""
    try:
        values = command.parse(line)
        chosen = None if values is None else values["ranks"]
        if chosen is not None:
            return parse_ranks(chosen, cluster.ranks, "cluster")
    except (UsageError, ValueError):
        pass
    return cluster.ranks


def _public(kind: str) -> list[str]:
    """Return what a module has that a rank imported, where it is loaded here, too."""
    what, _, name = kind.partition(":")
    module = sys.modules.get(name) if what == "module" else None
    if not isinstance(module, ModuleType):
        return []
    return [one for one in dir(module) if not one.startswith("_")]


def names_on_ranks() -> list[str]:
    """Return the names of the ranks' variables, for ``%dist_pull``."""
    cluster = session.cluster
    if not isinstance(cluster, Cluster):
        return []
    names = cluster.introspection.names(cluster.ranks)
    return sorted(
        name
        for name, kind in names.items()
        if kind != "type" and not kind.startswith("module:")
    )


Inspect = Callable[..., Any]


def help_of_ranks(inspect: Inspect, mode: CellMode) -> Inspect:
    """Return `inspect`, a kernel's ``do_inspect``, that asks ranks in their cells."""

    def do_inspect(
        code: str,
        cursor_pos: int,
        detail_level: int = 0,
        omit_sections: Collection[str] = (),
    ) -> Any:
        cell = CellCode.of(code, cursor_pos, mode)
        found = None if cell is None else cell.inspect(detail_level, omit_sections)
        if found is not None:
            return found
        return inspect(code, cursor_pos, detail_level, omit_sections)

    return do_inspect
