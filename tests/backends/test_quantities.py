"""Integers and times, in every form in which callers give them."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from rankscope.backends.quantities import as_int, as_positive_seconds, as_seconds


class Indexed:
    """What has ``__index__`` and is no number otherwise."""

    def __index__(self) -> int:
        return 3


def _type_name(value: Any) -> str:
    """Name a case without the address of an object, the same in each worker."""
    return type(value).__name__


@pytest.mark.parametrize(
    "value", [3, np.int64(3), np.uint8(3), np.array(3), Indexed()], ids=_type_name
)
def test_anything_with_an_index_is_an_integer(value: Any) -> None:
    found = as_int(value, "dst")
    assert found == 3
    assert type(found) is int


@pytest.mark.parametrize("value", [3.0, np.float32(3), "3", None, [3]], ids=repr)
def test_what_has_none_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^send: dst is .*expected an integer"):
        as_int(value, "send: dst")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (2, 2.0),
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (np.int16(2), 2.0),
        (timedelta(milliseconds=250), 0.25),
        (timedelta(0), 0.0),
        (0, 0.0),
        (timedelta.max, threading.TIMEOUT_MAX),
        (float("inf"), threading.TIMEOUT_MAX),
    ],
    ids=repr,
)
def test_a_time_is_seconds_or_a_timedelta(value: Any, seconds: float) -> None:
    found = as_seconds(value, "timeout")
    assert found == seconds
    assert type(found) is float
    if seconds:
        assert as_positive_seconds(value, "timeout") == seconds


@pytest.mark.parametrize("value", [True, "5", None, 1j], ids=repr)
def test_another_type_is_no_time(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^get: timeout is a .*seconds or a timedelta"):
        as_seconds(value, "get: timeout")


@pytest.mark.parametrize(
    "value", [-1, timedelta(seconds=-1), float("nan"), np.float64(-0.5)], ids=repr
)
def test_no_time_is_below_zero(value: Any) -> None:
    with pytest.raises(ValueError, match="timeout=.*at least 0 seconds"):
        as_seconds(value, "timeout")


def test_the_timeout_of_an_op_is_more_than_zero() -> None:
    with pytest.raises(ValueError, match="timeout=0; expected more than 0 seconds"):
        as_positive_seconds(timedelta(0), "timeout")
