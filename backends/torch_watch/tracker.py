"""The ops of torch's groups as flight records, from torch's recorder and our wrappers.

Torch's Flight Recorder has an entry for each op that a backend ran, whoever issued it.
`Tracker` turns the entries into the records that our own groups have. What an entry
lacks comes from the Python call that issued the op: the user's line, the reduce op and
the root. A call without an entry, as a send over gloo, gets a record of its own.

For gloo, torch records neither start nor end. There an op starts when it is issued,
and ends when ``Work.wait`` returns in Python; where no Python code waits, as for DDP's
gradients, it ends at the first look at torch's counters that counts it. Durations of
such ops are too long by up to the interval of the looks.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ..rank_sets import group_by
from ..work.op_type import OpType
from .calls import Call
from .frames import waiting_frames
from .torch_record import Entry, TorchRecord

__all__ = ["Status", "Tracker"]

#: Seconds that an op without a known line is in flight before its line is looked up.
FRAME_AFTER = 0.3

# Records kept, as of our own groups.
_KEPT = 2000
# Looks at torch's counters that are kept: more than there are between two readings.
_LOOKS = 64

#: Torch's counters by the number of a group.
Status = Mapping[str, Mapping[str, int]]


class Tracker:
    """The last records of this process, kept up to date from entries and calls."""

    def __init__(self) -> None:
        self._records: deque[TorchRecord] = deque(maxlen=_KEPT)
        self._numbers = itertools.count()
        #: The records that are not over, by the number of torch's entry.
        self._open: dict[int, TorchRecord] = {}
        #: The records that torch does not have, and that are not over.
        self._own: list[TorchRecord] = []
        self._last_entry = -1
        #: When torch's counters had which values, oldest first.
        self._counted: deque[tuple[int, Status]] = deque(maxlen=_LOOKS)
        #: Calls that have no record yet, by group.
        self._calls: dict[Any, list[Call]] = {}
        #: When torch's recorder was read last.
        self.dumped_ns = 0
        #: Whether torch's recorder has had an entry.
        self.entries_seen = False
        #: Whether a collective ran that torch's recorder should have, and has not.
        self.blind = False

    @property
    def in_flight(self) -> int:
        return len(self._open) + len(self._own)

    def records(self, groups: Iterable[Any]) -> list[TorchRecord]:
        living = {id(group) for group in groups}
        kept = [one for one in self._records if id(one.group) in living]
        return sorted(kept, key=lambda one: one.created_ns)

    def update(
        self,
        entries: Sequence[Entry] | None,
        calls: Iterable[Call],
        groups: Mapping[Any, Any],
        registered: Collection[Any] = (),
    ) -> bool:
        """Bring the records up to date; return whether one has changed.

        `entries` are those of torch's recorder, oldest first (``None``: none was read,
        and none has changed), `calls` those since the last update, `groups` the watched
        groups by torch's ``ProcessGroup``, and `registered` all groups in torch's
        registry: those as well that are still being made.
        """
        now_ns = time.time_ns()
        for call in calls:
            self._calls.setdefault(call.group, []).append(call)
        changed = self._forget(groups, registered)
        if entries is not None:
            changed |= self._read(entries, groups, now_ns)
        changed |= self._add_unrecorded(groups, entries, now_ns)
        changed |= self._end_by_calls()
        self.find_frames(FRAME_AFTER)
        return changed

    def _forget(self, groups: Mapping[Any, Any], registered: Collection[Any]) -> bool:
        for group in list(self._calls):
            if group not in groups and group not in registered:
                del self._calls[group]
        living = {id(group) for group in groups.values()}
        gone = [k for k, one in self._open.items() if id(one.group) not in living]
        for number in gone:
            del self._open[number]
        before = len(self._own)
        self._own = [one for one in self._own if id(one.group) in living]
        if any(id(one.group) not in living for one in self._records):
            # They keep torch's group alive, and so its threads and its sockets.
            kept = [one for one in self._records if id(one.group) in living]
            self._records = deque(kept, maxlen=_KEPT)
        return bool(gone) or len(self._own) != before

    def note_status(self, status: Status, at_ns: int) -> None:
        """Note torch's counters: they show the end of an op before its entry does."""
        self._counted.append((at_ns, status))

    def _first_seen_done(self, entry: Entry, now_ns: int) -> int:
        """Return when an op of gloo that is retired was seen first to have ended."""
        number = str(entry["pg_id"])
        for at_ns, status in self._counted:
            done = status.get(number, {}).get("last_completed_collective", -1)
            if at_ns > entry["time_created_ns"] and done >= entry["collective_seq_id"]:
                return at_ns
        return now_ns

    def fail_last(self, group: Any, error: str) -> TorchRecord | None:
        """Note that the last op of `group` has failed, and return it, if C++ issued it.

        For gloo, torch's recorder does not say whether an op has failed. The call of an
        op that Python code issued does.
        """
        ours = [one for one in self._records if one.group is group]
        last = max(ours, key=lambda one: one.created_ns, default=None)
        if last is None or last.call is not None or last.backend != "gloo":
            return None
        if last.state not in ("started", "completed"):
            return None
        last.end("failed", last.ended_ns or time.time_ns(), error)
        self._open = {k: one for k, one in self._open.items() if one is not last}
        done = [one for one in ours if one.state == "completed"]
        group.progress.completed = max(
            done, key=lambda one: one.created_ns, default=None
        )
        group.progress.note(last)
        return last

    # -- torch's entries ------------------------------------------------------

    def _read(
        self, entries: Sequence[Entry], groups: Mapping[Any, Any], now_ns: int
    ) -> bool:
        self.entries_seen |= bool(entries)
        self.blind &= not self.entries_seen
        named = group_by(groups.values(), lambda group: group.torch_name)
        changed = False
        seen = set()
        for entry in entries:
            number = entry["record_id"]
            seen.add(number)
            if number > self._last_entry:
                if number > self._last_entry + 1 and self._last_entry >= 0:
                    # The ring has turned over: of which groups is not known.
                    for one in groups.values():
                        one.progress.forget()
                self._last_entry = number
                group = _owner(entry, named)
                if group is None:
                    continue
                record = self._new_record(entry, group)
                changed = True
            else:
                known = self._open.get(number)
                if known is None:
                    continue
                record = known
            changed |= self._advance(number, record, entry, now_ns)
        # The ring has no place for the oldest entries any more.
        for number in [one for one in self._open if one not in seen]:
            record = self._open[number]
            if record.call is None or record.call.over:
                self._close(number, record, "completed", now_ns)
                changed = True
        return changed

    def _new_record(self, entry: Entry, group: Any) -> TorchRecord:
        record = TorchRecord.of_entry(next(self._numbers), group, entry)
        call = self._take_call(record, entry)
        if call is not None:
            record.join(call)
        record.take_arrays(entry)
        self._records.append(record)
        return record

    def _take_call(self, record: TorchRecord, entry: Entry) -> Call | None:
        """Return the call that issued the op of `entry`, if Python code did."""
        waiting = self._calls.get(record.group.torch_group, [])
        created = entry["time_created_ns"]
        later = bisect_right(waiting, created, key=lambda call: call.began_ns)
        for place in range(later - 1, -1, -1):
            call = waiting[place]
            if record.thread not in (None, call.thread):
                continue
            # Not removed: one call may issue several ops.
            issued = not call.returned_ns or call.returned_ns >= created
            return call if issued else None
        return None

    def _advance(
        self, number: int, record: TorchRecord, entry: Entry, now_ns: int
    ) -> bool:
        """Take over the state of `entry`; return whether it is another one."""
        before = record.state
        discovered = entry.get("time_discovered_started_ns")
        timed = record.backend not in ("gloo", "mpi")
        if discovered:
            record.started_ns, record.state = discovered, "started"
        elif not timed:
            record.started_ns, record.state = record.created_ns, "started"
        completed = entry["state"] == "completed"
        if not (completed or entry.get("retired")):
            self._open[number] = record
            record.group.progress.note(record)
            return record.state != before
        if timed and entry.get("duration_ms") is not None:
            record.measured_ns = int(entry["duration_ms"] * 1e6)
        call = record.call
        ended = entry.get("time_discovered_completed_ns") or now_ns
        if not timed:
            ended = self._first_seen_done(entry, ended)
        if call is not None and call.ended_ns and not timed:
            ended = min(call.ended_ns, ended)
        if call is not None and call.error is not None:
            self._close(number, record, "failed", ended, call.error)
        elif completed or not timed:
            self._close(number, record, "completed", ended)
        else:
            self._close(number, record, "failed", ended, "torch gave the op up")
        return True

    def _close(
        self,
        number: int,
        record: TorchRecord,
        state: str,
        ended_ns: int,
        error: str | None = None,
    ) -> None:
        self._open.pop(number, None)
        _end(record, state, ended_ns, error)

    # -- the calls of Python -----------------------------------------------------

    def _add_unrecorded(
        self, groups: Mapping[Any, Any], entries: Sequence[Entry] | None, now_ns: int
    ) -> bool:
        """Make records of the calls that torch's recorder has no entry of."""
        taken = {id(one.call) for one in self._records if one.call is not None}
        changed = False
        for torch_group, calls in list(self._calls.items()):
            group = groups.get(torch_group)
            if group is None:
                continue
            kept = []
            for call in calls:
                if id(call) in taken:
                    # A call that still runs may issue more ops.
                    if not call.returned_ns and not call.ended_ns:
                        kept.append(call)
                elif self._is_recorded(call, entries):
                    # The entry comes with the next dump, or the ring has lost it.
                    if entries is None or not 0 < call.returned_ns < now_ns:
                        kept.append(call)
                else:
                    if self.blind:
                        # Nor does it have those that C++ code issues.
                        group.progress.forget()
                    record = TorchRecord(next(self._numbers), group, call.op_type)
                    record.fill(call, group.timeout)
                    self._records.append(record)
                    self._own.append(record)
                    group.progress.note(record)
                    changed = True
            self._calls[torch_group] = kept
        return changed

    def _is_recorded(self, call: Call, entries: Sequence[Entry] | None) -> bool:
        """Return whether torch has, or will have, an entry of the op of `call`."""
        if call.backend == "gloo":
            if call.is_p2p or call.op_type is OpType.MONITORED_BARRIER:
                return False
        elif call.backend not in ("nccl", "xccl"):
            return False
        # Where torch's recorder is off, or lacks gloo, it has no entry at all. The
        # entry is made before the call returns.
        read_later = entries is not None and 0 < call.returned_ns < self.dumped_ns
        if read_later and not self.entries_seen:
            self.blind = True
        return not self.blind

    def _end_by_calls(self) -> bool:
        """End the records whose calls are known to be over."""
        changed = False
        for number, record in list(self._open.items()):
            call = record.call
            if call is None or not call.ended_ns:
                continue
            state = "completed" if call.error is None else "failed"
            self._close(number, record, state, call.ended_ns, call.error)
            changed = True
        for record in list(self._own):
            call = record.call
            assert call is not None
            record.peer = call.peer
            record.collective_seq_id = call.collective_seq_id
            if call.over:
                state = "completed" if call.error is None else "failed"
                _end(record, state, call.ended_ns, call.error)
                self._own.remove(record)
                changed = True
        return changed

    def find_frames(self, least: float) -> None:
        """Look up the line of ops of C++ that are `least` s old: it takes a while."""
        now_ns = time.time_ns()
        for record in self._open.values():
            age = (now_ns - record.created_ns) / 1e9
            if age > least and not record.frames:
                record.frames = waiting_frames(record.thread)


def _end(record: TorchRecord, state: str, ended_ns: int, error: str | None) -> None:
    reason = record.group.aborted
    if reason is not None and record.created_ns <= reason.at * 1e9 <= ended_ns:
        state, error = "aborted", str(reason)
    record.end(state, ended_ns, error)
    record.group.progress.note(record)
    record.group.progress.note_times(record)
    if state == "completed":
        _, itemsize, _ = record._dtypes()
        sizes = tuple(map(tuple, record.sizes))
        record.group.progress.counts.add(record.op_type.method, itemsize, sizes)


def _owner(entry: Entry, named: Mapping[str, Sequence[Any]]) -> Any:
    """Return the group of `entry`; ``None`` if it was destroyed."""
    name, created = entry["process_group"][0], entry["time_created_ns"]
    groups = [one for one in named.get(name, ()) if one.born_ns <= created]
    return groups[-1] if groups else None
