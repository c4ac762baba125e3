"""Torch's error of an aborted op, as the error that says why it was aborted.

The user's code gets torch's error. Where nothing catches it, the cell or the script
shows ours, with torch's as its cause.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ..errors import DistError
from .aborting import aborted_error
from .creation import aborted_groups

__all__ = ["explain", "install_excepthook"]

# Attribute of torch's error that holds ours: IPython asks for it more than once.
_EXPLAINED = "__rankscope_explained__"


def explain(error: BaseException) -> BaseException:
    """Return the error to show for `error`, which left a cell or a script.

    That is `error` itself, unless it is torch's and a group of torch was aborted: then
    a `DistAbortedError` with `error` as its cause and with its traceback.
    """
    known = getattr(error, _EXPLAINED, None)
    if known is not None:
        return known
    if not _is_torchs(error):
        return error
    aborted = aborted_groups()
    # An op was in flight in the group whose abort ended it.
    aborted.sort(key=lambda one: (one[1].op is None, -_time(one[1])))
    if not aborted:
        return error
    group, made = aborted[0]
    made_error = aborted_error(group, made, made.op, made.sequence_number)
    made_error.__cause__ = error
    made_error.__traceback__ = error.__traceback__
    setattr(error, _EXPLAINED, made_error)
    return made_error


def _time(made: Any) -> float:
    assert made.aborted is not None
    return float(made.aborted.at)


def _is_torchs(error: BaseException) -> bool:
    """Whether an op of torch may have raised `error` since its group was aborted.

    gloo's errors are bare RuntimeErrors, NCCL's are subclasses that torch declares.
    """
    if isinstance(error, DistError) or not isinstance(error, RuntimeError):
        return False
    kind = type(error)
    if kind is not RuntimeError and not kind.__module__.startswith("torch"):
        return False
    text = str(error)
    return kind is not RuntimeError or any(one in text for one in _SIGNS)


#: What the messages of torch say where the connections of gloo ended.
_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "failed to pass monitoredBarrier",
    "Socket closed",
    "gloo/transport",
    "Timed out waiting",
)


def install_excepthook() -> Callable[[], None]:
    """Have a script end with our error in place of torch's; return the undoing."""
    original = sys.excepthook

    def show(
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        shown = explain(error)
        if shown is error:
            original(kind, error, traceback)
        else:
            original(type(shown), shown, shown.__traceback__)

    sys.excepthook = show

    def undo() -> None:
        # Torch's own hook may lie over this one, which then stays: it adds nothing
        # where no group is aborted.
        if sys.excepthook is show:
            sys.excepthook = original

    return undo
