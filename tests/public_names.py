"""The public names of `rankscope`: what it exports, and the methods of its classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import rankscope

__all__ = ["exported", "public"]


def exported() -> dict[str, Any]:
    """Return the functions and classes that `rankscope` exports, aliases left out."""
    members = {name: getattr(rankscope, name) for name in rankscope.__all__}
    return {
        name: member
        for name, member in members.items()
        if callable(member) and member.__name__ == name
    }


def public() -> dict[str, Any]:
    """Return those, and the public methods and properties of the classes."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name, member in exported().items():
        found[name] = member
        for method, defined in _methods(member):
            if id(_function(defined)) not in seen:
                seen.add(id(_function(defined)))
                found[f"{name}.{method}"] = defined
    return found


def _methods(cls: Any) -> Iterator[tuple[str, Any]]:
    if not inspect.isclass(cls):
        return
    for name in dir(cls):
        defined = inspect.getattr_static(cls, name)
        function = _function(defined)
        ours = (getattr(function, "__module__", "") or "").startswith("rankscope")
        if not name.startswith("_") and inspect.isfunction(function) and ours:
            yield name, defined


def _function(member: Any) -> Any:
    if isinstance(member, property):
        return member.fget
    return getattr(member, "__func__", member)
