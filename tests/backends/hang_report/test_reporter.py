"""What a rank reports while somebody looks at its job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rankscope.backends.errors import DistAbortedError
from rankscope.backends.hang_report.place import Place
from rankscope.backends.hang_report.reporter import Reporter
from rankscope.backends.hang_report.reports import Wish
from rankscope.backends.hang_report.settings import Settings


@pytest.mark.parametrize("attended", [True, False])
@pytest.mark.parametrize(
    ("wish", "told"),
    [
        (Wish("stall"), True),
        (Wish("overdue"), True),
        (Wish("error", DistAbortedError("by who looks")), True),
        # They end what there is to look at.
        (Wish("error", RuntimeError("Connection closed by peer")), False),
        (Wish("exception", ValueError()), False),
        (Wish("crash"), False),
    ],
)
def test_who_looks_needs_no_report_of_what_is_to_be_seen(
    tmp_path: Path, wish: Wish, told: bool, attended: bool
) -> None:
    reporter = Reporter(Settings(tmp_path), Place(), lambda: attended)
    try:
        assert reporter._is_told(wish) is (told and attended)
    finally:
        os.close(reporter._read)
        os.close(reporter._write)
