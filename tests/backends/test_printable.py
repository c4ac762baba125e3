"""Text that could move the cursor, or more."""

from __future__ import annotations

import pytest

from rankscope.backends.printable import printable


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
