"""Every block of *Getting started* is run, and prints what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages.reader import read

pytestmark = pytest.mark.processes


@pytest.mark.timeout(240)
def test_getting_started_holds(tmp_path: Path) -> None:
    read("docs/getting_started.md", tmp_path)
