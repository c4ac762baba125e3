"""The picture of a deadlock: what is on it, that nothing overlaps, and what is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from xml.etree import ElementTree

import pytest

from rankscope.backends.observe.verdicts import Absence, Waiting
from rankscope.widgets.absence_graph import absence_graph, in_fold
from rankscope.widgets.wait_graph import wait_graph
from tests.widgets.report.report_scenes import EVIL

#: Pixels of a letter, a little more than in most fonts, and of a line of text.
LETTER, LINE = 6.0, 11.0

Box = tuple[float, float, float, float]


def ring(ranks: Sequence[int], op: str, *groups: str) -> tuple[Waiting, ...]:
    following = [*ranks[1:], ranks[0]]
    return tuple(
        Waiting((rank,), op, groups[place % len(groups)], (awaited,))
        for place, (rank, awaited) in enumerate(zip(ranks, following, strict=True))
    )


def boxes(picture: ElementTree.Element) -> Iterator[tuple[str, Box]]:
    """The text or the number of each element, and the box that it takes."""
    for one in picture.iter("rect"):
        x, y, width, height = (
            float(one.attrib[key]) for key in ("x", "y", "width", "height")
        )
        yield "node", (x, y, x + width, y + height)
    for one in picture.iter("text"):
        if "font-weight" in one.attrib:
            continue  # inside its node
        text = one.text or ""
        width = len(text) * LETTER
        part = {"start": 0.0, "middle": 0.5, "end": 1.0}[one.attrib["text-anchor"]]
        x, y = float(one.attrib["x"]) - part * width, float(one.attrib["y"])
        yield text, (x, y - LINE + 3, x + width, y + 2)


def overlap(one: Box, other: Box) -> bool:
    return (
        one[0] < other[2]
        and other[0] < one[2]
        and one[1] < other[3]
        and other[1] < one[3]
    )


@pytest.mark.parametrize("first", [0, 1012])
@pytest.mark.parametrize("op", ["recv #1", "reduce_scatter_tensor #12345"])
@pytest.mark.parametrize("groups", [("default",), ("dp_10", "tensor_parallel_of_0_7")])
@pytest.mark.parametrize("count", [*range(2, 13), 40])
def test_nothing_overlaps(
    count: int, groups: tuple[str, ...], op: str, first: int
) -> None:
    svg = wait_graph(ring(range(first, first + count), op, *groups))
    assert_legible(svg)
    picture = ElementTree.fromstring(svg)
    assert len(list(picture.iter("polygon"))) == min(count, 12)


@pytest.mark.parametrize("op", ["recv #1", "reduce_scatter_tensor #12345"])
@pytest.mark.parametrize("size", [2, 40])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 9, 12, 20])
def test_nothing_overlaps_where_several_ranks_are_in_an_op(
    count: int, size: int, op: str
) -> None:
    sides = [tuple(range(n, 900, 900 // size)) for n in range(count)]
    cycle = tuple(
        Waiting(ranks, op, f"group_{ranks[0]}", awaited)
        for ranks, awaited in zip(sides, [*sides[1:], sides[0]], strict=True)
    )
    svg = wait_graph(cycle, besides=tuple(range(901, 999, 2)))
    assert_legible(svg)
    last = list(ElementTree.fromstring(svg).iter("text"))[-1]
    assert last.text == "49 ranks wait because of them"


def test_ranks_in_one_op_are_one_node_and_who_waits_besides_is_named() -> None:
    cycle = (
        Waiting((0, 1), "all_reduce #1", "a", (2, 3)),
        Waiting((2, 3), "all_reduce #1", "b", (0, 1)),
    )
    picture = ElementTree.fromstring(wait_graph(cycle, besides=(4,)))
    assert picture.findtext("title") == "4 ranks wait for each other"
    assert picture.findtext("desc") == (
        "ranks 0–1 wait for ranks 2–3 in all_reduce #1 of group a; "
        "ranks 2–3 wait for ranks 0–1 in all_reduce #1 of group b; "
        "rank 4 waits because of them"
    )
    assert [one.text for one in picture.iter("text")][-4:] == [
        *("0–1", "2–3", "ranks → the ranks that they wait for"),
        "rank 4 waits because of them",
    ]


def assert_legible(svg: str) -> None:
    """Fail where a thing is over another, or has no room."""
    picture = ElementTree.fromstring(svg)
    left, top, width, height = map(float, picture.attrib["viewBox"].split())
    found = list(boxes(picture))
    for (text, one), (other_text, other) in combinations(found, 2):
        assert not overlap(one, other), (text, other_text)
    for text, (x, y, right, bottom) in found:
        assert left <= x, text
        assert right <= left + width, text
        assert top <= y, text
        assert bottom <= top + height, text
    assert width <= 620


def test_it_shows_ranks_ops_and_groups() -> None:
    svg = wait_graph(
        (
            Waiting((3,), "all_reduce #14", "rows", (8,)),
            Waiting((8,), "barrier #2", "columns", (3,)),
        )
    )
    picture = ElementTree.fromstring(svg)
    assert picture.attrib["role"] == "img"
    assert picture.findtext("title") == "2 ranks wait for each other"
    assert picture.findtext("desc") == (
        "rank 3 waits for rank 8 in all_reduce #14 of group rows; "
        "rank 8 waits for rank 3 in barrier #2 of group columns"
    )
    assert [one.text for one in picture.iter("text")] == [
        *("all_reduce", "#14 · rows", "barrier", "#2 · columns", "3", "8"),
        "rank → the rank that it waits for",
    ]


def test_one_group_is_named_once() -> None:
    texts = [
        one.text
        for one in ElementTree.fromstring(
            wait_graph(ring(range(3), "send #1", "pp"))
        ).iter("text")
    ]
    assert [texts.count("send"), texts.count("#1")] == [3, 3]
    assert texts[-2:] == ["rank → the rank that it waits for", "all in group pp"]


def test_a_long_cycle_says_how_many_ranks_are_left_out() -> None:
    picture = ElementTree.fromstring(wait_graph(ring(range(40), "recv #1", "pp")))
    ranks = [one.text for one in picture.iter("text") if "font-weight" in one.attrib]
    assert ranks == [*map(str, range(10)), "29 more", "39"]
    assert picture.findtext("title") == "40 ranks wait for each other"
    assert "so on, through 40 ranks" in (picture.findtext("desc") or "")


def test_a_name_is_text() -> None:
    svg = wait_graph(ring(range(2), EVIL, EVIL, "tp"))
    tags = {one.tag for one in ElementTree.fromstring(svg).iter()}
    assert tags == {"svg", "title", "desc", "g", "path", "polygon", "rect", "text"}
    assert "\x1b" not in svg
    assert "\u202e" not in svg


def test_without_a_cycle_there_is_no_picture() -> None:
    assert wait_graph(()) == ""
    assert absence_graph((), ()) == ""
    assert in_fold("", True) == ""


@pytest.mark.parametrize("waits", [1, 2, 4, 7])
@pytest.mark.parametrize("absent", [1, 3, 6])
@pytest.mark.parametrize("where", ["", "at train.py:77 in a_long_function_of_torch/nn"])
def test_nothing_overlaps_where_ranks_are_missing(
    waits: int, absent: int, where: str
) -> None:
    svg = absence_graph(
        tuple(
            Waiting((*range(n, 1000, 8),), "reduce_scatter_tensor #12345", f"dp_{n}")
            for n in range(waits)
        ),
        tuple(Absence((1000 + n, 1010 + n), where) for n in range(absent)),
    )
    assert_legible(svg)
    picture = ElementTree.fromstring(svg)
    assert len(list(picture.iter("polygon"))) == min(absent, 4)
    texts = [one.text for one in picture.iter("text")]
    told = [
        f"{waits - 4} more ops wait" * (waits > 4),
        f"{2 * (absent - 4)} more ranks are missing" * (absent > 4),
    ]
    if any(told):
        assert texts[-1] == "; ".join(filter(None, told))


def test_a_missing_rank_is_dashed_and_says_where_it_is() -> None:
    svg = absence_graph(
        (Waiting((0, 1, 3), "all_reduce #14", "default"),),
        (Absence((2,), "at cell 7 line 4"),),
    )
    picture = ElementTree.fromstring(svg)
    assert picture.findtext("title") == "ranks wait for rank 2"
    assert picture.findtext("desc") == (
        "ranks 0–1, 3 in all_reduce #14 of group default; "
        "missing: rank 2, at cell 7 line 4"
    )
    assert [one.text for one in picture.iter("text")] == [
        *("0–1,3", "all_reduce", "#14 · default", "2", "at cell 7 line 4")
    ]
    dashed = [one for one in picture.iter("rect") if "stroke-dasharray" in one.attrib]
    assert len(dashed) == 1
    assert "&lt;b&gt;" in absence_graph(
        (Waiting((0,), "barrier #1", "<b>"),), (Absence((1,), "<b>"),)
    )
    # A deadlock alone is open at once.
    assert in_fold(svg, False).startswith('<details class="wait-graph"><summary>')
