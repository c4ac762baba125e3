"""LineBuffer: what a terminal would show, line by line, however the text is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.magics.output.lines import LineBuffer

RED, PLAIN = "\x1b[31m", "\x1b[0m"


def lines(*pieces: str) -> list[str]:
    buffer = LineBuffer()
    out = [line for piece in pieces for line in buffer.feed(piece)]
    return [line.text for line in out + buffer.flush()]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["a\nb\n"], ["a", "b"]),
        (["a", "b\n", "c"], ["ab", "c"]),
        (["\n\n"], ["", ""]),
        ([""], []),
        (["a\r\n"], ["a"]),
        (["a\r", "\nb"], ["a", "b"]),
        (["  0%\r", " 50%\r", "100%\n"], ["100%"]),
        (["\r 10%", "\r 20%"], [" 20%"]),
        (["long line\rshort"], ["shortline"]),
        (["abc\rX", "Y\n"], ["XYc"]),
        (["gone\r\x1b[Know\n"], ["now"]),
        (["gone\x1b[2K\rnow\n"], ["now"]),
        (["abc\b\bX\n"], ["aXc"]),
        (["\bstart\n"], ["start"]),
        ([f"{RED}red{PLAIN} text\n"], [f"{RED}red{PLAIN} text"]),
        ([f"{RED}50%{PLAIN}\r{RED}99%{PLAIN}\n"], [f"{PLAIN}{RED}99%{PLAIN}"]),
        (["up\x1b[A\n"], ["up"]),
        (["cut \x1b", f"[31mred{PLAIN}\n"], [f"cut {RED}red{PLAIN}"]),
    ],
)
def test_a_line_is_what_a_terminal_shows(
    pieces: list[str], expected: list[str]
) -> None:
    assert lines(*pieces) == expected


def test_the_partial_line_can_be_seen_before_it_ends() -> None:
    buffer = LineBuffer()
    assert buffer.feed("\r 40%|####  ") == []
    assert buffer.partial == " 40%|####  "
    assert buffer.feed("\r 60%|######") == []
    assert buffer.partial == " 60%|######"


@settings(deadline=None)
@given(st.text(alphabet="ab\n\r\b\x1b[2Km", max_size=30), st.data())
def test_the_cuts_do_not_matter(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    bounds = [0, *cuts, len(text)]
    pieces = [text[i:j] for i, j in itertools.pairwise(bounds)]
    assert lines(*pieces) == lines(text)


@settings(deadline=None)
@given(st.lists(st.text(alphabet=st.characters(exclude_categories=["C"]))))
def test_plain_text_comes_through_unchanged(rows: list[str]) -> None:
    assert lines("".join(f"{row}\n" for row in rows)) == rows
