"""Which backends of a config cannot be used on this rank, and why."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from rankscope.backends import Backend, BackendConfig, unavailable_reason
from rankscope.backends.devices.cuda_install import has_driver
from rankscope.backends.errors import DistBackendError
from rankscope.backends.interface.registry import builtin_devices, resolve
from rankscope.backends.interface.staging import staging_for
from rankscope.backends.thread_start import start_thread

from ..wire.requests import Refusal

__all__ = ["refused", "why_refused"]

#: Seconds that the check may take: loading an installed library takes long, and is not
#: lost, as the first op needs it.
CHECK_TIMEOUT = 2.0


def refused(backend: str | None) -> list[Refusal]:
    """Return the backends named in a config that cannot be used here.

    Nothing for ``None``, the default config, which names no backend. A backend
    whose check is not finished after `CHECK_TIMEOUT` seconds counts as usable: a
    missing library is found at once, and other faults are raised at the first use.
    """
    found: list[Refusal] = []
    if backend is not None:
        named = BackendConfig(backend).device_backend_map
        # Not on this thread, which must answer other requests.
        check = start_thread("availability", lambda: found.extend(_check(named)))
        check.join(CHECK_TIMEOUT)
    return list(found)


def _check(named: Mapping[str, str]) -> list[Refusal]:
    found = []
    for device, name in named.items():
        if name not in builtin_devices() and name not in Backend.registry:
            # No package is imported before its backend is used.
            continue
        if device == "cuda" and find_spec("cupy") is not None and not has_driver():
            # cupy would find the same, after an import that takes a second.
            found.append((device, name, "this host has no driver of a GPU"))
        elif (reason := why_refused(device, name)) is not None:
            found.append((device, name, reason))
    return found


def why_refused(device: str, name: str) -> str | None:
    """Return why backend `name` cannot take arrays of `device` here, or ``None``."""
    try:
        reason = unavailable_reason(name)
        if reason is None and device not in resolve(name).devices:
            staging_for(device, name)
    except DistBackendError as error:
        return str(error)
    return reason
