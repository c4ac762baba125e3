"""NCCL's own account of the communicators, fetched on a thread while ranks hang."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict

from rankscope.backends.errors import DistError
from rankscope.backends.nccl import ras
from rankscope.backends.thread_start import start_thread

from ..wire.requests import GetNcclReport, NcclReport

__all__ = ["NcclReports"]

#: Seconds that NCCL gets for an answer: its RAS threads wait for each other.
TIMEOUT = 4.0
#: Seconds for which a report needs no new query, and for which it is returned while a
#: new query is under way.
FRESH, KEPT = 2.0, 10.0


class NcclReports:
    """Queries NCCL's RAS service of this host, one query at a time.

    `latest` returns at once: the control thread, which calls it, serves aborts, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._report: NcclReport | None = None
        self._at = 0.0

    @GetNcclReport.handler
    def latest(self, wanted: GetNcclReport) -> NcclReport:
        """Return the last report, ``pending`` if a query for a new one is under way."""
        with self._lock:
            report, age = self._report, time.monotonic() - self._at
            if report is not None and age < FRESH:
                return report
            if self._thread is None:
                self._thread = start_thread("nccl-ras", self._query)
        if report is None or age > KEPT:
            report = {"pending": True, "error": "", "communicators": []}
        return {**report, "pending": True}

    def _query(self) -> None:
        report: NcclReport = {"pending": False, "error": "", "communicators": []}
        try:
            found = ras.query(ras.address(), TIMEOUT)
            report["communicators"] = [asdict(one) for one in found]
        except DistError as error:
            report["error"] = str(error)
        with self._lock:
            self._report, self._at = report, time.monotonic()
            self._thread = None
