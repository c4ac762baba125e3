"""Marks in what a rank prints: which lines one call of ``print`` wrote.

A message with output has what several calls wrote, and may end anywhere. The output of
a call is folded with that of other ranks as a whole, since lines of different matrices
may be equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["MARK", "MARKED", "mark", "without_mark", "without_marks"]

#: At the end of a line whose call wrote the next line, too: the record separator, a
#: control character that no front end shows.
MARK = "\x1e"
#: The key of an output's text with its marks; its ``text`` has none.
MARKED = "marked"


def mark(text: str) -> str:
    """Return `text`, which one call wrote, with marks before its inner newlines."""
    end = len(text) - text.endswith("\n")
    # A carriage return is for a line that is written again.
    if "\n" not in text[:end] or "\r" in text:
        return text
    return text[:end].replace("\n", f"{MARK}\n") + text[end:]


def without_marks(output: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``stream`` output whose text has no marks; they are in `MARKED`."""
    text = output["text"]
    if MARK not in text:
        return dict(output)
    return {**output, "text": text.replace(MARK, ""), MARKED: text}


def without_mark(line: str) -> tuple[str, bool]:
    """Return a line without its mark, and whether the next line belongs to it."""
    return line.removesuffix(MARK), line.endswith(MARK)
