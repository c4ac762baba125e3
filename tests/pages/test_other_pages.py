"""Every block of the pages that have no file of tests of their own is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.page_programs import PROGRAMS
from tests.pages.blocks import all_pages, blocks_of
from tests.pages.reader import read

pytestmark = pytest.mark.processes

#: Blocks that other tests run, page by page.
ELSEWHERE = {
    # tests/test_site.py and tests/with_torch/test_page_programs.py
    "docs/coming_from_torch.md": {code for _, *both in PROGRAMS for code in both},
    # tests/test_site.py
    "docs/reference/writing_a_backend.md": {
        block.code
        for block in blocks_of("docs/reference/writing_a_backend.md")
        if block.kind == "program"
    },
}

#: Pages with a file of tests of their own, which another worker may run meanwhile.
_READ = ("README.md", "docs/getting_started.md", "docs/howto/")


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "page", [page for page in all_pages() if not page.startswith(_READ)]
)
def test_the_page_holds(page: str, tmp_path: Path) -> None:
    read(page, tmp_path, ELSEWHERE.get(page, ()))
