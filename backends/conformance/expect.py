"""Expectations that need no test runner: equal arrays, and an error."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

__all__ = ["raises", "same"]


@contextlib.contextmanager
def raises(kind: type[BaseException], match: str = "") -> Iterator[None]:
    """Fail with `AssertionError` unless the block raises `kind` matching `match`."""
    try:
        yield
    except kind as error:
        if not re.search(match, str(error)):
            raise AssertionError(
                f"{type(error).__name__} with the text {str(error)!r}; expected one "
                f"that matches {match!r}"
            ) from error
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


def same(found: npt.ArrayLike, wanted: npt.ArrayLike) -> None:
    """Fail with one line of text unless every element of `found` is as `wanted`."""
    got, expected = np.asarray(found), np.asarray(wanted)
    if expected.ndim:
        assert got.shape == expected.shape, (
            f"the shape is {got.shape}; expected {expected.shape}"
        )
    differing = np.flatnonzero(got != expected)
    if differing.size:
        first = differing[0]
        value = np.broadcast_to(expected, got.shape).flat[first]
        raise AssertionError(
            f"{differing.size} of {got.size} elements differ: element {first} is "
            f"{got.flat[first]}; expected {value}"
        )
