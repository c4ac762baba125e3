"""Which backends of a group cannot be used on this rank, and why."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from importlib.util import find_spec

from rankscope.backends import Backend, BackendConfig, unavailable_reason
from rankscope.backends.backend import builtin_devices, resolve
from rankscope.backends.errors import DistBackendError
from rankscope.backends.staging import staging_for

from .gpus import has_driver

__all__ = ["refused", "why_refused"]

#: A device type, its backend, and why its arrays are refused.
Refusal = tuple[str, str, str]

#: Seconds that looking may take: a library that is there takes long to load.
PATIENCE = 0.2


def refused(backend: str | None) -> list[Refusal]:
    """What cannot be used of the backends that a config names.

    Nothing of the defaults, ``None``, which nobody named, and nothing that is
    not known soon: what is missing is, and its first use tells the rest.
    """
    found: list[Refusal] = []
    if backend is not None:
        named = BackendConfig(backend).device_backend_map
        # Not on this thread, which has other requests to answer.
        look = threading.Thread(
            target=lambda: found.extend(_look(named)),
            name="rankscope-availability",
            daemon=True,
        )
        look.start()
        look.join(PATIENCE)
    return list(found)


def _look(named: Mapping[str, str]) -> list[Refusal]:
    found = []
    for device, name in named.items():
        if name not in builtin_devices() and name not in Backend.registry:
            # No package is imported before its backend is used.
            continue
        if device == "cuda" and find_spec("cupy") is not None and not has_driver():
            # cupy would find out, after a second in which it is imported.
            found.append((device, name, "this host has no driver of a GPU"))
        elif (reason := why_refused(device, name)) is not None:
            found.append((device, name, reason))
    return found


def why_refused(device: str, name: str) -> str | None:
    """Why backend `name` cannot take arrays of `device` here; ``None`` if it can.

    A sentence with the remedy, for a backend that is staged as well.
    """
    try:
        reason = unavailable_reason(name)
        if reason is None and device not in resolve(name).devices:
            staging_for(device, name)
    except DistBackendError as error:
        return str(error)
    return reason
