"""Functions of other modules and classes: replaced by wrappers, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Wrapper", "replace"]

#: Takes a function, and returns what is called in its place.
Wrapper = Callable[[Any], Any]


def replace(owner: Any, name: str, wrapper: Wrapper) -> Callable[[], None]:
    """Put ``wrapper(function)`` in the place of a function; return the undoing.

    Nothing is done where `owner` has no such function.
    """
    original = getattr(owner, name, None)
    if original is None:
        return lambda: None
    wrapped = wrapper(original)
    setattr(owner, name, wrapped)

    def undo() -> None:
        # Whoever replaced it later, calls it.
        if getattr(owner, name) is wrapped:
            setattr(owner, name, original)

    return undo
