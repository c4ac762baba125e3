"""The programs of the page *Coming from torch* do the same in both libraries."""

from __future__ import annotations

import pytest

from rankscope.backends.conformance.ranks import run_ranks
from tests.page_programs import PROGRAMS, left_in_x


@pytest.mark.parametrize(("expected", "torch", "ours"), PROGRAMS)
def test_both_programs_do_the_same(
    expected: list[list[float]], torch: str, ours: str
) -> None:
    assert run_ranks(2, left_in_x, torch) == expected
    assert run_ranks(2, left_in_x, ours) == expected
