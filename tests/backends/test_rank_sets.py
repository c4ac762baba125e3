"""Rank sets as text."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from rankscope.backends.rank_sets import format_ranks, name_ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "no rank"),
        ([2], "rank 2"),
        ([0, 1], "ranks 0–1"),
        ([3, 0, 1], "ranks 0–1, 3"),
        ([1, 1], "rank 1"),
        (range(4), "ranks 0–3"),
        ([0, 2, 3], "ranks 0, 2–3"),
        ([0, 1, 2, 5, 7, 8, 9], "ranks 0–2, 5, 7–9"),
        ({1: "", 0: ""}, "ranks 0–1"),
    ],
)
def test_ranks_are_named_in_prose(ranks: Iterable[int], text: str) -> None:
    assert name_ranks(ranks) == text


def test_ranks_are_written_as_they_are_typed() -> None:
    assert format_ranks([3, 0, 2, 5]) == "0,2-3,5"
    assert format_ranks([]) == ""
