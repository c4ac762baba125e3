"""Integers and times as callers give them, made Python's; one place for each kind."""

from __future__ import annotations

import math
import numbers
import operator
import threading
from datetime import timedelta

__all__ = ["as_int", "as_positive_seconds", "as_seconds", "as_timeout"]


def as_int(value: object, what: str) -> int:
    """Return `value`, an int or what has ``__index__``, as numpy's integers.

    Raises `TypeError`, which begins with `what`, for a float, even a whole one.
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(
            f"{what} is {value!r}, a {type(value).__name__}; expected an integer"
        ) from error


def as_seconds(value: object, what: str) -> float:
    """Return `value`, a `timedelta` or a real number, in seconds, at least 0.

    What is longer than a thread can wait (``threading.TIMEOUT_MAX``, about 292 years)
    becomes that. Raises `TypeError` or `ValueError`, which begins with `what`.
    """
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        seconds = float(value)
    else:
        raise TypeError(
            f"{what} is a {type(value).__name__}; expected seconds or a timedelta"
        )
    if math.isnan(seconds) or seconds < 0:
        raise ValueError(f"{what}={seconds:g}; expected at least 0 seconds")
    return min(seconds, threading.TIMEOUT_MAX)


def as_positive_seconds(value: object, what: str) -> float:
    """Do the same for a time that is not 0, as the timeout of an op."""
    seconds = as_seconds(value, what)
    if not seconds > 0:
        raise ValueError(f"{what}={seconds:g}; expected more than 0 seconds")
    return seconds


def as_timeout(value: object, default: float, what: str) -> float:
    """Do the same for a time that may be ``None``, which means `default` seconds."""
    return default if value is None else as_positive_seconds(value, what)
