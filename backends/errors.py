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

    The message says all of it to a person; the attributes, which have the names of the
    parameters, are for code. They survive pickling.

    Parameters
    ----------
    message : str, optional
        What happened, for a person.
    rank : int, optional
        Global rank of the process that raised the error.
    group, op : str, optional
        Names of the group and of the op, such as ``"all_reduce"``.
    sequence_number : int, optional
        ``collective_seq_id`` of the op, ``p2p_seq_id`` of a send or receive.
    culprits : sequence of int, optional
        Global ranks that caused the error, as far as they are known: dead ones, or
        those that did not come to a monitored barrier. The attribute is a tuple.
    reason : str, optional
        What happened, without the op and the group that it happened to: why the group
        was aborted, what a library said.

    Examples
    --------
    >>> error = dist.DistError("rank 2 has died", rank=0, culprits=[2])
    >>> error.rank, error.culprits, error.op
    (0, (2,), None)
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
        """Set those of `attributes` that the error does not have yet.

        Parameters
        ----------
        **attributes : object
            Values by the names of the attributes; an absent one is ``None`` or ``()``.
        """
        for name, value in attributes.items():
            if getattr(self, name) in (None, ()) and value not in (None, ()):
                setattr(self, name, value)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes by name; absent ones are ``None`` or ``()``.

        Returns
        -------
        dict
            Keyword arguments of the class.
        """
        return {name: getattr(self, name) for name in _ATTRIBUTES}

    def prefixed(self: _Error, prefix: str, **attributes: Any) -> _Error:
        """Return the error with `prefix` before its message, and more attributes.

        Parameters
        ----------
        prefix : str
            A text, which a colon parts from the message.
        **attributes : object
            Values for attributes that the error does not have yet.

        Returns
        -------
        DistError
            A new error of the same class.
        """
        made = type(self)(f"{prefix}: {self}")
        made.fill_in(**self.attributes())
        made.fill_in(**attributes)
        return made


class DistBackendError(DistError):
    """A backend failed: a peer or a side process died, a library reported an error.

    Notes
    -----
    Named after ``torch.distributed.DistBackendError``.

    Examples
    --------
    >>> issubclass(dist.DistBackendError, dist.DistError)
    True
    """


class ConnectionLostError(DistBackendError):
    """A backend's report that the connection to a peer was closed, or broke.

    For backends, which report it through `Backend.on_failure`, raise it in an op or
    fail a `Work` with it. The group then waits a moment for the cause, see
    `Backend`; callers get the `DistAbortedError` of the group, with this error as
    its cause.

    Parameters
    ----------
    message : str
        What the library said; may be empty.
    peer : int, optional
        Rank, in the group, of the other end of the connection; ``None`` where the
        backend cannot say which connection it was.
    **attributes : object
        Those of `DistError`. With a `reason`, which is for a failure that may have
        another cause than a connection, the group is aborted with that reason if no
        rank's end turns out to be the cause.

    Examples
    --------
    >>> dist.ConnectionLostError("reset by peer", peer=1).peer
    1
    """

    peer: int | None = None

    def __init__(
        self, message: object = "", *, peer: int | None = None, **attributes: Any
    ) -> None:
        super().__init__(message, **attributes)
        self.peer = peer

    def attributes(self) -> dict[str, Any]:
        """Return what `DistError.attributes` returns, with the peer.

        Returns
        -------
        dict
            Keyword arguments of the class.
        """
        return {**super().attributes(), "peer": self.peer}


class DistTimeoutError(DistBackendError, TimeoutError):
    """A deadline passed before a Work was done.

    Notes
    -----
    It is a `TimeoutError`, too.

    Examples
    --------
    >>> issubclass(dist.DistTimeoutError, TimeoutError)
    True
    """


class DistAbortedError(DistBackendError):
    """The group was aborted; the message says by whom, when and why.

    Examples
    --------
    >>> dist.abort_process_group(reason="to try it")
    >>> try:
    ...     dist.barrier()
    ... except dist.DistAbortedError as error:
    ...     print(error.op, "-", error.reason)
    barrier - to try it
    >>> dist.rebuild_process_group()
    """


class DistNetworkError(DistError):
    """A connection could not be made or was lost, which is final.

    Notes
    -----
    Named after ``torch.distributed.DistNetworkError``.

    Examples
    --------
    >>> issubclass(dist.DistNetworkError, dist.DistError)
    True
    """


class DistNetworkTimeoutError(DistNetworkError, TimeoutError):
    """The other side did not answer in time; the same call may succeed later.

    Notes
    -----
    In c10d, too, a timeout of the network is a `DistNetworkError`.

    Examples
    --------
    >>> issubclass(dist.DistNetworkTimeoutError, dist.DistNetworkError)
    True
    """


class DistStoreError(DistError):
    """A rendezvous store refused or failed.

    Notes
    -----
    Named after ``torch.distributed.DistStoreError``.

    Examples
    --------
    >>> store = dist.HashStore()
    >>> store.close()
    >>> try:
    ...     store.get("key")
    ... except dist.DistStoreError as error:
    ...     print(error)
    the hash store was closed
    """


class DistStoreTimeoutError(DistStoreError, TimeoutError):
    """Keys were still missing in the store when the deadline passed.

    Its `culprits` are the ranks of keys that end in a rank.

    Examples
    --------
    >>> try:
    ...     dist.HashStore().wait(["ready/0", "ready/3"], timeout=0)
    ... except dist.DistStoreTimeoutError as error:
    ...     print(error.culprits)
    (0, 3)
    """


class QueueEmptyError(DistStoreError):
    """`Store.queue_pop` with ``block=False`` found nothing in the queue.

    Notes
    -----
    Named after ``torch.distributed.QueueEmptyError``.

    Examples
    --------
    >>> try:
    ...     dist.HashStore().queue_pop("jobs", block=False)
    ... except dist.QueueEmptyError as error:
    ...     print(error)
    queue_pop: the queue 'jobs' is empty
    """


class LibraryFailure(DistBackendError):
    """A call of NCCL or CUDA failed; the message is the library's."""
