"""Text of other processes, made harmless for a terminal."""

from __future__ import annotations

import unicodedata

__all__ = ["printable"]


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
