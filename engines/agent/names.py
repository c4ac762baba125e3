"""The names that cells of a rank can use, read without running any code of theirs."""

from __future__ import annotations

from collections.abc import Collection
from types import ModuleType
from typing import Any

__all__ = ["names_of"]


def names_of(shell: Any, given: Collection[str]) -> dict[str, str]:
    """Return the names in the cells' namespace, each with what it names.

    That is the name of a type, or ``module:`` and the name of a module. IPython's own
    names are left out; those of `given` are not, although IPython hides them.
    """
    # A copy is made in one step; the main thread may run a cell meanwhile.
    namespace, hidden = dict(shell.user_ns), shell.user_ns_hidden
    return {
        name: _kind(value)
        for name, value in namespace.items()
        if not name.startswith("_") and (name in given or name not in hidden)
    }


def _kind(value: Any) -> str:
    kind = type(value)
    if issubclass(kind, ModuleType):
        return f"module:{ModuleType.__getattribute__(value, '__name__')}"
    # Not kind.__name__: a metaclass can have that run code.
    return type.__dict__["__name__"].__get__(kind)
