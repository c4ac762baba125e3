"""Which tests start processes: found by what their code reaches, and enforced.

``make check`` runs the tests that start none. A test starts one when its function,
a fixture of it, or a function or class that these use (of ``tests``, ``tools``, or a
module of the product that imports `subprocess`) names one of `STARTERS` or `CLASSES`.
What no name shows (``%dist_init`` as text) is marked by hand:
``@pytest.mark.processes``. `Watch` finds what was missed.
"""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

__all__ = ["Watch", "reaches_a_starter", "starts_processes"]

#: Packages whose use means a process.
STARTERS = frozenset({"jupyter_client", "nbclient", "playwright", "subprocess"})
#: Classes of the product, by name, whose use means one.
CLASSES = frozenset({"Cluster", "MPI", "Processes", "SideProcess"})
#: Packages whose code is followed to what it uses.
FOLLOWED = frozenset({"tests", "tools"})

PRODUCT = frozenset({"rankscope"})

#: What Python announces before a process starts (`sys.addaudithook`).
EVENTS = frozenset(
    {
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "pty.spawn",
        "subprocess.Popen",
    }
)


def starts_processes(item: pytest.Function) -> bool:
    """Return whether the code of `item` or of its fixtures reaches a starter."""
    if item.get_closest_marker("processes") is not None:
        return True
    roots: list[object] = [item.function]
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        roots += [definition.func for definition in definitions]
    callspec = getattr(item, "callspec", None)
    if callspec is not None:
        roots += callspec.params.values()
    return reaches_a_starter(*roots)


#: What is known to reach no starter, by id; held, so that no id is used again.
_reaching_none: dict[int, object] = {}
#: What each uses, by id, beside what holds that id.
_used: dict[int, tuple[object, list[object]]] = {}
#: The roots that are known to reach one.
_reaching: dict[int, object] = {}


def reaches_a_starter(*roots: object) -> bool:
    """Return whether the code of `roots`, or what that code uses, names a starter."""
    return any(_root_reaches(root) for root in roots)


def _root_reaches(root: object) -> bool:
    if id(root) in _reaching:
        return True
    seen: dict[int, object] = {}
    found = _reaches(root, seen)
    if found:
        _reaching[id(root)] = root
    else:
        # The whole of what the root uses has been seen.
        _reaching_none.update(seen)
    return found


def _reaches(thing: object, seen: dict[int, object]) -> bool:
    if id(thing) in seen or id(thing) in _reaching_none:
        return False
    seen[id(thing)] = thing
    if _is_starter(thing):
        return True
    if id(thing) not in _used:
        _used[id(thing)] = (thing, [*_uses(thing)])
    return any(_reaches(used, seen) for used in _used[id(thing)][1])


def _is_starter(thing: object) -> bool:
    if isinstance(thing, ModuleType):
        return _within(thing.__name__, STARTERS)
    if isinstance(thing, type) and thing.__name__ in CLASSES:
        return _within(thing.__module__, PRODUCT)
    return _within(_module_of(thing), STARTERS)


def _module_of(thing: object) -> str:
    if not isinstance(thing, type) and not callable(thing):
        return ""
    return getattr(thing, "__module__", None) or ""


def _within(name: str, packages: frozenset[str]) -> bool:
    return any(
        name == package or name.startswith(f"{package}.") for package in packages
    )


def _is_followed(name: str) -> bool:
    if _within(name, PRODUCT):
        return hasattr(sys.modules[name], "subprocess")
    return _within(name, FOLLOWED)


def _uses(thing: object) -> Iterator[object]:
    """Yield the objects that the code of a function or class of ours names."""
    if isinstance(thing, functools.partial):
        yield thing.func
    elif not _is_followed(_module_of(thing)):
        return
    elif isinstance(thing, type):
        yield from thing.__bases__
        for value in vars(thing).values():
            yield getattr(value, "__func__", getattr(value, "fget", value))
    else:
        function = inspect.unwrap(thing)  # type: ignore[arg-type]
        if isinstance(function, FunctionType):
            yield from _named(function.__code__, function.__globals__)


def _named(code: CodeType, variables: dict[str, Any]) -> Iterator[object]:
    imported: ModuleType | None = None
    owner: object = None
    for step in dis.get_instructions(code):
        value: object = None
        if step.opname == "IMPORT_NAME":
            imported = _module(step.argval)
            value = imported
        elif step.opname == "IMPORT_FROM":
            value = getattr(imported, step.argval, None)
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = variables.get(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            # An attribute of a module, or of a class: what was loaded just before.
            value = getattr(owner, step.argval, None) if owner is not None else None
        elif isinstance(step.argval, CodeType):
            yield from _named(step.argval, variables)
        # A module alone means nothing: what is taken from it is the next step.
        if not isinstance(value, ModuleType) or _is_starter(value):
            yield value
        owner = value if isinstance(value, ModuleType) else None


def _module(name: str) -> ModuleType | None:
    if _within(name, FOLLOWED):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not _within(error.name, STARTERS):
                raise
            # Without the package, the test is skipped before it gets there.
            return None
    return sys.modules.get(name)


class Watch:
    """Refuse processes in a block, and keep what was refused."""

    def __init__(self) -> None:
        self._on = False
        self._seen: list[str] = []
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._on and event in EVENTS:
            what = f"{event}: {arguments[0]!r}" if arguments else event
            self._seen.append(what)
            raise PermissionError(f"no process may start here ({what})")

    def __enter__(self) -> None:
        self._on = True

    def __exit__(self, *_: object) -> None:
        self._on = False

    def refused(self) -> list[str]:
        """Return what was refused since the last call."""
        refused, self._seen = self._seen, []
        return refused
