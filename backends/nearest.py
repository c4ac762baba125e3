"""The word that was meant by one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The one of `known` that is most like `word`, ``None`` if none is like it."""
    typed = word.lower()

    def likeness(candidate: str) -> float:
        matcher = difflib.SequenceMatcher(None, typed, candidate.lower())
        first = matcher.get_matching_blocks()[0]
        # Typing errors are rare in the first letters.
        start = first.size if first.a == first.b == 0 else 0
        return matcher.ratio() + 0.3 * start / max(len(typed), len(candidate), 1)

    best = max(known, key=likeness, default=None)
    return best if best and likeness(best) > 0.7 else None
