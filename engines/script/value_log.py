"""ValueLog: what this rank does, as numbers for a program's own log, every few seconds.

Nothing is sent: the numbers are those of this rank alone.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Sequence

from rankscope.backends.groups.summary import GroupStatus, since
from rankscope.backends.groups.world import world
from rankscope.backends.hang_report.settings import AFTER
from rankscope.backends.thread_start import start_thread

__all__ = ["EVERY", "Log", "ValueLog", "Values"]

_log = logging.getLogger(__name__)

#: Called with names and values.
Log = Callable[[dict[str, float]], object]
#: Seconds between two calls.
EVERY = 10.0
#: What not each group knows.
_COUNTED = {"ops", "bytes", "op_seconds", "waiting_seconds"}
#: Seconds that the end of the script may be delayed by a call.
_END_WAIT = 2.0


class Values:
    """The values of this rank; `rankscope.torch.watch` has their names."""

    def __init__(self, after: float = AFTER) -> None:
        self._after = after
        # Group and generation → what it had at the last look.
        self._seen: dict[tuple[str, int], dict[str, float]] = {}
        self._hung: set[tuple[str, int, str, int | None]] = set()
        # Group → how often it was aborted by then, in all generations.
        self._aborts: dict[str, int] = {}

    def look(self, groups: Sequence[GroupStatus]) -> dict[str, float]:
        """Return names and values, those of all groups together, since the last look.

        What a group with ops does not know has no name.
        """
        found: dict[str, float] = {"in_flight": 0, "oldest_seconds": 0.0}
        unknown = set[str]()
        seen, hung = dict[tuple[str, int], dict[str, float]](), set()
        for one in groups:
            key = one.key.id, one.generation
            now = seen[key] = _counted(one)
            if one.issued != 0:
                unknown |= _COUNTED - now.keys()
            before = self._seen.get(key, {})
            for name, value in now.items():
                found[name] = found.get(name, 0) + value - before.get(name, 0)
            found["in_flight"] += one.in_flight
            age = 0.0 if one.oldest is None else one.oldest.elapsed or 0.0
            found["oldest_seconds"] = max(found["oldest_seconds"], age)
            if one.oldest is not None and age >= self._after:
                hung.add((*key, one.oldest.op, one.oldest.seq))
        found["stalls"] = len(hung - self._hung)
        aborts = {one.key.id: one.aborts for one in groups}
        found["aborts"] = sum(
            since(self._aborts.get(group, 0), now) for group, now in aborts.items()
        )
        self._seen, self._hung, self._aborts = seen, hung, aborts
        return {
            f"rankscope/{name}": float(value)
            for name, value in found.items()
            if name not in unknown
        }


def _counted(group: GroupStatus) -> dict[str, float]:
    found = dict[str, float]()
    if group.op_seconds is not None:
        found["op_seconds"] = group.op_seconds
    if group.blocked_seconds is not None:
        found["waiting_seconds"] = group.blocked_seconds
    if group.moved or group.completed is None:
        found["ops"] = sum(ops for ops, _ in group.moved.values())
        found["bytes"] = sum(nbytes for _, nbytes in group.moved.values())
    return found


class ValueLog:
    """Calls `log` every `every` s on a thread, until the script ends, or it raises."""

    def __init__(self, log: Log, every: float, after: float = AFTER) -> None:
        self._call, self._every = log, every
        self._values = Values(after)
        self._stopped = threading.Event()
        self._thread = start_thread("log", self._run)
        atexit.register(self.close)

    def _run(self) -> None:
        self._values.look(world.summary())
        while not self._stopped.wait(self._every):
            try:
                self._call(self._values.look(world.summary()))
            except Exception:  # noqa: BLE001 - the script goes on
                _log.exception("log= of rankscope.torch.watch is not called again")
                return

    def close(self) -> None:
        atexit.unregister(self.close)
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_END_WAIT)
