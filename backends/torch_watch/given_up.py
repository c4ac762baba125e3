"""Ops that a rank has given up: a rank that comes later learns why nobody is there.

gloo closes its connections when an op times out. A rank that enters the op later gets
an error of its own, about a connection, hence each rank notes in the group's store what
has timed out there.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ..rank_sets import name_ranks
from ..thread_start import start_thread
from ..work.flight_recorder import recorder
from .calls import Call, failed_call
from .private.groups import names
from .torch_record import TorchRecord

__all__ = [
    "has_timed_out",
    "note_failed_call",
    "note_given_up",
    "past",
    "tell_given_up",
]

_KEY = "rankscope/given_up"
#: Notes that are read: a rank needs one.
_MOST = 8
#: Seconds for which an error waits for the store.
_WAIT = 0.5
#: Seconds that a rank came after the end of an op at least to be called late: hosts'
#: clocks differ.
_LATE = 0.5


@dataclass(frozen=True)
class GivenUp:
    """An op that timed out on global rank `rank`, after `seconds`, at `at`."""

    rank: int
    op: str
    line: str
    seconds: float
    at: float


def has_timed_out(error: BaseException | str) -> bool:
    """Whether an op of gloo has ended by its timeout."""
    return "timed out" in str(error).lower()


def note_failed_call(group: Any, error: BaseException) -> None:
    """Note in the store of `group` that an op which Python issued has timed out."""
    call = failed_call(error)
    if call is not None and call.backend == "gloo" and has_timed_out(error):
        note_given_up(group, call, call.began_ns)


def note_given_up(group: Any, op: Call | TorchRecord, began_ns: int) -> None:
    """Note in the store of `group` that `op` has timed out here."""
    store, default = _store_of(group), names().default
    if store is None or default is None:
        return
    now = time.time()
    seconds = now - began_ns / 1e9
    note = GivenUp(default.rank(), _name(op), _line(op), seconds, now)

    def write() -> None:
        number = store.add(_KEY, 1)
        store.set(f"{_KEY}/{number}", json.dumps(asdict(note)))

    _within(write)


def past(group: Any) -> list[GivenUp]:
    """Return what ranks of `group` have given up, the first one first."""
    store = _store_of(group)
    found: list[GivenUp] = []
    if store is None:
        return found

    def read() -> None:
        for number in range(1, _MOST + 1):
            key = f"{_KEY}/{number}"
            if not store.check([key]):
                return
            found.append(GivenUp(**json.loads(store.get(key))))

    _within(read)
    return list(found)


def tell_given_up(given_up: list[GivenUp], call: Call | None) -> str:
    """Return who has timed out where, and whether this rank came to it afterwards."""
    first = given_up[0]
    those = [one for one in given_up if (one.op, one.line) == (first.op, first.line)]
    where = f" ({first.line})" if first.line else ""
    ranks = sorted({one.rank for one in those})
    after = f"{first.seconds:.{0 if first.seconds >= 1 else 1}f} s"
    text = f"{name_ranks(ranks)} timed out in {first.op}{where} after {after}"
    if call is None:
        return text
    late = call.began_ns / 1e9 - first.at
    if late < _LATE:
        return text
    if call.seq and _name(call) == first.op and names().default.rank() not in ranks:
        they = "it" if len(ranks) == 1 else "they"
        return f"{text}: {they} waited for this rank, which came {late:.0f} s later"
    return f"{text}, {late:.0f} s before this rank came to {_name(call)}"


def _store_of(group: Any) -> Any:
    """Return the store of `group`; ``None`` where it was destroyed."""
    try:
        return names().own_store(group)
    except KeyError:
        return None


def _name(op: Call | TorchRecord) -> str:
    """Return ``barrier #3``; torch does not count its monitored barriers."""
    return op.op_type.value + (f" #{op.seq}" if op.seq else "")


def _line(op: Call | TorchRecord) -> str:
    return recorder.name_source(op.frames[0]) if op.frames else ""


def _within(act: Callable[[], None]) -> None:
    """Do something with a store for a moment: whoever serves it may be gone."""

    def run() -> None:
        try:
            act()
        except RuntimeError:
            # So it is; nobody learns of it.
            pass

    # At the end of Python none can be started.
    with contextlib.suppress(RuntimeError):
        start_thread("given-up", run).join(_WAIT)
