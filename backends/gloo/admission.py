"""Which of the issued ops a side process may start: flow control, without I/O."""

from __future__ import annotations

from collections import deque

from .operations import Operation

__all__ = ["Admission"]


class Admission:
    """Starts ops in the order of issue, each as soon as it can run.

    An op waits while one of these holds:

    - the ops before it have taken the shared memory that copies may take
      (`budget`, in bytes); an op larger than that runs alone;
    - what else it needs is taken (`Operation.has_room`);
    - it reads memory that a started collective has yet to write.

    Nothing here takes a lock: the caller holds one around each call.
    """

    def __init__(self, budget: int = 256 << 20) -> None:
        #: Issued ops whose last report has not been read, by number.
        self.in_flight: dict[int, Operation] = {}
        self._budget = budget
        self._started: dict[int, Operation] = {}  # collectives
        self._waiting: deque[Operation] = deque()
        self._staged = 0

    def add(self, operation: Operation) -> bool:
        """Take in an op that has been issued; return whether to start it now."""
        alone = not self.in_flight
        self.in_flight[operation.number] = operation
        if alone or (not self._waiting and self._fits(operation)):
            self._admit(operation)
            return True
        self._waiting.append(operation)
        return False

    def remove(self, operation: Operation) -> bool:
        """Take out a started op that is over; return whether any op waits.

        A second call changes nothing.
        """
        if self.in_flight.pop(operation.number, None) is not None:
            self._staged -= operation.staged
            self._started.pop(operation.number, None)
        return bool(self._waiting)

    def next(self) -> Operation | None:
        """Return the next waiting op that can start now, as started."""
        if not self._waiting or not self._fits(self._waiting[0]):
            return None
        operation = self._waiting.popleft()
        self._admit(operation)
        return operation

    def _admit(self, operation: Operation) -> None:
        if operation.sequence:
            self._started[operation.number] = operation
        self._staged += operation.staged

    def _fits(self, operation: Operation) -> bool:
        if self._staged and self._staged + operation.staged > self._budget:
            return False
        if not operation.has_room():
            return False
        # A copy of the values: a signal handler may issue an op here.
        return not operation.inputs or not any(
            operation.reads(each.written()) for each in list(self._started.values())
        )
