"""What the user has set of UCX: its transports and its network interface."""

from __future__ import annotations

import os
from collections.abc import Sequence

import psutil

from ..errors import DistBackendError
from ..stores.process_end import host_id

__all__ = ["chosen", "network_settings", "own_loopback", "own_settings"]

# What chooses UCX's transports, as users set it.
_CHOICES = ("UCX_TLS", "UCX_NET_DEVICES", "UCX_SHM_DEVICES")

# Linux's name of the interface that only processes of the same host reach.
_LOOPBACK = "lo"


def own_settings() -> dict[str, str]:
    """Return those of the variables that choose UCX's transports that are set."""
    return {name: os.environ[name] for name in _CHOICES if name in os.environ}


def own_loopback() -> str | None:
    """Return an id of the loopback that this rank may use for the network.

    ``None`` where the user has chosen interfaces, or transports, which may be those of
    a network card. Ranks share a loopback in one network namespace only.
    """
    if any(name in os.environ for name in ("UCX_NET_DEVICES", "UCX_TLS")):
        return None
    free = not _interface() and _LOOPBACK in psutil.net_if_addrs()
    return host_id("net") if free else None


def network_settings(loopbacks: Sequence[str | None] = ()) -> dict[str, str]:
    """Return UCX's settings for the network interface, without ``UCX_``.

    The interface is that of GLOO_SOCKET_IFNAME, the variable of gloo, unless UCX's own
    variable is set. Where all ranks have the same of `loopbacks` (`own_loopback`), it
    is that: UCX would listen on each interface, and takes whoever connects. Raises
    `DistBackendError` where there is no such interface.
    """
    if "UCX_NET_DEVICES" in os.environ:
        return {}
    if len({*loopbacks}) == 1 and loopbacks[0] is not None:
        return {"NET_DEVICES": _LOOPBACK}
    chosen, interfaces = _interface(), psutil.net_if_addrs()
    if not chosen:
        return {}
    if chosen not in interfaces:
        raise DistBackendError(
            f"GLOO_SOCKET_IFNAME names {chosen!r}, which is no network interface here; "
            f"there are {', '.join(sorted(interfaces))}"
        )
    return {"NET_DEVICES": chosen}


def _interface() -> str:
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]


def chosen() -> str:
    """Return what is set, as the end of an error's sentence; empty if nothing is."""
    found = own_settings()
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interface:
        found["GLOO_SOCKET_IFNAME"] = interface
    listed = ", ".join(f"{name}={value}" for name, value in found.items())
    return f" (set: {listed})" if found else ""
