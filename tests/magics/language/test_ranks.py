"""Rank sets as a person types them: the syntax of -r and its errors."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.backends.rank_sets import format_ranks
from rankscope.magics.language.values import parse_ranks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", [0]),
        ("0,2-3", [0, 2, 3]),
        (" 3 , 1 ", [1, 3]),
        ("1,1,0-1", [0, 1]),
        ("all", [0, 1, 2, 3]),
        ("2-2", [2]),
    ],
)
def test_ranks_are_read(text: str, expected: list[int]) -> None:
    assert parse_ranks(text, range(4)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("9", "there is no rank 9; the cluster has ranks 0–3"),
        ("0-9", "there is no rank 9"),
        ("0-99999999999", "there is no rank 99999999999"),
        ("3-1", "the run 3-1 is empty; write 1-3"),
        ("x", "'x' is not a rank; write ranks like 0 or 0,2-3, or all"),
        ("-1", "'-1' is not a rank"),
        ("", "an empty part is not a rank"),
        ("0,,1", "an empty part is not a rank"),
        ("1.5", "'1.5' is not a rank"),
        ("²", "'²' is not a rank"),
    ],
)
def test_what_is_not_a_rank_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_ranks(text, range(4))


def test_a_run_over_a_hole_names_the_rank_in_it() -> None:
    message = "there is no rank 1; the group 'tp' has ranks 0, 2"
    with pytest.raises(ValueError, match=message):
        parse_ranks("0-2", [0, 2], of="group 'tp'")


@settings(deadline=None)
@given(st.sets(st.integers(0, 40), min_size=1))
def test_text_and_ranks_are_inverse(ranks: set[int]) -> None:
    assert parse_ranks(format_ranks(ranks), range(41)) == sorted(ranks)
