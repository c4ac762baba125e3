"""The states of an `NCCLStream`, and the one function that says which follows which."""

from __future__ import annotations

import enum

__all__ = ["StreamEvent", "StreamState", "transition"]


class StreamState(enum.Enum):
    """What becomes of the ops that are submitted to a stream."""

    #: Ops are accepted and launched.
    OPEN = "open"
    #: Ops are accepted and held back: another communicator is split from this
    #: stream's one.
    RESERVED = "reserved"
    #: The device memory of the communicator was freed, until a RESUME: no op is
    #: accepted, and none is in flight.
    SUSPENDED = "suspended"
    #: As RESERVED, but ncclCommShrink aborts the ops in flight: none is accepted.
    SHRINKING = "shrinking"
    #: NCCL, CUDA or the creation of the communicator failed. Ops are accepted, not
    #: launched, and end with the abort of the group, which is under way.
    BROKEN = "broken"
    #: Aborted or closed: no op is accepted, none that is in flight will succeed.
    CLOSED = "closed"
    #: The CUDA stream and its events were freed.
    FREED = "freed"

    #: Whether ops are accepted.
    accepts: bool
    #: Whether the ops in flight can still succeed.
    healthy: bool

    def __new__(cls, value: str) -> StreamState:
        member = object.__new__(cls)
        member._value_ = value
        member.accepts = value in ("open", "reserved", "broken")
        member.healthy = value in ("open", "reserved", "suspended")
        return member


class StreamEvent(enum.Enum):
    """What happens to a stream."""

    RESERVE = "reserve"
    #: RESERVE for ncclCommShrink with NCCL_SHRINK_ABORT.
    SHRINK = "shrink"
    RELEASE = "release"
    SUSPEND = "suspend"
    RESUME = "resume"
    FAIL = "fail"
    CLOSE = "close"
    FREE = "free"


_S, _E = StreamState, StreamEvent

_NEXT = {
    (_S.OPEN, _E.RESERVE): _S.RESERVED,
    (_S.OPEN, _E.SHRINK): _S.SHRINKING,
    (_S.RESERVED, _E.RELEASE): _S.OPEN,
    (_S.SHRINKING, _E.RELEASE): _S.CLOSED,
    (_S.OPEN, _E.SUSPEND): _S.SUSPENDED,
    (_S.SUSPENDED, _E.RESUME): _S.OPEN,
    (_S.OPEN, _E.FAIL): _S.BROKEN,
    (_S.RESERVED, _E.FAIL): _S.BROKEN,
    (_S.SUSPENDED, _E.FAIL): _S.BROKEN,
    (_S.OPEN, _E.CLOSE): _S.CLOSED,
    (_S.SUSPENDED, _E.CLOSE): _S.CLOSED,
    (_S.RESERVED, _E.CLOSE): _S.CLOSED,
    (_S.SHRINKING, _E.CLOSE): _S.CLOSED,
    (_S.BROKEN, _E.CLOSE): _S.CLOSED,
    (_S.CLOSED, _E.FREE): _S.FREED,
}


def transition(state: StreamState, event: StreamEvent) -> StreamState:
    """Return the state that follows `state` when `event` happens.

    An event that does not fit leaves the state as it is: a stream that is not OPEN
    cannot be reserved, and a failure after the end is a consequence of the end.
    Raises `ValueError` for a FREE of a stream that was not closed, which would free
    events that the device may still reach.
    """
    if event is _E.FREE and state not in (_S.CLOSED, _S.FREED):
        raise ValueError(f"a stream that is {state.value} cannot be freed: close it")
    return _NEXT.get((state, event), state)
