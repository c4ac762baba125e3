"""Wrappers around functions of another library, and a call when it is imported."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["replace", "when_imported"]

_log = logging.getLogger(__name__)

Callback = Callable[[ModuleType], None]


def when_imported(name: str, callback: Callback) -> Callable[[], None]:
    """Call ``callback(module)`` once the module `name` has been executed.

    It is called at once if the module is there already. An exception of `callback` is
    logged, and does not fail the import. Returns a function that cancels the call.
    """
    finder = _Finder(name, callback)
    module = sys.modules.get(name)
    spec = None if module is None else module.__spec__
    if module is not None and not getattr(spec, "_initializing", False):
        callback(module)
    else:
        sys.meta_path.insert(0, finder)
    return finder.remove


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, once, by the other finders, and wraps its loader."""

    def __init__(self, name: str, callback: Callback) -> None:
        self._name = name
        self._callback = callback

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        self.remove()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._callback)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads as the module's own loader does, and calls the callback then."""

    def __init__(self, loader: importlib.abc.Loader, callback: Callback) -> None:
        self._loader = loader
        self._callback = callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # As if this loader had never been there: torch reads sources by the loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        try:
            self._callback(module)
        except Exception:  # noqa: BLE001 - the import of torch must not fail
            _log.exception("the watch of %s has failed", module.__name__)


def replace(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> Callable[[], None]:
    """Put ``wrapper(function)`` in the place of a function; return the undoing."""
    original = getattr(owner, name, None)
    if original is None:
        return lambda: None
    # As it stands in the class: what pybind11 looks up there is no method any more.
    kept = vars(owner).get(name, original)
    wrapped = functools.wraps(original)(wrapper(original))
    setattr(owner, name, wrapped)

    def undo() -> None:
        # Whoever replaced it later, calls it.
        if getattr(owner, name) is wrapped:
            setattr(owner, name, kept)

    return undo
