"""Text of other processes, made harmless for a terminal."""

from __future__ import annotations

import codecs
import io
import unicodedata
from typing import TextIO

__all__ = ["print_anywhere", "printable"]

# What a stream whose encoding lacks a character gets in its place.
_IN_ASCII = {"–": "-", "—": "-", "…": "...", "·": "|", "×": "x", "µ": "u", "→": "->"}


def printable(text: str) -> str:
    r"""Return `text` with its control characters escaped, but for ends of lines.

    A name of a group, a class or a file may have been chosen to move the cursor, set a
    title or reverse the direction of what is read.

    Examples
    --------
    >>> print(printable("a\x1b[2Jb\u202ec"))
    a\x1b[2Jb\u202ec
    """
    if text.isprintable():
        return text
    return "".join(one if _is_harmless(one) else _escaped(one) for one in text)


def _is_harmless(character: str) -> bool:
    # Control, format (of the direction of text among others) and surrogate characters.
    return character in "\n\t" or unicodedata.category(character) not in (
        *("Cc", "Cf", "Cs"),
        *("Zl", "Zp"),
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def print_anywhere(stream: TextIO) -> None:
    """Let `stream` take any text: what its encoding lacks gets a like character."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        codecs.register_error("rankscope", _replacement)
        stream.reconfigure(errors="rankscope")


def _replacement(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_IN_ASCII.get(one, "?") for one in lacking), error.end
