"""ConnectionLoss: a connection that a backend lost, and the search for the cause.

A rank that dies closes its connections, and so does a backend that is aborted. A
backend whose library notices closed connections reports them before the store, or
the launcher, has reported the death, or the reason of the abort. The failure of an
op is therefore final only after `VERDICT_WAIT`: until then its Work is in flight.
"""

from __future__ import annotations

import time

from ..errors import ConnectionLostError
from .abort_reason import AbortReason
from .spec import GroupSpec

__all__ = ["VERDICT_WAIT", "ConnectionLoss"]

#: Seconds that a lost connection waits for its cause: the report of a death, or an
#: abort. A store reports a death after half a second, a launcher earlier.
VERDICT_WAIT = 2.0
# Seconds that it waits where an op is overdue: a peer whose op was overdue at the same
# time has published its reason before it closed the connection.
_OVERDUE_WAIT = 0.5


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
