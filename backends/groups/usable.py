"""Whether a config names a backend that can be used here, asked before any op."""

from __future__ import annotations

from ..interface.base import Backend
from ..interface.registry import builtin_devices, unavailable_reason
from .config import BackendConfig

__all__ = ["default_instead", "why_unusable"]


def why_unusable(backend: str | None) -> str | None:
    """Return why every backend of a config is unusable here; ``None`` if one is not.

    Of a default config, `backend` ``None`` or ``""``, the backend of host arrays is
    meant. A config with a backend that is not for host arrays, or of a package that
    is not imported yet, counts as usable: to ask such a backend may take seconds.
    """
    named = BackendConfig(backend).device_backend_map
    reasons = []
    for name in dict.fromkeys(named.values() if backend else [named["cpu"]]):
        if not _is_for_host_arrays(name):
            return None
        reason = unavailable_reason(name)
        if reason is None:
            return None
        reasons.append(reason.rstrip("."))
    return "; ".join(reasons)


def _is_for_host_arrays(name: str) -> bool:
    registration = Backend.registry.get(name)
    if registration is not None:
        return "cpu" in registration.devices
    return "cpu" in builtin_devices().get(name, ())


def default_instead(backend: str | None, how: str) -> str:
    """Return a sentence that names the default, as `how`, for config `backend`.

    Empty where `backend` is the default.
    """
    default = BackendConfig().device_backend_map["cpu"]
    if not backend or default in BackendConfig(backend).device_backend_map.values():
        return ""
    return f". The default, {default}, needs no further package: {how}"
