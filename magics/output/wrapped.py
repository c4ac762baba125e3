"""Sentences in lines: front ends split a long line within a word."""

from __future__ import annotations

import re
import textwrap
from typing import Any

__all__ = ["fit", "lines_of", "wrapped"]

#: Characters of a line, and the fewest that a line has where a page is narrow.
WIDTH, NARROW = 100, 30

#: What is one word: no line ends within it.
_WORD = re.compile(
    r"\bcell \d+ line \d+|\branks? \d+(?:(?:–|, )\d+){0,3}|\w+ #\d+|\bwaits? in it\b"
)

_room = WIDTH


def fit(letters: int) -> None:
    """End lines where a page with room for `letters` would, from now on."""
    global _room
    _room = min(max(letters, NARROW), WIDTH)


def lines_of(line: str, width: int = WIDTH, **options: Any) -> list[str]:
    """Return `line` split between words, with the options of `textwrap.wrap`."""
    held = _WORD.sub(lambda found: found[0].replace(" ", "\xa0"), line)
    parts = textwrap.wrap(
        held, width, break_on_hyphens=False, break_long_words=False, **options
    )
    return [part.replace("\xa0", " ") for part in parts]


def wrapped(text: str) -> str:
    """Return `text`, its long lines split between words."""
    return "\n".join("\n".join(lines_of(line, _room)) for line in text.splitlines())
