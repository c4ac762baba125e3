"""Which rows the board in a terminal has: the same cases as page/arrange.js."""

from __future__ import annotations

import pytest

from rankscope.widgets.board.arrange import (
    MANY,
    View,
    arrange,
    filter_of,
    folded_cells,
    is_conspicuous,
    value_of,
)
from rankscope.widgets.board.columns import shown_item
from rankscope.widgets.board.rows import Cells

WAITS: Cells = {
    "state": "in flight",
    "mood": "working",
    "op": "all_reduce",
    "seq": "#21",
    "verdict": "waits for ranks 17, 41",
}
ABSENT: Cells = {
    "state": "idle",
    "mood": "calm",
    "op": "all_reduce",
    "seq": "#20",
    "lag": 1,
    "verdict": "not entered",
    "blame": 1,
}
MOVES: Cells = {"state": "in flight", "mood": "working", "op": "all_reduce"}


def rows(
    count: int, row: Cells, others: dict[int, Cells] | None = None
) -> dict[int, Cells]:
    return {rank: (others or {}).get(rank, row) for rank in range(count)}


def shown(given: dict[int, Cells], view: View | None = None) -> list[str]:
    """A text for each row: its rank, or the number of ranks of a fold."""
    return [
        f"{'▾' if one.open else '▸'}{len(one.ranks)}" if one.fold else str(*one.ranks)
        for one in arrange(given, view or View())
    ]


def test_equal_ranks_are_one_row_behind_those_at_fault() -> None:
    there = rows(64, WAITS, {17: ABSENT, 41: {**ABSENT, "line": "cell 3 line 2"}})
    assert shown(there) == ["17", "41", "▸62"]
    assert shown(there, View(fold=False))[:3] == ["0", "1", "2"]


def test_few_ranks_have_a_row_each_in_their_order() -> None:
    assert shown(rows(4, WAITS, {2: ABSENT})) == ["0", "1", "2", "3"]
    assert len(arrange(rows(MANY - 1, WAITS), View())) == MANY - 1


def test_ranks_that_go_on_stay_in_one_row_whatever_they_are_in() -> None:
    moving: Cells = {**MOVES, "cell": "7"}
    other: Cells = {**moving, "state": "in cell 7", "mood": "busy"}
    assert shown(rows(64, moving, {3: {**moving, "seq": "#9"}, 4: other})) == ["▸64"]
    assert shown(rows(64, moving, {9: {**moving, "awaited": 1}})) == ["9", "▸63"]
    behind: Cells = {**moving, "lag": 2}
    assert shown(rows(64, behind, {9: {**behind, "awaited": 1}})) == ["▸63", "9"]
    dead: Cells = {"state": "dead", "mood": "error"}
    there = rows(64, moving, {5: {**moving, "lag": 3}, 6: dead})
    assert shown(there) == ["5", "6", "▸62"]


def test_an_open_fold_is_followed_by_its_ranks() -> None:
    there = rows(MANY, WAITS, {0: ABSENT})
    key = arrange(there, View())[1].key
    assert shown(there, View(opened=frozenset([key])))[:4] == ["0", "▾23", "1", "2"]


def test_only_those_at_fault_are_left_on_request() -> None:
    silent: Cells = {"state": "no answer", "mood": "error"}
    there = rows(64, WAITS, {17: ABSENT, 5: silent})
    assert shown(there, View(culprits=True)) == ["17", "5"]
    calm: Cells = {"state": "idle", "mood": "calm", "lag": 2}
    busy: Cells = {"state": "in cell 1", "mood": "busy"}
    assert [is_conspicuous(one) for one in (WAITS, ABSENT, busy, calm)] == [
        False,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3, 8-10", [3, 8, 10]),
        ("8–12", [8, 10, 12]),
        (" ", [0, 3, 8, 10, 12]),
        ("ALL_red", [0, 3, 8, 10, 12]),
        ("#21", [0, 3, 8, 10, 12]),
        ("working", []),
    ],
)
def test_a_filter_takes_numbers_of_ranks_or_a_part_of_a_cell(
    text: str, expected: list[int]
) -> None:
    fits = filter_of(text)
    assert [rank for rank in (0, 3, 8, 10, 12) if fits(rank, WAITS)] == expected


@pytest.mark.parametrize(
    ("key", "less", "more"),
    [
        ("seq", "#9", "#10"),
        ("size", "512 KiB", "4 MiB"),
        ("last", "999 µs", "2.10 ms"),
        ("busbw", "900 MB/s", "1.20 GB/s"),
        ("waits", "9%", "31%"),
        ("late", "9% · 41.0 ms", "100% · 2.00 ms"),
        ("host", "node-1", "node-2"),
        ("lag", 2, 11),
    ],
)
def test_columns_sort_by_what_they_mean(
    key: str, less: str | int, more: str | int
) -> None:
    there = rows(4, MOVES, {0: {**MOVES, key: more}, 2: {**MOVES, key: less}})
    assert shown(there, View(sort=key)) == ["2", "0", "1", "3"]
    assert shown(there, View(sort=key, descending=True)) == ["0", "2", "1", "3"]


def test_what_lasts_longest_comes_first() -> None:
    assert value_of("elapsed", 0, {"since": 3.0}) == -3.0
    assert value_of("elapsed", 0, {}) is None
    assert value_of("beat", 0, {"silent": 0}) is None
    assert shown(rows(3, MOVES), View(sort="rank", descending=True)) == ["2", "1", "0"]


def test_what_may_have_ended_since_the_status_shows_no_time() -> None:
    there = rows(9, {**MOVES, "since": 5.0, "usual": "20 ms"})
    for view in (View(fold=True), View(fold=False)):
        item = arrange(there, view)[0]
        texts = [
            shown_item(item, there, now, 1.5).texts["elapsed"] for now in (6.0, 7.0)
        ]
        assert texts == ["", "2.0 s / 20 ms"]


def test_a_fold_shows_in_what_its_ranks_are_equal_and_the_extremes_of_others() -> None:
    one: Cells = {**MOVES, "seq": "#9", "since": 5, "host": "a", "memory": "1 GiB"}
    two: Cells = {**one, "state": "in cell 7", "mood": "busy", "since": 3, "host": "b"}
    two["seq"] = "#11"
    assert folded_cells([one, two]) == {
        "mood": "busy",
        "state": "running",
        "op": "all_reduce",
        "seq": "#9–11",
        "since": 3,
        "memory": "1 GiB",
    }
    assert folded_cells([WAITS, WAITS]) == WAITS
    slow: Cells = {**one, "last": "1.20 ms", "memory": "900 MiB"}
    folded = folded_cells([one, slow, {**one, "last": "900 µs"}])
    assert folded["last"] == "900 µs – 1.20 ms"
    assert folded["memory"] == "900 MiB – 1 GiB"
