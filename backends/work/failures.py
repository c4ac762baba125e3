"""Failures: what becomes of the failures that are reported of one Work."""

from __future__ import annotations

from ..errors import ConnectionLostError
from .state import WorkState

__all__ = ["Failures"]


class Failures:
    """The part that a Work's group takes in its failures.

    A lost connection does not name its cause: such a failure is withheld, and with it
    all that follow, until the group knows the cause and ends the Work. A group that is
    aborted has every failure replaced by its reason.
    """

    __slots__ = ("cause", "holds", "withheld")

    def __init__(self) -> None:
        #: The error and the state of every failure from now on.
        self.cause: tuple[BaseException, WorkState] | None = None
        #: Whether every failure is withheld, not that of a connection alone.
        self.holds = False
        #: The first failure that was withheld.
        self.withheld: BaseException | None = None

    def admit(
        self, error: BaseException | None, event: WorkState, in_group: bool
    ) -> tuple[BaseException | None, WorkState] | None:
        """Return how the Work ends when `event` is reported; ``None``: not yet.

        Only a Work that is `in_group`, one with a record, has somebody to end it later.
        """
        if error is None:
            return None if self.withheld is not None else (None, event)
        if self.cause is not None:
            return self.cause
        if in_group and (self.holds or isinstance(error, ConnectionLostError)):
            self.withheld = self.withheld or error
            return None
        return error, event
