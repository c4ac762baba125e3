"""The states of a Work; `work.transition` says which follows which."""

from __future__ import annotations

import enum

from .enums import direct_members

__all__ = ["COMPLETED", "SCHEDULED", "STARTED", "WorkState"]


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
