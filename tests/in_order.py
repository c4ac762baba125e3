"""The tests of a file with the marker ``in_order`` build on each other.

``make retest`` runs the tests that failed last. One of such a file alone would fail
again: so the others of its file are run with it.
"""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["InOrder"]


class InOrder:
    """A plugin that records, with a failed test ``in_order``, those of its file."""

    def __init__(self, config: pytest.Config) -> None:
        self._last_failed: Any = config.pluginmanager.get_plugin("lfplugin")
        self._files: dict[str, set[str]] = {}
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the tests of each file, and the files with a failure."""
        if "in_order" in report.keywords:
            file = report.nodeid.partition("::")[0]
            self._files.setdefault(file, set()).add(report.nodeid)
            if report.failed:
                self._failed.add(file)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Record the tests, before pytest saves those that failed."""
        if self._last_failed is not None:
            for file in self._failed:
                self._last_failed.lastfailed.update(
                    dict.fromkeys(self._files[file], True)
                )
