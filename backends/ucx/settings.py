"""What the user has set of UCX: its transports and its network interface."""

from __future__ import annotations

import os

import psutil

from ..errors import DistBackendError

__all__ = ["chosen", "network_settings", "own_settings"]

# What chooses UCX's transports, as users set it.
_CHOICES = ("UCX_TLS", "UCX_NET_DEVICES", "UCX_SHM_DEVICES")

# Linux's name of the interface that only processes of the same host reach.
_LOOPBACK = "lo"


def own_settings() -> dict[str, str]:
    """Return those of the variables that choose UCX's transports that are set."""
    return {name: os.environ[name] for name in _CHOICES if name in os.environ}


def network_settings(*, one_host: bool = False) -> dict[str, str]:
    """Return UCX's settings for the network interface, without ``UCX_``.

    The interface is that of GLOO_SOCKET_IFNAME, the variable of gloo, unless UCX's own
    variable is set. Where nothing is set, ranks that all share `one_host` use loopback:
    UCX would listen on each interface, and takes whoever connects. Raises
    `DistBackendError` where there is no such interface.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if "UCX_NET_DEVICES" in os.environ:
        return {}
    interfaces = psutil.net_if_addrs()
    if not chosen:
        # Whoever chooses the transports may mean those of a network card.
        free = one_host and "UCX_TLS" not in os.environ and _LOOPBACK in interfaces
        return {"NET_DEVICES": _LOOPBACK} if free else {}
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
