"""Sentences in lines: front ends split a long line within a word."""

from __future__ import annotations

import re
import textwrap
from typing import Any

__all__ = ["lines_of", "wrapped"]

#: Characters of a line.
WIDTH = 100

#: What is one word: no line ends within it.
_PLACE = re.compile(r"\bcell \d+ line \d+")


def lines_of(line: str, **options: Any) -> list[str]:
    """Return `line` split between words, with the options of `textwrap.wrap`."""
    held = _PLACE.sub(lambda found: found[0].replace(" ", "\xa0"), line)
    parts = textwrap.wrap(held, WIDTH, break_on_hyphens=False, **options)
    return [part.replace("\xa0", " ") for part in parts]


def wrapped(text: str) -> str:
    """Return `text`, its long lines split between words."""
    return "\n".join(
        "\n".join(lines_of(line, break_long_words=False)) for line in text.splitlines()
    )
