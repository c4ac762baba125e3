"""Torch's error of an aborted op, as the error that says why it was aborted.

The user's code gets torch's error. Where nothing catches it, the cell or the script
shows ours, with torch's as its cause.
"""

from __future__ import annotations

import dis
import re
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from ..errors import DistBackendError, DistError, DistTimeoutError
from ..groups.abort_reason import VERDICT_WAIT, FoundCause
from ..work.flight_recorder import recorder
from .aborting import aborted_error, describe, identity
from .calls import Call, failed_call
from .creation import Made, known_groups, made_of
from .given_up import has_timed_out, past, tell_given_up
from .gloo_sockets import count_connections
from .patching import replace
from .private.groups import Names

__all__ = ["explain", "install_excepthook", "on_broken", "settle"]

#: Called with a gloo group that has lost a connection, and with the text of torch's
#: error that showed it; no abort was the cause.
on_broken: list[Callable[[Any, str], None]] = []

# Attribute of torch's error that holds ours: IPython asks for it more than once.
_EXPLAINED = "__rankscope_explained__"
_AS_IT_IS = object()

# Seconds between two looks for the reason of a lost connection.
_STEP = 0.01


def explain(error: BaseException) -> BaseException:
    """Return the error to show for `error`, which left a cell or a script.

    That is `error` itself, unless an op of an aborted group of torch raised it: then a
    `DistAbortedError` with `error` as its cause and with its traceback.
    """
    shown: Any = getattr(error, _EXPLAINED, None)
    if shown is None:
        # A mark where it stays as it is: an error is not to refer to itself.
        shown = _explain(error) or _AS_IT_IS
        setattr(error, _EXPLAINED, shown)
    return error if shown is _AS_IT_IS else shown.with_traceback(error.__traceback__)


def settle() -> None:
    """Note that a cell is over: later errors come from the ops of later cells."""
    for group, made in known_groups():
        made.used, made.issued_before = False, Names.issued(group)
        made.cause = None


def _explain(error: BaseException) -> BaseException | None:
    if not _is_of_library(error):
        return None
    # Those with an op that may have ended in this cell, or in the script.
    used = [
        (group, made)
        for group, made in known_groups()
        if made.used or Names.issued(group) > made.issued_before
    ]
    # Before the wait for an abort: they hold for as long as the op hangs.
    causes = [(*one, one[1].cause) for one in used if one[1].cause is not None]
    call = failed_call(error)
    found = _aborted_group(used)
    if found is None:
        # gloo closes its connections where an op fails, be it by a timeout.
        broken = [group for group, _ in filter(_lost_connection, used)]
        for group in broken:
            for listener in on_broken:
                listener(group, str(error))
        for group, made, cause in causes:
            if call.group is group if call else _IN_GLOO.match(str(error)):
                return _given_up(error, group, made, call, str(cause), cause)
        return _after_others(error, call, broken)
    group, made = found
    op = made.op, made.sequence_number, made.source
    if made.op is None and call is not None and call.group is group:
        # Its connection was lost before the abort was known here.
        op = _op(call)
    shown = aborted_error(group, made, *op)
    shown.__cause__ = error
    return shown


def _op(call: Call | None) -> tuple[str | None, int | None, str]:
    """Return the op of a call, its number and its line."""
    if call is None:
        return None, None, ""
    line = recorder.name_source(call.frames[0]) if call.frames else ""
    return call.op_type.value, call.seq, line


def _after_others(
    error: BaseException, call: Call | None, broken: Sequence[Any]
) -> BaseException | None:
    """Return the error of an op that other ranks gave up before; ``None``: none did."""
    if has_timed_out(error) or not _IN_GLOO.match(str(error)):
        return None
    if call is None and len(broken) != 1:
        return None
    group = call.group if call else broken[0]
    given_up = past(group)
    if not given_up:
        return None
    told = tell_given_up(given_up, call)
    cause = FoundCause(told)
    return _given_up(error, group, made_of(group), call, told, cause)


def _given_up(
    error: BaseException,
    group: Any,
    made: Made,
    call: Call | None,
    told: str,
    cause: FoundCause,
) -> DistError:
    """Return the error of an op that torch gave up, with `cause` as it is `told`."""
    text = _IN_GLOO.sub("", str(error)).partition("\n")[0]
    text = text.partition(_ADVICE)[0].rstrip(".")
    op, number, line = _op(call)
    about = identity(group, made, op, number)
    shown = (DistTimeoutError if has_timed_out(error) else DistBackendError)(
        f"{describe(about, line)}: {text}; {told}",
        **about,
        culprits=cause.culprits,
        reason=cause.text,
    )
    shown.__cause__ = error
    return shown


def _aborted_group(used: Sequence[tuple[Any, Made]]) -> tuple[Any, Made] | None:
    """Return the aborted one of `used`, whose op ended with an error just now."""
    deadline = time.monotonic() + VERDICT_WAIT
    while True:
        aborted = [one for one in used if one[1].aborted is not None]
        if aborted:
            # Of several, one whose op was in flight, and of these the last.
            return max(aborted, key=_recent)
        # The abort of another rank ends the ops of this one, maybe before the reason
        # of the abort has come here.
        if time.monotonic() > deadline or not any(map(_lost_connection, used)):
            return None
        time.sleep(_STEP)


def _lost_connection(one: tuple[Any, Made]) -> bool:
    made = one[1]
    return count_connections(made.listeners) < made.connections


def _recent(one: tuple[Any, Made]) -> tuple[bool, float]:
    assert one[1].aborted is not None
    return one[1].op is not None, one[1].aborted.at


def _is_of_library(error: BaseException) -> bool:
    """Whether torch's library may have raised `error`, and no line of Python did.

    gloo's errors are bare RuntimeErrors, NCCL's are subclasses that torch declares.
    """
    if isinstance(error, DistError) or not isinstance(error, RuntimeError):
        return False
    kind = type(error)
    if kind is not RuntimeError and not kind.__module__.startswith("torch"):
        return False
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return True
    code = last.tb_frame.f_code.co_code
    return dis.opname[code[last.tb_lasti]] not in _RAISES


# The file of gloo in which it raised an error, and what it adds, which is a guess.
_IN_GLOO = re.compile(r"^\[[^\]]*/gloo/[^\]]*:\d+\] ")
_ADVICE = " This is typically caused"

# What a `raise` statement compiles to.
_RAISES = ("RAISE_VARARGS", "RERAISE")


def install_excepthook() -> Callable[[], None]:
    """Have a script end with our error in place of torch's; return the undoing.

    Torch's own hook may lie over this one, which then stays: it adds nothing where no
    group is aborted.
    """

    def wrap(original: Any) -> Any:
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

        return show

    return replace(sys, "excepthook", wrap)
