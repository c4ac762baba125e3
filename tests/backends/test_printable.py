"""Text that could move the cursor, or more."""

from __future__ import annotations

import io

import pytest

from rankscope.backends.printable import print_anywhere, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ranks 0–2 wait in `all_reduce` #14", None),
        ("two\nlines\tand a tab", None),
        ("\x1b]0;TITLE\x07\x1b[2J", "\\x1b]0;TITLE\\x07\\x1b[2J"),
        ("over\rwritten", "over\\rwritten"),
        ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
        ("c1 \x9b31m", "c1 \\x9b31m"),
        ("a lone \ud800", "a lone \\ud800"),
    ],
)
def test_what_a_terminal_would_heed_is_escaped(text: str, shown: str | None) -> None:
    assert printable(text) == (text if shown is None else shown)


def test_a_stream_that_knows_ascii_alone_gets_like_characters() -> None:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, "ascii", write_through=True) as stream:
        print_anywhere(stream)
        print("ranks 0–3 wait…, 5 µs · 日", file=stream)
        assert raw.getvalue() == b"ranks 0-3 wait..., 5 us | ?\n"


def test_other_streams_are_left_alone() -> None:
    print_anywhere(io.StringIO())
    with io.TextIOWrapper(io.BytesIO(), "ascii", errors="backslashreplace") as stream:
        print_anywhere(stream)
        assert stream.errors == "backslashreplace"
