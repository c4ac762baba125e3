"""The registry of backends: built in, registered, or declared by a package."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..did_you_mean import did_you_mean
from ..errors import DistBackendError, DistError
from ..rank_sets import group_by
from ..stores.base import Store
from .base import INTERFACE_VERSION, Backend
from .registration import DistributedBackendOptions, Registration

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "GROUP",
    "build",
    "builtin_devices",
    "declared",
    "known_backends",
    "note_registered_elsewhere",
    "outdated",
    "registered_by_cells",
    "registering_modules",
    "registrations_at_init",
    "resolve",
    "unavailable_reason",
]

#: The entry-point group that third-party backends are declared in.
GROUP = "rankscope.backends"

#: The device types of the backends that come with Rankscope, whose modules are
#: ``rankscope.backends.NAME.backend``; for one device type, the default first.
_BUILTIN: dict[str, tuple[str, ...]] = {
    "tcp": ("cpu",),
    "gloo": ("cpu",),
    "mpi": ("cpu",),
    "ucx": ("cpu",),
    "nccl": ("cuda",),
}
#: Those with an `on_init` or a `rendezvous`: imported where these are called.
_ACT_AT_INIT = ("mpi",)

#: The module of a cell's code.
_CELLS = "__main__"

#: Of backends that other ranks of a group have registered: the module of the creator.
_registered_elsewhere: dict[str, str] = {}


def builtin_devices() -> dict[str, tuple[str, ...]]:
    """Return the device types of each backend that comes with Rankscope, by name."""
    return dict(_BUILTIN)


def registrations_at_init() -> list[Registration]:
    """Return the registrations whose `on_init` and `rendezvous` are to be called."""
    for name in _ACT_AT_INIT:
        resolve(name)
    return list(Backend.registry.values())


def known_backends() -> list[str]:
    """Return the names a config may use: those that `resolve` knows or registers."""
    found = {*_BUILTIN, *Backend.registry, *declared()}
    found |= {
        name for name, module in _registered_elsewhere.items() if module != _CELLS
    }
    return sorted(found)


def resolve(name: str) -> Registration:
    """Return the registration of `name`; import the module that registers it first."""
    if name not in Backend.registry:
        if name in _BUILTIN:
            importlib.import_module(f"rankscope.backends.{name}.backend")
        elif name in _registered_elsewhere and name not in declared():
            _register_as_elsewhere(name, _registered_elsewhere[name])
        else:
            _load_declared(name)
    return Backend.registry[name]


def declared() -> dict[str, list[EntryPoint]]:
    """Return the entry points of `GROUP` by backend name, without importing them.

    They are read at each call (some 10 ms), so that a package that was installed
    meanwhile is found. Built-in and registered names need no call.
    """
    from importlib import metadata  # takes 15 ms

    return group_by(metadata.entry_points(group=GROUP), lambda entry: entry.name)


def _load_declared(name: str) -> None:
    """Call the package that declares backend `name`, which registers it."""
    entries = declared().get(name, [])
    if not entries:
        raise DistBackendError(
            f"no backend {name!r} is registered, and no installed package declares "
            f"one (entry-point group {GROUP!r})"
        )
    if len(entries) > 1:
        raise DistBackendError(
            f"backend {name!r} is declared by several packages: "
            f"{', '.join(map(_package_of, entries))}; uninstall all but one"
        )
    where = f"backend {name!r} of {_package_of(entries[0])}"
    try:
        entries[0].load()()
    except Exception as error:
        raise DistBackendError(
            f"{where} could not be loaded: {type(error).__name__}: {error}"
        ) from error
    if name not in Backend.registry:
        raise DistBackendError(
            f"{where} was loaded and registered no backend called {name!r}; its "
            f"function has to call Backend.register_backend({name!r}, ...)"
        )


def _package_of(entry: EntryPoint) -> str:
    package = f"package {entry.dist.name} {entry.dist.version}" if entry.dist else "?"
    return f"{package} (entry point {entry.name} = {entry.value!r})"


def registering_modules(names: Iterable[str]) -> dict[str, str]:
    """Return the modules whose import registers backends, for other ranks."""
    return {
        name: module
        for name in names
        if name in Backend.registry and name not in _BUILTIN
        if (module := getattr(Backend.registry[name].creator, "__module__", None))
    }


def note_registered_elsewhere(modules: Mapping[str, str]) -> None:
    """Note the `registering_modules` of another rank, for `resolve`."""
    _registered_elsewhere.update(modules)


def registered_by_cells(modules: Mapping[str, str]) -> list[str]:
    """Return the backends of `modules` that no import registers, but a cell."""
    return [name for name, module in modules.items() if module == _CELLS]


def _register_as_elsewhere(name: str, module: str) -> None:
    failure = f"no backend {name!r} is registered on this rank"
    if module == _CELLS:
        raise DistBackendError(
            f"{failure}: a cell registered it on the other ranks; run that cell on "
            "this rank, too"
        )
    try:
        importlib.import_module(module)
    except Exception as error:
        raise DistBackendError(
            f"{failure}, and the module that registered it on the other ranks cannot "
            f"be imported here: {type(error).__name__}: {error}"
        ) from error
    if name not in Backend.registry:
        raise DistBackendError(
            f"{failure}: importing {module!r} does not register it; run the code that "
            "registered it on the other ranks on this rank, too"
        )


def build(
    registration: Registration,
    store: Store,
    rank: int,
    size: int,
    timeout: float,
    *,
    group_id: str = "",
    ranks: Sequence[int] = (),
) -> Backend:
    """Make the backend of one group on this rank."""
    creator = registration.creator
    failure = (
        f"backend {registration.name!r} could not be made: its creator "
        f"{getattr(creator, '__qualname__', repr(creator))}"
    )
    arguments: tuple[Any, ...] = (store, rank, size, timeout)
    if registration.extended_api:
        options = DistributedBackendOptions(
            store, rank, size, timedelta(seconds=timeout), group_id, list(ranks)
        )
        arguments = (options, None)
    try:
        backend = creator(*arguments)
    except DistError:
        raise
    except Exception as error:
        raise DistBackendError(
            f"{failure} raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(backend, Backend):
        raise DistBackendError(
            f"{failure} returned a {type(backend).__name__}; expected a "
            "rankscope.Backend"
        )
    # The name that configs and messages use is the one it is registered by.
    backend.name = registration.name
    mismatch = _version_mismatch(backend.name, backend.interface_version)
    if mismatch is not None:
        backend.shutdown()
        raise DistBackendError(mismatch)
    return backend


def _version_mismatch(name: str, stated: object) -> str | None:
    """Return why a backend of the interface version `stated` is refused, if it is."""
    if stated == INTERFACE_VERSION:
        return None
    if not isinstance(stated, int):
        return (
            f"backend {name!r} states {stated!r} as its interface_version; expected a "
            f"number, such as {INTERFACE_VERSION}"
        )
    outdated = (
        "the package that provides the backend"
        if stated < INTERFACE_VERSION
        else "Rankscope"
    )
    return (
        f"backend {name!r} is written for version {stated} of the backend interface, "
        f"and this Rankscope has version {INTERFACE_VERSION}: update {outdated}"
    )


def outdated(registration: Registration) -> str | None:
    """Return why a backend is refused for its version, if its class is known."""
    stated = getattr(registration.creator, "interface_version", None)
    # A property has its value on an instance alone.
    if not isinstance(stated, int):
        return None
    return _version_mismatch(registration.name, stated)


def unavailable_reason(name: str) -> str | None:
    """Return why backend `name` cannot be used here, with the remedy; else ``None``.

    ``torch.distributed`` has no such function.

    Parameters
    ----------
    name : str
        The name of a backend.

    Returns
    -------
    str or None
        A sentence, also for a name that nothing registers.

    Examples
    --------
    >>> dist.unavailable_reason("glo")  # doctest: +ELLIPSIS
    "no backend 'glo' is registered, ...; did you mean gloo?"
    """
    try:
        return resolve(name.lower()).unavailable()
    except DistBackendError as error:
        known = known_backends()
        return str(error) if name in known else f"{error}{did_you_mean(name, known)}"
