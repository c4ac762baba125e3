"""Rank sets as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from rankscope.backends.rank_sets import (
    describe_members,
    format_ranks,
    group_by,
    name_ranks,
    tell_ranks,
)


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


@pytest.mark.parametrize(
    ("ranks", "name"),
    [(range(64), "ranks 0-63"), ([0, 2, 3], "ranks 0,2-3"), ([2, 0], "ranks 2,0")],
)
def test_a_group_without_a_name_has_that_of_its_ranks(
    ranks: Sequence[int], name: str
) -> None:
    assert describe_members(ranks) == name


@pytest.mark.parametrize(
    ("ranks", "fact", "told"),
    [
        ([2], "is dead", "rank 2 is dead"),
        ({0, 1, 2, 3}, "is dead", "ranks 0–3 are dead"),
        ([1, 3], "has left the program", "ranks 1, 3 have left the program"),
        ([1, 3], "left cell 7", "ranks 1, 3 left cell 7"),
        ([0, 1], "was", "ranks 0–1 were"),
    ],
)
def test_a_fact_about_one_rank_is_told_of_several(
    ranks: Iterable[int], fact: str, told: str
) -> None:
    assert tell_ranks(iter(ranks), fact) == told


def test_ranks_are_grouped_in_the_order_in_which_their_facts_come() -> None:
    assert [*group_by([3, 0, 1, 2], lambda rank: rank % 2).items()] == [
        (1, [3, 1]),
        (0, [0, 2]),
    ]
