"""The picture of a collective: text for a terminal, colours for a notebook."""

from __future__ import annotations

import re

import numpy as np
import pytest

import rankscope


def test_a_picture_is_text_in_a_terminal() -> None:
    before = [np.array([10, 11]), None]
    after = [np.array([10, -1]), [np.array([2.5]), np.array([3])]]
    assert repr(rankscope.picture(before, after)).splitlines() == [
        "        before       after",
        "rank 0  10 11    →   10  ·",
        "rank 1  nothing  →   2.5 | 03",
    ]


def test_a_number_has_the_colour_of_the_rank_that_had_it() -> None:
    html = rankscope.picture([[10], [20]], [[20], [30]])._repr_html_()
    colours = re.findall(r"background:([^;]*);color[^>]*>(\d+)", html)
    by_number: dict[str, set[str]] = {}
    for colour, number in colours:
        by_number.setdefault(number, set()).add(colour)
    assert all(len(found) == 1 for found in by_number.values())
    assert len({next(iter(found)) for found in by_number.values()}) == 3
    # Nobody had it: it was computed.
    assert next(iter(by_number["30"])).startswith("linear-gradient")


def test_a_picture_has_all_ranks_on_both_sides() -> None:
    with pytest.raises(ValueError, match="before has 2 entries, after has 1"):
        rankscope.picture([[1], [2]], [[1]])
