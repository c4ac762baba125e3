"""The kinds of UCX's transports, as ``UCX_TLS`` names them."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["kinds"]

# Kind → the transports it stands for. Of what is not here the part before the first
# underscore is the kind: rc_verbs and rc_mlx5 are "rc".
_MEMBERS = {"shm": ("sysv", "posix", "xpmem"), "cma": ("cma",), "knem": ("knem",)}
_KINDS = {member: kind for kind, members in _MEMBERS.items() for member in members}
_PLACES = {kind: place for place, kind in enumerate(_MEMBERS)}


def kinds(names: Iterable[str]) -> tuple[str, ...]:
    """Return the kinds of transports ``("cma", "sysv", "tcp on eth0")``, sorted.

    Those within a host are first: ``("shm", "cma", "tcp")``.
    """
    found = set()
    for name in names:
        transport, _, _ = name.partition(" on ")
        found.add(_KINDS.get(transport, transport.partition("_")[0]))
    return tuple(
        sorted(found, key=lambda kind: (_PLACES.get(kind, len(_PLACES)), kind))
    )
