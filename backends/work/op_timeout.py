"""op_timeout: a timeout for single ops, other than their group's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import timedelta

from ..quantities import as_positive_seconds

__all__ = ["op_timeout", "own_timeout"]

_OWN: ContextVar[float | None] = ContextVar("rankscope-op-timeout", default=None)

#: Seconds that `op_timeout` gives the op being issued, ``None`` without one.
own_timeout = _OWN.get


@contextlib.contextmanager
def op_timeout(timeout: float | timedelta) -> Iterator[None]:
    """Give the ops issued in the block this timeout in the place of their group's.

    When it has passed, the op fails with `DistTimeoutError` and the group is aborted on
    every rank; ``work.wait(timeout)`` bounds a wait and lets the op go on.

    What the ``timeout`` of c10d's options is for one op.

    Parameters
    ----------
    timeout : float or timedelta
        Counted from when an op starts to execute; in seconds if it is a number.

    Yields
    ------
    None
        Nothing.

    Raises
    ------
    TypeError, ValueError
        It is no duration, or not positive.

    Examples
    --------
    >>> x = np.ones(2)
    >>> with dist.op_timeout(5):
    ...     dist.all_reduce(x)
    """
    token = _OWN.set(as_positive_seconds(timeout, "op_timeout: timeout"))
    try:
        yield
    finally:
        _OWN.reset(token)
