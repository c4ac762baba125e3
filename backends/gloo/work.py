"""The Work of the gloo backend: its waiter reads the side process's reports."""

from __future__ import annotations

import time
from typing import Any, Protocol

from ..work.op_type import OpType
from ..work.work import Work

__all__ = ["GlooWork", "Waiter"]


class Waiter(Protocol):
    """Reads the reports that end Works; see `ReportReader`."""

    def drive(self, work: GlooWork, timeout: float | None) -> None:
        """Read reports until that of `work` has come.

        Returns earlier if `timeout` seconds passed, if another thread reads, or
        if no report will come any more.
        """

    def detach(self, work: GlooWork) -> None:
        """Read the report of `work` on a thread of this process."""


class GlooWork(Work):
    """A Work whose waiter reads the side process's reports itself."""

    __slots__ = ("detached", "pending", "waiter")

    def __init__(self, op_type: OpType, result: Any, waiter: Waiter) -> None:
        super().__init__(op_type, result)
        self.waiter = waiter
        #: Whether the poller reads its report.
        self.detached = False
        #: Whether its report has not been read yet.
        self.pending = True

    def _block(self, timeout: float | None) -> bool:
        if timeout is None:
            self.waiter.drive(self, None)
            return self._state.is_terminal or super()._block(None)
        deadline = time.monotonic() + timeout
        self.waiter.drive(self, timeout)
        return super()._block(max(0.0, deadline - time.monotonic()))

    def detach(self) -> None:
        self.waiter.detach(self)
