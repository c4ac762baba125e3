"""Every block of the README is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages.reader import read

pytestmark = pytest.mark.processes


@pytest.mark.timeout(240)
def test_the_readme_holds(tmp_path: Path) -> None:
    read("README.md", tmp_path)
