"""A headless browser for the tests that want one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser(_module_leaves_nothing: None) -> Iterator[Browser]:
    """The system's Chromium, for the tests of a module."""
    pytest.importorskip("playwright", reason="needs playwright: pip install .[dev]")
    if shutil.which("chromium") is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    from tests.widgets.bare_page import chromium

    with chromium() as found:
        yield found
