"""Backends that need ranks of a launcher of their own, such as those of MPI."""

from __future__ import annotations

from rankscope.backends import BackendConfig
from rankscope.backends.errors import DistBackendError
from rankscope.backends.interface.registry import resolve

__all__ = ["launchers_of", "needs_launcher"]


def launchers_of(config: BackendConfig) -> list[str]:
    found = []
    for name in config.device_backend_map.values():
        try:
            launcher = resolve(name).launcher
        except DistBackendError:
            # The package of the backend may be installed on the ranks only.
            continue
        if launcher is not None:
            found.append(launcher)
    return found


def needs_launcher(backend: str) -> bool:
    """Return whether the config `backend`, as a rank reports it, needs a launcher."""
    try:
        return bool(launchers_of(BackendConfig(backend)))
    except ValueError:
        # A backend that is registered on the ranks only.
        return False
