"""What the user has set of the tcp backend, in environment variables."""

from __future__ import annotations

import os

from ..errors import DistBackendError

__all__ = ["ENCRYPT", "TRANSPORTS", "chosen_transports", "wants_encryption"]

#: What may be used between ranks of one host, a list of ``unix`` and ``cma``: TCP is
#: used between hosts, and where the list does not name ``unix``.
TRANSPORTS = "RANKSCOPE_TCP_TRANSPORTS"
#: 1: encrypt the connections between hosts.
ENCRYPT = "RANKSCOPE_TCP_ENCRYPT"

_KNOWN = ("unix", "cma", "tcp")


def chosen_transports() -> frozenset[str]:
    """Return the transports that may be used; `DistBackendError` for a wrong name."""
    text = os.environ.get(TRANSPORTS, "")
    names = frozenset(filter(None, text.replace(" ", "").split(",")))
    unknown = sorted(names.difference(_KNOWN))
    if unknown:
        raise DistBackendError(
            f"{TRANSPORTS} is {text!r}: {', '.join(unknown)} is no transport of the "
            f"tcp backend; expected a list of {', '.join(_KNOWN)}"
        )
    return names or frozenset(_KNOWN)


def wants_encryption() -> bool:
    """Return whether this rank asks for encryption; `DistBackendError` if unclear."""
    text = os.environ.get(ENCRYPT, "0")
    if text not in ("0", "1", ""):
        raise DistBackendError(f"{ENCRYPT} is {text!r}; expected 0 or 1")
    return text == "1"
