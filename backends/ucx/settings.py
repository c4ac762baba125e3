"""What the user has set of UCX: its transports and its network interface."""

from __future__ import annotations

import os

import psutil

from ..errors import DistBackendError

__all__ = ["chosen", "network_settings", "own_settings"]

# What chooses UCX's transports, as users set it.
_CHOICES = ("UCX_TLS", "UCX_NET_DEVICES", "UCX_SHM_DEVICES")


def own_settings() -> dict[str, str]:
    """Return those of the variables that choose UCX's transports that are set."""
    return {name: os.environ[name] for name in _CHOICES if name in os.environ}


def network_settings() -> dict[str, str]:
    """Return UCX's settings for the network interface that the user has chosen.

    That is GLOO_SOCKET_IFNAME, the variable of gloo, unless UCX's own variable
    is set. Raises `DistBackendError` where there is no such interface.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if not chosen or "UCX_NET_DEVICES" in os.environ:
        return {}
    interfaces = psutil.net_if_addrs()
    if chosen not in interfaces:
        raise DistBackendError(
            f"GLOO_SOCKET_IFNAME names {chosen!r}, which is no network interface here; "
            f"there are {', '.join(sorted(interfaces))}"
        )
    return {"NET_DEVICES": chosen}


def chosen() -> str:
    """Return what is set, as the end of an error's sentence; empty if nothing is."""
    found = own_settings()
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interface:
        found["GLOO_SOCKET_IFNAME"] = interface
    listed = ", ".join(f"{name}={value}" for name, value in found.items())
    return f" (set: {listed})" if found else ""
