"""OpRecord: what a Work needs of its entry in the flight recorder."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["OpRecord"]


class OpRecord(Protocol):
    """The flight-recorder entry of a Work: a `Record`, or the `Batch` of several."""

    #: The `GroupCounters` that counts the op.
    status: Any
    op_id: int
    collective_seq_id: int
    p2p_seq_id: int
    #: Rank in the group of the root, or of the other side of a send or recv.
    peer: int | None
    #: Seconds from the op's start.
    timeout: float
    #: Whether somebody has waited for the op, or will be called at its end.
    waited: bool

    def started(self, work: Any) -> None:
        """Note that `work` began to execute."""

    def ended(self, work: Any) -> None:
        """Note that `work` is over."""

    def describe(self) -> str:
        """Op, sequence number, group, rank and source line, for messages."""

    def identity(self) -> dict[str, Any]:
        """Rank, group, op and sequence number, as attributes of an error."""

    def brief(self) -> dict[str, Any]:
        """Sequence number, op and source line, for a status table."""

    def traffic(self) -> dict[str, Any]:
        """Bytes, sizes and dtypes of the op's arrays."""
