"""Every block of the pages in ``docs/howto/`` is run, and prints what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages.blocks import all_pages
from tests.pages.reader import read

pytestmark = pytest.mark.processes


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "page", [page for page in all_pages() if page.startswith("docs/howto/")]
)
def test_the_page_holds(page: str, tmp_path: Path) -> None:
    read(page, tmp_path)
