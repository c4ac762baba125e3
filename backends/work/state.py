"""The states of a Work, its record, and what its group makes of its failures."""

from __future__ import annotations

import enum
from typing import Any, Protocol

from .enums import direct_members

__all__ = ["COMPLETED", "SCHEDULED", "STARTED", "Failures", "OpRecord", "WorkState"]


@direct_members
class WorkState(enum.Enum):
    """Where a Work is; the last four are terminal and never change.

    ``state.is_terminal`` distinguishes the two kinds.

    Attributes
    ----------
    SCHEDULED
        Issued, and not yet started: it waits for earlier ops, or for a connection.
    STARTED
        It executes, or waits for other ranks.
    COMPLETED
        It succeeded.
    FAILED
        The backend, its library or another rank failed.
    TIMED_OUT
        Its timeout passed.
    ABORTED
        The group was aborted.

    Examples
    --------
    >>> work = dist.all_reduce(np.ones(2), async_op=True)
    >>> work.wait(), work.state
    (True, <WorkState.COMPLETED: 'completed'>)
    >>> [state.name for state in dist.WorkState]
    ['SCHEDULED', 'STARTED', 'COMPLETED', 'FAILED', 'TIMED_OUT', 'ABORTED']
    """

    SCHEDULED = "scheduled"
    STARTED = "started"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    ABORTED = "aborted"

    #: Whether the Work is over.
    is_terminal: bool

    def __new__(cls, value: str) -> WorkState:
        member = object.__new__(cls)
        member._value_ = value
        member.is_terminal = value not in ("scheduled", "started")
        return member


# For code that each op runs several times: a global costs less than a member's look-up.
SCHEDULED, STARTED, COMPLETED = list(WorkState)[:3]


class Failures:
    """The part that a Work's group takes in its failures.

    A lost connection does not name its cause: such a failure is withheld, and with it
    all that follow, until the group knows the cause and ends the Work. A group that is
    aborted has every failure replaced by its reason, and ends its Works once the
    backends are stopped: one that has failed in the meantime may still have its arrays
    written to, by a message of which the backend has begun to copy the bytes.
    """

    __slots__ = ("cause", "final", "withheld")

    def __init__(self) -> None:
        #: The error and the state with which the Work is to end.
        self.cause: tuple[BaseException, WorkState] | None = None
        #: Whether the backends are stopped, so that `cause` ends the Work.
        self.final = False
        #: The first failure that was withheld.
        self.withheld: BaseException | None = None

    def admit(
        self, error: BaseException | None, event: WorkState, in_group: bool
    ) -> tuple[BaseException | None, WorkState] | None:
        """Return how the Work ends when `event` is reported; ``None``: not yet."""
        if error is None:
            return None if self.withheld is not None else (None, event)
        if self.cause is not None and (self.final or not in_group):
            return self.cause
        if not in_group:
            return error, event
        self.withheld = self.withheld or error
        return None


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
    #: When it was issued, and when a thread began to wait for it while it was in
    #: flight; 0: none has; `UNSEEN`.
    created_ns: int
    waited_ns: int

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
