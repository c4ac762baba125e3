"""The ops of the gloo backend: how their arrays get to the side process and back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..devices.shared_memory import Block, Segment, heap
from ..errors import DistBackendError
from .side.wire import Command, Report, Status
from .work import GlooWork

__all__ = [
    "ChunkedOperation",
    "InPlaceOperation",
    "Operation",
    "PlacedOperation",
    "ReceiveOperation",
    "address_of",
]

# How many chunks of a large array are in shared memory at a time.
_SLOTS = 4


class Operation:
    """One op of the side process, from its issue to its last report.

    `number` counts the rank's ops and `sequence` the group's collectives;
    `SideProcess.submit` sets both. `staged` is how many bytes of shared memory
    the op takes for copies, `inputs` are the arrays that it reads.
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
        """Whether what the op needs, besides `staged`, is free."""
        return True

    def start(self) -> bytes:
        """Place the arrays in shared memory; return the message."""
        raise NotImplementedError

    def segments(self) -> Iterable[Segment]:
        """Return the segments that the side process has to map for the message."""
        return ()

    def credits(self) -> Iterable[int]:
        """Yield the chunks whose room is to be announced after the message."""
        return ()

    def written(self) -> list[tuple[int, int]]:
        """Return the regions (start, end) that the end of the started op writes."""
        if self._written is None:
            self._written = self._regions()
        return self._written

    def _regions(self) -> list[tuple[int, int]]:
        return []

    def reads(self, written: Iterable[tuple[int, int]]) -> bool:
        """Whether an input overlaps one of these regions."""
        return any(
            start < address_of(array) + array.nbytes and address_of(array) < end
            for start, end in written
            for array in self.inputs
        )

    def chunk_done(self, chunk: int) -> int | None:
        """Take in that `chunk` is over; return the chunk that now has room, if any."""
        raise NotImplementedError

    def copy_back(self) -> None:
        """Copy the results to the caller's arrays."""

    def collect(self, report: Report) -> None:
        """Take the results of the op, which is over."""
        # After an abort the arrays belong to the user again.
        if report.status == Status.DONE and not self.work.is_completed():
            self.copy_back()

    def finish(self, report: Report) -> None:
        """End the Work with what `report` says."""
        self.work.mark_completed(None, report.started_ns, report.completed_ns)

    def release(self) -> None:
        """Free the shared memory, which the side process uses no more."""


class InPlaceOperation(Operation):
    """An op on one array in shared memory, or on a copy that it makes there.

    `command` lacks what `start` finds out: numbers, segment and offset. `load`:
    the op reads the array; `store`: it writes the array.
    """

    __slots__ = ("_block", "_command", "_load", "_segment", "_store", "_tensor")

    def __init__(
        self,
        work: GlooWork,
        tensor: np.ndarray,
        command: Command,
        *,
        load: bool,
        store: bool,
    ) -> None:
        super().__init__(work, tensor.nbytes, (tensor,) if load else ())
        self._tensor = tensor
        self._command = command
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
        return self._message(offset, slots=0)

    def _message(self, offset: int, slots: int) -> bytes:
        assert self._segment is not None
        return self._command._replace(
            sequence=self.sequence,
            number=self.number,
            segment=self._segment.number,
            offset=offset,
            extra=slots,
        ).pack()

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
    """An in-place op on a large array, copied in and out by chunks while it runs."""

    __slots__ = ("_slots", "_step", "_stored", "_total")

    def __init__(
        self,
        work: GlooWork,
        tensor: np.ndarray,
        command: Command,
        *,
        load: bool,
        store: bool,
        chunk: int,
    ) -> None:
        super().__init__(work, tensor, command, load=load, store=store)
        self._step = chunk
        self._total = -(-tensor.nbytes // self._step)
        self._slots = min(_SLOTS, self._total)
        self.staged = self._slots * self._step
        self._stored = 0

    def start(self) -> bytes:
        self._block = block = heap.allocate(self.staged)
        self._segment = block.segment
        self._copy_in(0)
        return self._message(block.offset, slots=self._slots)

    def credits(self) -> Iterable[int]:
        for chunk in range(1, self._slots):
            self._copy_in(chunk)
            yield chunk

    def chunk_done(self, chunk: int) -> int | None:
        # An interrupt may have this called again with the same chunk.
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
    """An op on several arrays in shared memory, or on copies that it makes there.

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

        The part is `nbytes` from byte `start`. `load`: the op reads it; `store`:
        the op writes it.
        """
        part = array.nbytes - start if nbytes is None else nbytes
        if not part:
            return 0, 0
        address = address_of(array)
        # By object, not by address: an array that is read and one that is written
        # may share memory, and must not share a copy.
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
    """Return the address of `array`; cheaper than ``array.ctypes.data``."""
    return array.__array_interface__["data"][0]
