"""Backends of installed packages, found by their entry points.

A package declares its backend in its metadata; programs need not import it::

    [project.entry-points."rankscope.backends"]
    mine = "my_package:register"

``register()`` is called without arguments at the first use of a backend called
``mine``; it calls ``Backend.register_backend("mine", ...)``.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from ..errors import DistBackendError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["GROUP", "declared", "load"]

#: The entry-point group that third-party backends are declared in.
GROUP = "rankscope.backends"


def declared() -> dict[str, list[EntryPoint]]:
    """Return the entry points of `GROUP` by backend name, without importing them.

    They are read at each call (some 10 ms), so that a package that was installed
    meanwhile is found. Built-in and registered names need no call.
    """
    from importlib import metadata  # takes 15 ms

    found: dict[str, list[EntryPoint]] = {}
    for entry in metadata.entry_points(group=GROUP):
        found.setdefault(entry.name, []).append(entry)
    return found


def load(name: str, registry: Container[str]) -> None:
    """Call the package that declares backend `name`, which adds it to `registry`.

    Raises `DistBackendError`, naming package and entry point, if there is no
    such package, or two, or if it fails or registers something else.
    """
    entries = declared().get(name, [])
    if not entries:
        raise DistBackendError(
            f"no backend {name!r} is registered, and no installed package declares "
            f"one (entry-point group {GROUP!r})"
        )
    if len(entries) > 1:
        raise DistBackendError(
            f"backend {name!r} is declared by several packages: "
            f"{', '.join(map(_describe, entries))}; uninstall all but one"
        )
    where = f"backend {name!r} of {_describe(entries[0])}"
    try:
        entries[0].load()()
    except Exception as error:
        raise DistBackendError(
            f"{where} could not be loaded: {type(error).__name__}: {error}"
        ) from error
    if name not in registry:
        raise DistBackendError(
            f"{where} was loaded and registered no backend called {name!r}; its "
            f"function has to call Backend.register_backend({name!r}, ...)"
        )


def _describe(entry: EntryPoint) -> str:
    package = f"package {entry.dist.name} {entry.dist.version}" if entry.dist else "?"
    return f"{package} (entry point {entry.name} = {entry.value!r})"
