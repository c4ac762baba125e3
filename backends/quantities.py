"""Integers, times and lists as callers give them, made Python's; one place for each."""

from __future__ import annotations

import math
import numbers
import operator
import threading
from datetime import timedelta
from typing import Any

__all__ = [
    "as_int",
    "as_ints",
    "as_list",
    "as_positive_seconds",
    "as_seconds",
    "as_timeout",
]


def as_int(value: object, what: str) -> int:
    """Return `value`, an int or what has ``__index__``, as numpy's integers."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(
            f"{what} is {value!r}, a {type(value).__name__}; expected an integer"
        ) from error


def as_list(values: Any, what: str, expected: str) -> list[Any]:
    """Return what `values` yields; a `TypeError` begins with `what`."""
    try:
        iterator = iter(values)
    except TypeError as error:
        raise TypeError(
            f"{what} is {values!r}, a {type(values).__name__}; expected {expected}"
        ) from error
    return list(iterator)


def as_ints(values: Any, what: str) -> list[int]:
    """Return each of `values` as `as_int` does, where there are any."""
    listed = as_list(values, what, "integers")
    return [as_int(value, f"{what}[{place}]") for place, value in enumerate(listed)]


def as_seconds(value: object, what: str, *, positive: bool = False) -> float:
    """Return `value`, a `timedelta` or a real number, in seconds, at least 0.

    What is longer than a thread can wait (``threading.TIMEOUT_MAX``) becomes that.
    """
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        seconds = float(value)
    else:
        raise TypeError(
            f"{what} is a {type(value).__name__}; expected seconds or a timedelta"
        )
    if math.isnan(seconds) or seconds < 0 or (positive and not seconds):
        least = "more than" if positive else "at least"
        raise ValueError(f"{what}={seconds:g}; expected {least} 0 seconds")
    return min(seconds, threading.TIMEOUT_MAX)


def as_positive_seconds(value: object, what: str) -> float:
    """Do the same for a time that is not 0, as the timeout of an op."""
    return as_seconds(value, what, positive=True)


def as_timeout(value: object, default: float, what: str) -> float:
    """Do the same for a time that may be ``None``, which means `default` seconds."""
    return default if value is None else as_positive_seconds(value, what)
