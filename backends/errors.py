"""The errors of the c10d layer; names follow ``torch.distributed``."""

from __future__ import annotations

__all__ = [
    "DistAbortedError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "DistStoreTimeoutError",
    "DistTimeoutError",
]


class DistError(RuntimeError):
    """Base of every error that a collective, a group or a store raises."""


class DistBackendError(DistError):
    """A backend failed: a peer or a side process died, a library said no."""


class DistTimeoutError(DistBackendError, TimeoutError):
    """A deadline passed before a Work was done."""


class DistAbortedError(DistBackendError):
    """The group was aborted; the message says by whom, when and why."""


class DistNetworkError(DistError):
    """A connection could not be made or was lost."""


class DistStoreError(DistError):
    """A rendezvous store refused or failed."""


class DistStoreTimeoutError(DistStoreError, TimeoutError):
    """Keys were still missing in the store when the deadline passed."""
