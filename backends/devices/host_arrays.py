"""New arrays for collectives, with the default dtype of torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["empty", "zeros"]


def empty(shape: int | Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """Return an uninitialized array, C-contiguous: an ordinary `numpy.ndarray`.

    Parameters
    ----------
    shape : int or sequence of int
        The length, or the length along each dimension.
    dtype : dtype, default float32
        Any fixed-size dtype without objects.

    Returns
    -------
    numpy.ndarray
        The array.

    Raises
    ------
    TypeError
        The dtype has objects.
    ValueError
        A length is negative.

    Notes
    -----
    Named after ``numpy.empty``, whose default dtype is another one. No backend needs
    its arrays to be made by this function.

    Examples
    --------
    >>> x = dist.empty((2, 3))
    >>> x.shape, x.dtype
    ((2, 3), dtype('float32'))
    """
    kind = np.dtype(dtype)
    if kind.hasobject:
        raise TypeError(f"empty: dtype {kind} holds objects, which cannot be sent")
    return np.empty(shape, kind)


def zeros(shape: int | Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """Return an array of zeros, as `empty` makes it.

    Parameters
    ----------
    shape : int or sequence of int
        The length, or the length along each dimension.
    dtype : dtype, default float32
        Any fixed-size dtype without objects.

    Returns
    -------
    numpy.ndarray
        The array.

    Raises
    ------
    TypeError, ValueError
        As of `empty`.

    Examples
    --------
    >>> dist.zeros(3)
    array([0., 0., 0.], dtype=float32)
    """
    array = empty(shape, dtype)
    array.fill(0)
    return array
