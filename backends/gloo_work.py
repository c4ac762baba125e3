"""Works of the gloo backend, and how their arrays get to the side process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import DistBackendError
from .gloo_protocol import (
    Report,
    Status,
    chunk_bytes,
    pack,
)
from .shared import Block, Segment, heap
from .work import OpType, Work

if TYPE_CHECKING:
    from .gloo_process import SideProcess

__all__ = [
    "ChunkedOperation",
    "GlooWork",
    "InPlaceOperation",
    "Operation",
    "PlacedOperation",
    "ReceiveOperation",
    "address_of",
]

# How many chunks of a large array are in shared memory at a time.
_SLOTS = 4


class GlooWork(Work):
    """A Work whose waiter reads the side process's reports itself."""

    __slots__ = ("detached", "pending", "side")

    def __init__(self, op_type: OpType, result: Any, side: SideProcess) -> None:
        super().__init__(op_type, result)
        self.side = side
        #: Whether the poller is to read its report.
        self.detached = False
        #: Whether its report is still to come.
        self.pending = True

    def _block(self, timeout: float | None) -> bool:
        return self.side.wait(self, timeout)

    def block_on_event(self, timeout: float | None) -> bool:
        """Wait for somebody else to end this Work."""
        return super()._block(timeout)

    def detach(self) -> None:
        self.side.detach(self)


class Operation:
    """One op on its way through the side process.

    `number` counts the rank's ops and `sequence` the group's collectives; the
    side process sets both. `staged` is how many bytes of shared memory the op
    may take, `inputs` are the arrays it reads.
    """

    __slots__ = ("_written", "inputs", "number", "sequence", "staged", "work")

    def __init__(
        self, work: GlooWork, staged: int = 0, inputs: Sequence[np.ndarray] = ()
    ) -> None:
        self.work = work
        self.staged = staged
        self.inputs = inputs
        self.number = 0
        self.sequence = 0
        self._written: list[tuple[int, int]] | None = None

    def has_room(self) -> bool:
        """Whether what it takes, besides `staged`, is free."""
        return True

    def start(self) -> bytes:
        """Make the arrays ready; return the message."""
        raise NotImplementedError

    def segments(self) -> Iterable[Segment]:
        """What the side process must have mapped to read the message."""
        return ()

    def credits(self) -> Iterable[int]:
        """Chunks of room to announce after the message."""
        return ()

    def written(self) -> list[tuple[int, int]]:
        """The regions (start, end) that are copied to when the started op is over."""
        if self._written is None:
            self._written = self._regions()
        return self._written

    def _regions(self) -> list[tuple[int, int]]:
        return []

    def reads(self, written: Iterable[tuple[int, int]]) -> bool:
        """Whether an input lies, partly, in one of these regions."""
        return any(
            start < address_of(array) + array.nbytes and address_of(array) < end
            for start, end in written
            for array in self.inputs
        )

    def chunk_done(self, chunk: int) -> int | None:
        """Chunk `chunk` is over; return the number of one there is now room for."""
        raise NotImplementedError

    def copy_back(self) -> None:
        """Put the results where they belong."""

    def collect(self, report: Report) -> None:
        """Take the results: the op is over."""
        # If it was aborted meanwhile, the arrays are the user's again.
        if report.status == Status.DONE and not self.work.is_completed():
            self.copy_back()

    def finish(self, report: Report) -> None:
        """End the Work as `report` says."""
        self.work.mark_completed(None, report.started_ns, report.completed_ns)

    def release(self) -> None:
        """Give the shared memory back; the side process does not use it any more."""


class InPlaceOperation(Operation):
    """An op on one array in shared memory, or on a copy there for its time.

    `load`: the array is read; `store`: it is written. The other arguments are
    those of the command.
    """

    __slots__ = (
        "_block",
        "_dtype",
        "_kind",
        "_length",
        "_load",
        "_peer",
        "_reduction",
        "_segment",
        "_store",
        "_tensor",
    )

    def __init__(
        self,
        work: GlooWork,
        tensor: np.ndarray,
        kind: int,
        dtype: int,
        reduction: int,
        peer: int,
        length: int,
        load: bool,
        store: bool,
    ) -> None:
        super().__init__(work, tensor.nbytes, (tensor,) if load else ())
        self._tensor = tensor
        self._kind, self._dtype, self._reduction = kind, dtype, reduction
        self._peer, self._length = peer, length
        self._load, self._store = load, store
        self._block: Block | None = None
        self._segment: Segment | None = None

    def start(self) -> bytes:
        tensor = self._tensor
        address, nbytes = address_of(tensor), tensor.nbytes
        found = heap.find(address, nbytes)
        if found is not None:
            self._segment, offset = found
        else:
            self._block = block = heap.allocate(nbytes)
            self._segment, offset = block.segment, block.offset
            if self._load:
                ctypes.memmove(block.address, address, nbytes)
        return self._message(offset, 0)

    def _message(self, offset: int, slots: int) -> bytes:
        assert self._segment is not None
        return pack(
            self._kind,
            dtype=self._dtype,
            reduction=self._reduction,
            peer=self._peer,
            length=self._length,
            sequence=self.sequence,
            number=self.number,
            segment=self._segment.number,
            offset=offset,
            extra=slots,
        )

    def segments(self) -> Iterable[Segment]:
        return () if self._segment is None else (self._segment,)

    def _regions(self) -> list[tuple[int, int]]:
        if self._block is None or not self._store:
            return []
        start = address_of(self._tensor)
        return [(start, start + self._tensor.nbytes)]

    def copy_back(self) -> None:
        if self._block is not None and self._store:
            ctypes.memmove(
                address_of(self._tensor), self._block.address, self._tensor.nbytes
            )

    def release(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            heap.free(block)


class ChunkedOperation(InPlaceOperation):
    """As that, on a large array that is copied in and out while the op runs."""

    __slots__ = ("_slots", "_step", "_stored", "_total")

    def __init__(self, size: int, work: GlooWork, tensor: np.ndarray, *command: Any):
        super().__init__(work, tensor, *command)
        self._step = chunk_bytes(size)
        self._total = -(-tensor.nbytes // self._step)
        self._slots = min(_SLOTS, self._total)
        self.staged = self._slots * self._step
        self._stored = 0

    def start(self) -> bytes:
        self._block = block = heap.allocate(self.staged)
        self._segment = block.segment
        self._copy_in(0)
        return self._message(block.offset, self._slots)

    def credits(self) -> Iterable[int]:
        for chunk in range(1, self._slots):
            self._copy_in(chunk)
            yield chunk

    def chunk_done(self, chunk: int) -> int | None:
        # An interrupt may have this called again with a chunk that is through.
        if chunk == self._stored:
            self._copy_out(chunk)
            self._stored += 1
        following = chunk + self._slots
        if following >= self._total:
            return None
        self._copy_in(following)
        return following

    def copy_back(self) -> None:
        for chunk in range(self._stored, self._total):
            self._copy_out(chunk)

    def _copy_in(self, chunk: int) -> None:
        if self._load:
            outside, inside, nbytes = self._where(chunk)
            ctypes.memmove(inside, outside, nbytes)

    def _copy_out(self, chunk: int) -> None:
        if self._store and not self.work.is_completed():
            outside, inside, nbytes = self._where(chunk)
            ctypes.memmove(outside, inside, nbytes)

    def _where(self, chunk: int) -> tuple[int, int, int]:
        assert self._block is not None
        start = chunk * self._step
        return (
            address_of(self._tensor) + start,
            self._block.address + chunk % self._slots * self._step,
            min(self._step, self._tensor.nbytes - start),
        )


class PlacedOperation(Operation):
    """An op on several arrays in shared memory, or on copies there for its time.

    ``build(self)`` places the arrays and returns the message.
    """

    __slots__ = ("_back", "_blocks", "_build", "_copied", "_loaded", "_places")

    def __init__(
        self,
        work: GlooWork,
        build: Callable[[PlacedOperation], bytes],
        staged: int = 0,
        inputs: Sequence[np.ndarray] = (),
    ) -> None:
        super().__init__(work, staged, inputs)
        self._build = build
        self._blocks: list[Block] = []
        self._places: dict[int, tuple[Segment, int]] = {}
        self._copied: set[int] = set()
        self._loaded: set[tuple[int, int]] = set()
        self._back: list[tuple[int, int, int]] = []

    def start(self) -> bytes:
        return self._build(self)

    def segments(self) -> Iterable[Segment]:
        return {segment for segment, _ in self._places.values()}

    def _regions(self) -> list[tuple[int, int]]:
        return [(target, target + nbytes) for target, _, nbytes in self._back]

    def place(
        self,
        array: np.ndarray,
        start: int = 0,
        nbytes: int | None = None,
        *,
        load: bool = False,
        store: bool = False,
    ) -> tuple[int, int]:
        """Return the segment and offset of a part of `array`, or of a copy of it.

        The part is `nbytes` from byte `start`. `load`: its content is needed;
        `store`: it is what the op writes.
        """
        part = array.nbytes - start if nbytes is None else nbytes
        if not part:
            return 0, 0
        address = address_of(array)
        # By the object, not the address: an array that is read and another one
        # that is written may share memory, and must not share a copy.
        known = self._places.get(id(array))
        if known is None:
            known = heap.find(address, array.nbytes)
            if known is None:
                block = heap.allocate(array.nbytes)
                self._blocks.append(block)
                self._copied.add(id(array))
                known = block.segment, block.offset
            self._places[id(array)] = known
        segment, offset = known
        if id(array) in self._copied:
            inside, outside = segment.address + offset + start, address + start
            if load and (inside, part) not in self._loaded:
                self._loaded.add((inside, part))
                ctypes.memmove(inside, outside, part)
            if store:
                self._back.append((outside, inside, part))
        return segment.number, offset + start

    def copy_back(self) -> None:
        for target, source, nbytes in self._back:
            ctypes.memmove(target, source, nbytes)

    def release(self) -> None:
        blocks, self._blocks = self._blocks, []
        for block in blocks:
            heap.free(block)


class ReceiveOperation(PlacedOperation):
    """A recv of `nbytes`: the Work's result is the rank that sent."""

    __slots__ = ("_nbytes",)

    def __init__(
        self, work: GlooWork, build: Callable[[PlacedOperation], bytes], nbytes: int
    ) -> None:
        super().__init__(work, build)
        self._nbytes = nbytes

    def finish(self, report: Report) -> None:
        work = self.work
        if report.status == Status.SIZE_MISMATCH:
            work.mark_failed(
                DistBackendError(
                    f"{work.describe()}: the message from rank {report.peer} of the "
                    f"group has {report.extra} bytes, the array given to recv has "
                    f"{self._nbytes}"
                )
            )
            return
        work.mark_completed(report.peer, report.started_ns, report.completed_ns)


def address_of(array: np.ndarray) -> int:
    """Where `array` begins; cheaper than ``array.ctypes.data``."""
    return array.__array_interface__["data"][0]
