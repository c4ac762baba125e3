"""Why a group ends: reasons, causes found by a diagnosis, and lost connections.

A rank that dies closes its connections, and so does a backend that is aborted. A
backend whose library notices closed connections reports them before the store, or
the launcher, has reported the death, or the reason of the abort. The failure of an
op is therefore final only after `VERDICT_WAIT`: until then its Work is in flight.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from ..errors import ConnectionLostError
from .spec import GroupSpec

__all__ = [
    "REBUILD_HINT",
    "VERDICT_WAIT",
    "AbortReason",
    "ConnectionLoss",
    "FoundCause",
]

#: Seconds that a lost connection waits for its cause: the report of a death, or an
#: abort. A store reports a death after half a second, a launcher earlier.
VERDICT_WAIT = 2.0
# Seconds that it waits if an op is overdue: a peer whose op was overdue at the same
# time has published its reason before it closed the connection.
_OVERDUE_WAIT = 0.5

REBUILD_HINT = "make it usable again with rebuild_process_group() or %dist_rebuild"


@dataclass(frozen=True)
class AbortReason:
    """Why a generation of a group ended; the first reason on any rank holds.

    `by` names who ended it, `at` is the time (``time.time()``), `culprits` are the
    global ranks that are the cause, as far as they are known. `diagnosis` is the part
    of `text` that explains why an op timed out, for ranks on which it did so too.
    `remedy` is what can be done, as the end of an error's message.
    """

    text: str
    by: str
    at: float = field(default_factory=time.time)
    culprits: Sequence[int] = ()
    diagnosis: str = ""
    remedy: str = REBUILD_HINT

    def __str__(self) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(self.at))
        return f"{self.text} (at {when}, by {self.by})"

    def to_json(self) -> str:
        """Return the reason as the other ranks read it from the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> AbortReason:
        """Return the reason that `to_json` wrote; without a time, it is now."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class FoundCause:
    """Why ops of a group hang, as a diagnosis over all ranks found it.

    `at` is when this rank learned it (``time.monotonic()``), `culprits` are the global
    ranks at fault.
    """

    text: str
    culprits: Sequence[int] = ()
    at: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        told = time.time() - (time.monotonic() - self.at)
        when = time.strftime("%H:%M:%S", time.localtime(told))
        return f"diagnosis at {when}: {self.text}"


class ConnectionLoss:
    """The lost connection of one generation whose cause is not known yet.

    `reason` is why the group is aborted if no cause is found until `deadline`
    (``time.monotonic()``); the ranks agree on the loss that was reported first.
    """

    def __init__(self, error: ConnectionLostError, spec: GroupSpec) -> None:
        self.reason = _reason(error, spec)
        self.deadline = time.monotonic() + VERDICT_WAIT

    @property
    def left(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.deadline - time.monotonic()

    def wait(self, overdue: bool) -> float:
        """Return for how many seconds the cause may still come; negative: no more.

        `overdue` is whether an op has passed its deadline.
        """
        return self.left - (VERDICT_WAIT - _OVERDUE_WAIT if overdue else 0.0)

    def agree(self, first: AbortReason) -> None:
        """Take over the loss that a rank of the group reported first."""
        self.reason = first


def _reason(error: ConnectionLostError, spec: GroupSpec) -> AbortReason:
    culprits = spec.global_ranks(error.culprits)
    me = f"rank {spec.global_rank}"
    if error.reason is not None:
        return AbortReason(error.reason, me, culprits=culprits)
    peer = "a peer"
    if error.peer is not None:
        (rank,) = spec.global_ranks([error.peer])
        peer = f"rank {rank}"
        culprits = culprits or (rank,)
    detail = f": {error}" if str(error) else ""
    return AbortReason(
        f"{me} lost the connection to {peer}{detail}", me, culprits=culprits
    )
