"""Spelling suggestions at the end of an error message."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean X?"``, X of `known` and like `word`, or ``""``."""
    from difflib import SequenceMatcher  # for a message

    typed = word.lower()

    def likeness(candidate: str) -> float:
        matcher = SequenceMatcher(None, typed, candidate.lower())
        first = matcher.get_matching_blocks()[0]
        # Typing errors are rare in the first letters.
        start = first.size if first.a == first.b == 0 else 0
        return matcher.ratio() + 0.3 * start / max(len(typed), len(candidate), 1)

    best = max(known, key=likeness, default=None)
    return f"; did you mean {best}?" if best and likeness(best) > 0.7 else ""
