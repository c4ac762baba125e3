"""Values of options: read, checked, and refused with the reason.

Everything that can be known without an engine is found here, before one starts.
"""

from __future__ import annotations

import math

from rankscope.backends import BackendConfig
from rankscope.engines.launch import launcher_names

from .options import closest

__all__ = ["backend", "count", "launcher", "seconds"]


def count(text: str) -> int:
    """Return a number of ranks."""
    try:
        number = int(text)
    except ValueError:
        raise ValueError("expected a number of ranks, such as 4") from None
    if number < 1:
        raise ValueError("there must be at least 1 rank")
    return number


def seconds(text: str) -> float:
    """Return a duration in seconds."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("expected seconds, such as 30 or 0.5") from None
    if not (math.isfinite(value) and value > 0):
        raise ValueError("expected a number of seconds above 0")
    return value


def backend(text: str) -> str:
    """Return `text` if it is a `BackendConfig`; its `ValueError` says what is wrong."""
    BackendConfig(text)
    return text


def launcher(text: str) -> str:
    """Return the name of a launcher of ipyparallel's, or of a launcher class."""
    names = launcher_names()
    if "." in text or text.lower() in names:
        return text
    raise ValueError(
        f"no such launcher{closest(text, names)} (there are {', '.join(names)})"
    )
