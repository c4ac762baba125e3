"""The flight recorder: what this rank issued, in what state, from which line."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, length_hint
from pathlib import Path
from typing import Any

from .op_type import OpType, payload
from .record_fields import Course, Frame, Splits, record_fields
from .reduce_op import ReduceOp
from .state import COMPLETED, SCHEDULED
from .user_code import Place, frame_at, is_ours, users_frame
from .work import Work

__all__ = [
    "Batch",
    "FlightRecorder",
    "GroupCounters",
    "OpCounts",
    "OpEntry",
    "Record",
    "frames_inside",
    "issued_by",
    "recorder",
    "user_frame",
]

#: How many arrays of an op have their size in a status message.
SIZES_SHOWN = 4

#: Kinds of op and array that are counted before they become bytes.
KINDS = 64


def user_frame() -> Frame:
    """Return (file, line, function) of the innermost frame of the user's own code."""
    return frame_at(*_user_places(2)[0])


def _user_places(depth: int) -> tuple[Place, ...]:
    """Return where the user's innermost frame is, and that of what called its function.

    It is outside of this package and of libraries; where there is none, the innermost
    one outside of this package.

    Python searches a line from the beginning of the function or script: at the end of a
    long one that takes longer than all else that an op does here. The search for the
    frames begins `depth` calls above: each one that is looked at costs.
    """
    frame = users_frame(sys._getframe(depth))
    if frame is None:
        frame = sys._getframe(depth)
        while is_ours(frame) and frame.f_back:
            frame = frame.f_back
    code = frame.f_code
    here = code, frame.f_lasti
    # One caller, no more: each costs a third of a microsecond.
    outer = None if code.co_name == "<module>" else users_frame(frame.f_back)
    return (here,) if outer is None else (here, (outer.f_code, outer.f_lasti))


def frames_inside() -> int:
    """Return how many frames of this package the caller is in, itself included."""
    count, frame = 0, sys._getframe(1)
    while is_ours(frame) and frame.f_back:
        count, frame = count + 1, frame.f_back
    return count


#: Thread → what issues its ops: each op looks, and a thread's own attribute costs more.
_issuers: dict[int, str] = {}


@contextlib.contextmanager
def issued_by(name: str) -> Iterator[None]:
    """Have the ops of this thread in the block say that `name` issues them."""
    thread = threading.get_ident()
    _issuers[thread] = name
    try:
        yield
    finally:
        del _issuers[thread]


class OpEntry:
    """What all flight records of an op can tell: ours, and those of torch's groups."""

    __slots__ = ()

    op_type: OpType
    collective_seq_id: int
    p2p_seq_id: int
    peer: int | None
    tag: int | None
    #: The name of the backend that runs the op, if one does.
    backend: str
    timeout: float
    started_ns: int
    ended_ns: int
    #: The user's line, and those that called its function; empty: not known.
    frames: tuple[Frame, ...]
    #: What issued it at that line, where the line does not show it; empty: it does.
    issuer = ""
    sizes: Sequence[Sequence[int]]

    @property
    def seq(self) -> int:
        """``p2p_seq_id`` of a send or recv, else ``collective_seq_id``."""
        return self.p2p_seq_id if self.op_type.is_p2p else self.collective_seq_id

    @property
    def duration(self) -> float | None:
        """Seconds from its start to its end, ``None`` if one is not known."""
        if not self.started_ns or not self.ended_ns:
            return None
        return (self.ended_ns - self.started_ns) / 1e9

    @property
    def frame(self) -> Frame | None:
        """The user's line; ``None``: not known."""
        return self.frames[0] if self.frames else None

    @property
    def message_tag(self) -> int | None:
        """The tag of a send or receive: NCCL has none, it matches in order."""
        return self.tag if self.op_type.is_p2p and self.backend != "nccl" else None

    def brief(self) -> dict[str, Any]:
        """Number, op, the other side and source line: what a status table shows."""
        source = "" if self.frame is None else recorder.name_source(self.frame)
        if self.issuer:
            source += f" in {self.issuer}"
        return {
            "seq": self.seq,
            "op": self.op_type.value,
            "source": source,
            "peer": self.peer,
            "tag": self.message_tag,
        }

    def traffic(self) -> dict[str, Any]:
        """Return ``nbytes`` as nccl-tests counts them, ``sizes`` and ``dtypes``."""
        dtypes, itemsize, ranks = self._dtypes()
        return {
            "nbytes": payload(self.op_type.value, self.sizes, itemsize, ranks),
            "sizes": tuple(map(tuple, self.sizes[:SIZES_SHOWN])),
            "dtypes": tuple(dtypes[:SIZES_SHOWN]),
        }

    def _dtypes(self) -> tuple[Sequence[str], int, int]:
        """Return the names of its dtypes, the first one's size, the ranks' number."""
        raise NotImplementedError


class Record(OpEntry):
    """The flight-recorder entry of one op on this rank.

    Times are ``time.time_ns``; 0 stands for "not yet". `sizes` and `dtypes` are those
    of the inputs and then the outputs. `peer`, a rank in the group, is the root or the
    other side; of a recv from any rank the sender, once it is known. `message` is what
    `GroupCounters.count_message` says of a send or receive.
    """

    __slots__ = (
        "_frames",
        "backend",
        "collective_seq_id",
        "created_ns",
        "device_ns",
        "dtypes",
        "ended_ns",
        "error",
        "generation",
        "issuer",
        "message",
        "op_id",
        "op_type",
        "p2p_seq_id",
        "peer",
        "places",
        "record_id",
        "reduce_op",
        "sizes",
        "splits",
        "started_ns",
        "state",
        "status",
        "tag",
        "timeout",
        "waited",
        "waited_ns",
    )

    def __init__(
        self,
        status: GroupCounters,
        op_type: OpType,
        arrays: Sequence[Any],
        peer: int | None,
        timeout: float,
        backend: str = "",
        reduce_op: ReduceOp | None = None,
        tag: int | None = None,
        splits: Splits | None = None,
    ) -> None:
        self.status = status
        self.generation = status.generation
        self.op_type = op_type
        # Not the arrays: the ring would keep them alive.
        self.sizes = [array.shape for array in arrays]
        self.dtypes = [array.dtype for array in arrays]
        self.peer = peer
        self.reduce_op = reduce_op
        self.tag = tag
        self.splits = splits
        self.timeout = timeout
        self.backend = backend
        # Above this method, the dispatcher's, and the op's own function.
        self.places = _user_places(4)
        self._frames: tuple[Frame, ...] = ()
        self.issuer = _issuers.get(threading.get_ident(), "") if _issuers else ""
        self.state = SCHEDULED
        self.created_ns = time.time_ns()
        self.started_ns = 0
        self.ended_ns = 0
        self.device_ns: tuple[int, int] | None = None
        self.error: str | None = None
        self.waited = False
        #: When a thread began to wait for the op while it was in flight.
        self.waited_ns = 0
        self.record_id = -1
        self.collective_seq_id = self.p2p_seq_id = self.op_id = -1
        self.message: int | None = None

    def number(self, *, first: bool = True) -> None:
        """Take the next sequence number, and an ``op_id``."""
        status = self.status
        is_p2p = self.op_type.is_p2p
        if first:
            if is_p2p:
                status.p2p_seq += 1
            else:
                status.collective_seq += 1
        if is_p2p:
            self.message = status.count_message(self, 1)
        status.op_id += 1
        self.collective_seq_id = status.collective_seq
        self.p2p_seq_id = status.p2p_seq
        self.op_id = status.op_id

    @property
    def frames(self) -> tuple[Frame, ...]:  # type: ignore[override]
        """The user's line, and those that called its function."""
        if not self._frames:
            self._frames = tuple(frame_at(*place) for place in self.places)
        return self._frames

    @property
    def group(self) -> str:
        return self.status.name

    def started(self, work: Work) -> None:
        """Note that `work` began to execute."""
        self.state = work._state
        self.started_ns = work.started_ns
        self.status.started = self
        recorder.changed()

    def ended(self, work: Work) -> None:
        """Note that `work` is over."""
        status, op_id = self.status, self.op_id
        self.state = state = work._state
        self.started_ns = started_ns = work.started_ns
        self.ended_ns = ended_ns = work.completed_ns
        self.device_ns = work.device_ns
        if started_ns or state is COMPLETED:
            latest = status.started
            if latest is None or latest.op_id < op_id:
                status.started = self
        if state is COMPLETED:
            status.completed = self
            itemsize = self.dtypes[0].itemsize if self.dtypes else 0
            status.counts.add(self.op_type.method, itemsize, self.sizes)
            if self.peer is None and self.op_type is OpType.RECV:
                self.peer = work._result
        else:
            self.error = str(work._exception)
        if started_ns:
            status.busy_ns += ended_ns - started_ns
        # A call that waits from the beginning counts it itself: see `Work.finish`.
        if self.waited_ns > self.created_ns:
            status.blocked_ns += ended_ns - self.waited_ns
        status.in_flight.pop(op_id, None)
        for listener in recorder._listeners:
            listener()

    def identity(self) -> dict[str, Any]:
        """Return rank, group, op and sequence number as attributes of an error."""
        return {
            "rank": self.status.rank,
            "group": self.group,
            "op": self.op_type.value,
            "sequence_number": self.seq if self.seq >= 0 else None,
        }

    def describe(self) -> str:
        """``all_reduce #14 of group 'default' on rank 2 (cell 7 line 3)``."""
        issuer = f" in {self.issuer}" if self.issuer else ""
        line = f"{recorder.name_source(self.frames[0])}{issuer}"
        return (
            f"{self.op_type.value} #{self.seq} of group {self.group!r} "
            f"on rank {self.status.rank} ({line})"
        )

    def as_dict(self) -> dict[str, Any]:
        """The record as plain data (JSON-able)."""
        return record_fields(
            self,
            group=self.group,
            group_id=self.status.group_id,
            generation=self.generation,
            state=self.state.value,
            dtypes=[dtype.name for dtype in self.dtypes],
            reduce_op=self.reduce_op and self.reduce_op.name.lower(),
            name_source=recorder.name_source,
            waited_ns=self.waited_ns,
            device_ns=self.device_ns,
        )

    def course(self) -> Course:
        """Return where it belongs, and the state of the op."""
        is_p2p, state = self.op_type.is_p2p, self.state.value
        return Course(self.status.group_id, self.generation, is_p2p, state)

    def _dtypes(self) -> tuple[Sequence[str], int, int]:
        itemsize = self.dtypes[0].itemsize if self.dtypes else 0
        return [dtype.name for dtype in self.dtypes], itemsize, len(self.status.ranks)


class Batch:
    """The records of ops that one backend call runs together."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        first = records[0]
        self.status = first.status
        self.op_id = first.op_id
        self.collective_seq_id = first.collective_seq_id
        self.p2p_seq_id = first.p2p_seq_id
        self.peer = first.peer
        self.timeout = first.timeout
        self.created_ns = first.created_ns
        self.waited = False

    @property
    def waited_ns(self) -> int:
        """As `Record.waited_ns`, of each op."""
        return self.records[0].waited_ns

    @waited_ns.setter
    def waited_ns(self, at_ns: int) -> None:
        for record in self.records:
            record.waited_ns = at_ns

    def started(self, work: Work) -> None:
        """Note that `work` began to execute."""
        for record in self.records:
            record.started(work)

    def ended(self, work: Work) -> None:
        """Note that `work` is over."""
        self.records[0].ended(work)
        blocked_ns = self.status.blocked_ns
        for record in self.records[1:]:
            record.ended(work)
        # One wait, for all of them.
        self.status.blocked_ns = blocked_ns

    def identity(self) -> dict[str, Any]:
        """As `Record.identity`, of the first op."""
        return self.records[0].identity()

    def describe(self) -> str:
        """``64 coalesced all_reduce #14 of group 'default' on rank 2 (…)``."""
        return f"{len(self.records)} coalesced {self.records[0].describe()}"

    def brief(self) -> dict[str, Any]:
        """As `Record.brief`, of the first op."""
        return self.records[0].brief()

    def traffic(self) -> dict[str, Any]:
        """As `Record.traffic`, of the first op."""
        return self.records[0].traffic()


class OpCounts:
    """How many ops of each kind a group has completed on this rank, and their bytes.

    The bytes are multiplied when somebody asks: a training issues the same few ops
    again and again, and an op costs one look-up.
    """

    __slots__ = ("_kinds", "_totals", "_whole", "ranks")

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        # Op, size of an element, and shapes → how many.
        self._kinds: dict[Hashable, list[int]] = {}
        self._totals: dict[str, tuple[int, int]] = {}
        self._whole = True

    def add(self, op: str, itemsize: int, sizes: Any) -> None:
        """Count an op, named as in records; `sizes` are tuples."""
        one = len(sizes) == 1
        kind = (op, itemsize, sizes[0]) if one else (op, itemsize, *sizes)
        try:
            # A cell, so that the key is hashed once.
            self._kinds[kind][0] += 1
        except KeyError:
            self._kinds[kind] = [1]
            if len(self._kinds) > KINDS:
                kinds, self._kinds = self._kinds, {}
                self._totals = self._sum(kinds)

    def forget(self) -> None:
        """Count no more: ops have completed that nobody has seen."""
        self._whole = False

    def totals(self) -> dict[str, tuple[int, int]]:
        """Return op → how many have completed, and bytes as nccl-tests counts them."""
        return self._sum(dict(self._kinds)) if self._whole else {}

    def _sum(self, kinds: Any) -> dict[str, tuple[int, int]]:
        found = dict(self._totals)
        for (op, itemsize, *sizes), (count,) in kinds.items():
            ops, nbytes = found.get(op, (0, 0))
            moved = payload(op, sizes, itemsize, self.ranks) or 0
            found[op] = ops + count, nbytes + count * moved
        return found


@dataclass(slots=True, eq=False)
class GroupCounters:
    """Counters of one group on this rank, and where it is."""

    name: str
    #: The global rank of this process, as messages show it.
    rank: int
    generation: int
    #: The global ranks of the group.
    ranks: Sequence[int]
    #: What identifies the group where several have the name; the name by default.
    group_id: str = ""
    # Sequence numbers start at 1, as in PyTorch; 0 says "none yet".
    collective_seq: int = 0
    p2p_seq: int = 0
    op_id: int = 0
    #: Sends (else receives), peer and tag → how many were issued.
    messages: dict[tuple[bool, int | None, int | None], int] = field(
        default_factory=dict
    )
    #: The last ops.
    enqueued: Record | None = None
    started: Record | None = None
    completed: Record | None = None
    #: The Works in flight by ``op_id``, oldest first.
    in_flight: dict[int, Work] = field(default_factory=dict)
    #: Ns from start to end of all ops that are over, and in which threads waited.
    busy_ns: int = 0
    blocked_ns: int = 0
    #: The ops that have completed, and their bytes.
    counts: OpCounts = field(init=False)
    #: Whether the caller has observed the abort; see `async_errors`.
    abort_observed: bool = False

    def __post_init__(self) -> None:
        self.counts = OpCounts(len(self.ranks))
        self.group_id = self.group_id or self.name

    def count_message(self, record: Record, by: int) -> int:
        """Count a send or receive; return which one it is with its peer and tag.

        The k-th receive of a rank from another takes the k-th that this one sends it
        with the tag. 0: one from any rank was issued before, which may take it.
        """
        sends = record.op_type is OpType.SEND
        tag = record.message_tag
        key = sends, record.peer, tag
        self.messages[key] = count = self.messages.get(key, 0) + by
        return count if sends or not self.messages.get((False, None, tag)) else 0


#: More than the generations of any group.
_APART = 1_000_000


class FlightRecorder:
    """A ring of the last `size` records of this process."""

    def __init__(self, size: int = 2000) -> None:
        self._ring: list[Record | None] = [None] * size
        # Several groups may issue ops at once, from threads of their own: a call of C
        # gives each record its number, where a lock would cost an op 0.3 µs.
        self._numbers = iter(range(sys.maxsize))
        #: The op hooks, in the order in which they were added; each op calls them.
        self.hooks: tuple[Any, ...] = ()
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._namer: Callable[[str, int], str] | None = None

    def add(self, record: Record) -> None:
        """Number `record` and put it into the ring, in the place of the oldest."""
        record.record_id = number = next(self._numbers)
        ring = self._ring
        ring[number % len(ring)] = record
        record.status.enqueued = record
        for listener in self._listeners:
            listener()

    def withdraw(self, record: Record) -> None:
        """Take out `record`, the last one of its group, with its sequence number.

        Its op was refused: no other rank waits for it, and the next op of the group
        has to have the number that the other ranks give it.
        """
        status = record.status
        place = record.record_id % len(self._ring)
        if self._ring[place] is record:
            self._ring[place] = None
        status.op_id -= 1
        if record.op_type.is_p2p:
            status.p2p_seq -= 1
            status.count_message(record, -1)
        else:
            status.collective_seq -= 1
        earlier = [one for one in self.records() if one.status is status]
        status.enqueued = earlier[-1] if earlier else None
        self.changed()

    def set_apart(self, group_id: str) -> None:
        """Give records of `group_id` generations below 0: the group is made anew."""
        for record in self.records():
            if record.status.group_id == group_id:
                record.generation -= _APART

    @property
    def count(self) -> int:
        """How many records were added since the last `clear`."""
        return sys.maxsize - length_hint(self._numbers)

    def records(self) -> list[Record]:
        """The records in the ring, oldest first."""
        found = [record for record in self._ring.copy() if record is not None]
        return sorted(found, key=attrgetter("record_id"))

    def dump(self) -> list[dict[str, Any]]:
        """All records as plain data, oldest first."""
        return [record.as_dict() for record in self.records()]

    def clear(self) -> None:
        """Remove all records."""
        self._ring = [None] * len(self._ring)
        self._numbers = iter(range(sys.maxsize))

    def changed(self) -> None:
        """Call the listeners: a record, or the state of a group, has changed."""
        for listener in self._listeners:
            listener()

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener()`` at every transition; it must be cheap.

        It runs on whatever thread made the transition, with locks held: it
        may set a flag, no more. Returns a function that removes it.
        """
        self._listeners = (*self._listeners, listener)

        def cancel() -> None:
            self._listeners = tuple(x for x in self._listeners if x is not listener)

        return cancel

    def set_source_namer(self, namer: Callable[[str, int], str] | None) -> None:
        """Name source lines by ``namer(file, line)``, e.g. ``cell 7 line 3``."""
        self._namer = namer

    def name_source(self, frame: Frame) -> str:
        """Return the text that messages and tables show for `frame`."""
        file, line, _ = frame
        if self._namer is not None:
            return self._namer(file, line)
        return f"{Path(file).name}:{line}"


#: The recorder of this process.
recorder = FlightRecorder()
