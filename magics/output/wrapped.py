"""Sentences in lines: front ends split a long line within a word."""

from __future__ import annotations

import textwrap

__all__ = ["WIDTH", "wrapped"]

#: Characters of a line.
WIDTH = 100


def wrapped(text: str) -> str:
    """Return `text`, its long lines split between words."""
    return "\n".join(
        textwrap.fill(line, WIDTH, break_on_hyphens=False, break_long_words=False)
        for line in text.splitlines()
    )
