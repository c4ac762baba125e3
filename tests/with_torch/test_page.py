"""The blocks of the page on torch, which need PyTorch, are run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages.blocks import NEEDS_TORCH, blocks_of
from tests.pages.reader import read

PAGE = "docs/torch.md"


@pytest.mark.timeout(240)
def test_the_page_holds(tmp_path: Path) -> None:
    assert any(block.note == NEEDS_TORCH for block in blocks_of(PAGE))
    read(PAGE, tmp_path)
