"""The errors of the c10d layer; names follow ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

__all__ = [
    "ConnectionLostError",
    "DistAbortedError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistNetworkTimeoutError",
    "DistStoreError",
    "DistStoreTimeoutError",
    "DistTimeoutError",
    "LibraryFailure",
    "QueueEmptyError",
]

_Error = TypeVar("_Error", bound="DistError")

_ATTRIBUTES = ("rank", "group", "op", "sequence_number", "culprits", "reason")


class DistError(RuntimeError):
    """Base of every error that a collective, a group or a store raises.

    The message says all of it to a person; the attributes are for code. They
    survive pickling.

    Attributes
    ----------
    rank : int or None
        Global rank of the process that raised the error.
    group : str or None
        Name of the group.
    op : str or None
        Name of the op, such as ``"all_reduce"``.
    sequence_number : int or None
        ``collective_seq_id`` of the op, ``p2p_seq_id`` of a send or receive.
    culprits : tuple of int
        Global ranks that caused the error, as far as they are known: dead ones,
        or those that did not come to a monitored barrier.
    reason : str or None
        What happened, without the op and the group that it happened to: why the
        group was aborted, what a library said.
    """

    rank: int | None = None
    group: str | None = None
    op: str | None = None
    sequence_number: int | None = None
    culprits: tuple[int, ...] = ()
    reason: str | None = None

    def __init__(
        self,
        message: object = "",
        *,
        rank: int | None = None,
        group: str | None = None,
        op: str | None = None,
        sequence_number: int | None = None,
        culprits: Sequence[int] = (),
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.fill_in(
            rank=rank,
            group=group,
            op=op,
            sequence_number=sequence_number,
            culprits=tuple(culprits),
            reason=reason,
        )

    def fill_in(self, **attributes: Any) -> None:
        """Set those of `attributes` that the error does not have yet."""
        for name, value in attributes.items():
            if getattr(self, name) in (None, ()) and value not in (None, ()):
                setattr(self, name, value)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes by name; absent ones are ``None`` or ``()``."""
        return {name: getattr(self, name) for name in _ATTRIBUTES}

    def prefixed(self: _Error, prefix: str, **attributes: Any) -> _Error:
        """Return the error with `prefix` before its message, and more attributes."""
        made = type(self)(f"{prefix}: {self}")
        made.fill_in(**self.attributes())
        made.fill_in(**attributes)
        return made


class DistBackendError(DistError):
    """A backend failed: a peer or a side process died, a library reported an error."""


class ConnectionLostError(DistBackendError):
    """A backend's report that the connection to a peer was closed, or broke.

    For backends, which report it through `Backend.on_failure`, raise it in an op or
    fail a `Work` with it. The group then waits a moment for the cause, see
    `Backend`; callers get the `DistAbortedError` of the group, with this error as
    its cause.

    Parameters
    ----------
    message
        What the library said; may be empty.
    peer
        Rank, in the group, of the other end of the connection; ``None`` where the
        backend cannot say which connection it was.
    attributes
        Those of `DistError`. With a `reason`, which is for a failure that may have
        another cause than a connection, the group is aborted with that reason if no
        rank's end turns out to be the cause.
    """

    peer: int | None = None

    def __init__(
        self, message: object = "", *, peer: int | None = None, **attributes: Any
    ) -> None:
        super().__init__(message, **attributes)
        self.peer = peer

    def attributes(self) -> dict[str, Any]:
        """As `DistError.attributes`, with the peer."""
        return {**super().attributes(), "peer": self.peer}


class DistTimeoutError(DistBackendError, TimeoutError):
    """A deadline passed before a Work was done."""


class DistAbortedError(DistBackendError):
    """The group was aborted; the message says by whom, when and why."""


class DistNetworkError(DistError):
    """A connection could not be made or was lost, which is final."""


class DistNetworkTimeoutError(DistNetworkError, TimeoutError):
    """The other side did not answer in time; the same call may succeed later.

    In c10d, too, a timeout of the network is a `DistNetworkError`.
    """


class DistStoreError(DistError):
    """A rendezvous store refused or failed."""


class DistStoreTimeoutError(DistStoreError, TimeoutError):
    """Keys were still missing in the store when the deadline passed."""


class QueueEmptyError(DistStoreError):
    """`Store.queue_pop` with ``block=False`` found nothing in the queue."""


class LibraryFailure(DistBackendError):
    """A call of NCCL or CUDA failed; the message is the library's."""
