"""TorchRecord: one op of torch's groups, in the form of our own flight records."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..observe.torch_format import DTYPES, ITEMSIZES, OPS
from ..work.flight_recorder import OpCounts, OpEntry, recorder
from ..work.op_type import OpType
from ..work.record_fields import Frame, Splits, record_fields
from .calls import Call

__all__ = ["Entry", "Progress", "TorchRecord"]

#: An entry of torch's Flight Recorder.
Entry = Mapping[str, Any]

#: The part of the seconds in ops by which they may be wrong.
ERROR = 0.05

_NUMPY = {torch: numpy for numpy, torch in DTYPES.items()}


class Progress:
    """One group on this rank: what it issued last, what it completed, what it runs."""

    def __init__(self, ranks: int = 1) -> None:
        self.counts = OpCounts(ranks)
        #: From start to end of all ops that are over, and for which threads waited.
        self.busy, self.blocked = Duration(), Duration()
        self.enqueued: TorchRecord | None = None
        self.started: TorchRecord | None = None
        self.completed: TorchRecord | None = None
        #: By number of the record, oldest first.
        self.in_flight: dict[int, TorchRecord] = {}

    def note(self, record: TorchRecord) -> None:
        """Take over the state that `record` has now."""
        self.enqueued = _newer(self.enqueued, record)
        if record.started_ns:
            self.started = _newer(self.started, record)
        if not record.ended_ns:
            self.in_flight[record.record_id] = record
            return
        self.in_flight.pop(record.record_id, None)
        if record.state == "completed":
            self.completed = _newer(self.completed, record)

    def note_times(self, record: TorchRecord) -> None:
        """Add the times of an op that is over."""
        call, most = record.call, max(0, record.ended_ns - record.started_ns)
        if record.measured_ns is not None:
            self.busy.add(record.measured_ns)
        elif call is not None and call.waited_ns is not None:
            self.busy.add(most)
        else:
            # It has ended at any time since it was issued.
            issued = call.returned_ns if call is not None else 0
            since = max(record.started_ns, issued)
            self.busy.add(most, max(0, record.ended_ns - since))
        if call is not None and call.waited_ns is not None:
            self.blocked.add(max(0, record.ended_ns - call.waited_ns))
        else:
            self.blocked.add(0, 0 if call is not None and call.was_over else most)

    def forget(self) -> None:
        """Count and measure no more: there are ops that nobody has seen."""
        self.counts.forget()
        self.busy.is_known = self.blocked.is_known = False


def _newer(known: TorchRecord | None, record: TorchRecord) -> TorchRecord:
    if known is None or record.created_ns >= known.created_ns:
        return record
    return known


class Duration:
    """A sum of times, each with the error that it may have; ns."""

    def __init__(self) -> None:
        self._sum = self._error = 0
        #: Whether all times are in it.
        self.is_known = True

    def add(self, time: int, error: int = 0) -> None:
        self._sum += time
        self._error += error

    @property
    def seconds(self) -> float | None:
        """The sum in seconds; ``None`` where it may be wrong by more than `ERROR`."""
        if not self.is_known or self._error > ERROR * self._sum:
            return None
        return self._sum / 1e9


class TorchRecord(OpEntry):
    """One op of one of torch's groups; `as_dict` has the form of our own records."""

    def __init__(self, number: int, group: Any, op_type: OpType) -> None:
        self.record_id = number
        #: The group: ``name``, ``id``, ``generation``, ``ranks`` and ``progress``.
        self.group = group
        self.op_type = op_type
        self.backend = ""
        self.collective_seq_id = self.p2p_seq_id = 0
        self.op_id = -1
        self.sizes: list[list[int]] = []
        self.dtypes: list[str] = []
        self.peer: int | None = None
        self.reduce_op: str | None = None
        self.tag: int | None = None
        # Not known: torch's group may have been used before it was watched.
        self.message: int | None = None
        self.splits: Splits | None = None
        self.timeout = 0.0
        self._frames: tuple[Frame, ...] = ()
        self.thread: int | None = None
        self.state = "scheduled"
        self.created_ns = self.started_ns = self.ended_ns = 0
        # Both clocks as it was read: the wall clock, which torch goes by, may be set.
        self._read = time.time_ns(), time.monotonic()
        #: How long it took by torch's events on a device; ``None``: there were none.
        self.measured_ns: int | None = None
        self.error: str | None = None
        self.call: Call | None = None

    @classmethod
    def of_entry(cls, number: int, group: Any, entry: Entry) -> TorchRecord:
        """Return the record of an entry of torch's recorder, but for its arrays."""
        library, _, name = entry["profiling_name"].partition(":")
        # The names of sends and receives have the ranks: `nccl:recv 1<-0`.
        name, _, path = name.partition(" ")
        self = cls(number, group, OPS.get(name, OpType.UNKNOWN))
        self.backend = library
        self.collective_seq_id = entry["collective_seq_id"]
        self.p2p_seq_id = entry["p2p_seq_id"]
        self.op_id = entry["op_id"]
        self.timeout = entry.get("timeout_ms", 0) / 1e3
        self.created_ns = entry["time_created_ns"]
        self.thread = int(entry.get("thread_id") or 0) or None
        if path:
            peer = path.replace("<-", "->").partition("->")[2]
            self.peer = int(peer) if peer.isdigit() else None
        return self

    def take_arrays(self, entry: Entry) -> None:
        """Take sizes and dtypes from an entry, if it has them."""
        sizes = [list(size) for size in entry["input_sizes"]]
        dtypes = [_NUMPY.get(one, one.lower()) for one in entry["input_dtypes"]]
        if not self.op_type.spec.in_place and not self.op_type.is_p2p:
            sizes += [list(size) for size in entry["output_sizes"]]
            dtypes += [_NUMPY.get(one, one.lower()) for one in entry["output_dtypes"]]
        if sizes:
            self.sizes, self.dtypes = sizes, dtypes

    def join(self, call: Call) -> None:
        """Take from `call` what torch's entry lacks."""
        self.call = call
        self.op_type = call.op_type
        self.peer = call.peer
        self.reduce_op = call.reduce_op
        self.tag, self.splits = call.tag, call.splits
        if not self.sizes:
            self.sizes, self.dtypes = call.sizes, call.dtypes

    def fill(self, call: Call, timeout: float) -> None:
        """Take everything from `call`, whose op torch does not record."""
        self.join(call)
        self.backend = call.backend
        self.collective_seq_id = call.collective_seq_id
        self.p2p_seq_id = call.p2p_seq_id
        self.created_ns = self.started_ns = call.began_ns
        self.state = "started"
        self.thread = call.thread
        self.timeout = timeout

    @property
    def frames(self) -> tuple[Frame, ...]:
        if not self._frames and self.call is not None:
            self._frames = self.call.frames
        return self._frames

    @frames.setter
    def frames(self, frames: tuple[Frame, ...]) -> None:
        self._frames = frames

    @property
    def since(self) -> float:
        """When the op started, or else was issued (``time.monotonic``)."""
        wall_ns, monotonic = self._read
        return monotonic - (wall_ns - (self.started_ns or self.created_ns)) / 1e9

    def end(self, state: str, ended_ns: int, error: str | None = None) -> None:
        self.state, self.ended_ns, self.error = state, ended_ns, error

    def as_dict(self) -> dict[str, Any]:
        """Return the keys of `Record.as_dict`, and ``uncounted_id``."""
        return {
            **record_fields(
                self,
                group=self.group.name,
                group_id=self.group.key.id,
                generation=self.group.generation,
                state=self.state,
                dtypes=self.dtypes,
                reduce_op=self.reduce_op,
                name_source=recorder.name_source,
                waited_ns=None if self.call is None else self.call.waited_ns,
            ),
            "uncounted_id": 0 if self.call is None else self.call.uncounted,
        }

    def _dtypes(self) -> tuple[Sequence[str], int, int]:
        itemsize = ITEMSIZES.get(self.dtypes[0], 1) if self.dtypes else 0
        return self.dtypes, itemsize, len(self.group.key.ranks)
