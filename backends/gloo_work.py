"""Works of the gloo backend, and how their arrays get to the side process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import DistBackendError
from .gloo_protocol import Command, Kind, Report, Status, chunk_bytes
from .shared import Block, Segment, heap
from .work import OpType, Work

if TYPE_CHECKING:
    from .gloo_process import SideProcess

__all__ = ["ChunkedOperation", "GlooWork", "Operation", "address_of", "credit"]

# How many chunks of a large array are in shared memory at a time.
_SLOTS = 4


class GlooWork(Work):
    """A Work whose waiter reads the side process's reports itself."""

    __slots__ = ("detached", "side")

    def __init__(self, op_type: OpType, result: Any, side: SideProcess) -> None:
        super().__init__(op_type, result)
        self.side = side
        self.detached = False

    def _block(self, timeout: float | None) -> bool:
        return self.side.wait(self, timeout)

    def block_on_event(self, timeout: float | None) -> bool:
        """Wait for somebody else to end this Work."""
        return super()._block(timeout)

    def detach(self) -> None:
        self.side.detach(self)


class Operation:
    """One op on its way through the side process.

    ``build(self)`` places the arrays and returns the message for the side
    process; `staged` is how many bytes of shared memory that may take, `inputs`
    are the arrays it reads, `nbytes` is the size of a message.
    """

    def __init__(
        self,
        work: GlooWork,
        build: Callable[[Operation], bytes],
        staged: int = 0,
        inputs: Sequence[np.ndarray] = (),
        nbytes: int = 0,
    ) -> None:
        self.work = work
        self.number = 0
        self.staged = staged
        self.segments: set[Segment] = set()
        self._build = build
        self._inputs = inputs
        self._nbytes = nbytes
        self._blocks: list[Block] = []
        self._places: dict[int, tuple[Segment, int]] = {}
        self._copied: set[int] = set()
        self._loaded: set[tuple[int, int]] = set()
        self._back: list[tuple[int, int, int]] = []

    def reads(self, written: Iterable[tuple[int, int]]) -> bool:
        """Whether an input lies, partly, in one of the regions (start, end)."""
        return any(
            start < address_of(array) + array.nbytes and address_of(array) < end
            for start, end in written
            for array in self._inputs
        )

    def copies_back(self) -> list[tuple[int, int]]:
        """The regions (start, end) that are written when the op is over."""
        return [(target, target + nbytes) for target, _, nbytes in self._back]

    def start(self) -> bytes:
        """Place the arrays; return the message."""
        return self._build(self)

    def credits(self) -> list[int]:
        """Chunks of room to announce after the message."""
        return []

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
            found = heap.find(address, array.nbytes)
            known = found or self.reserve(array.nbytes)[:2]
            self._places[id(array)] = known
            self.segments.add(known[0])
            if found is None:
                self._copied.add(id(array))
        segment, offset = known
        if id(array) in self._copied:
            inside, outside = segment.address + offset + start, address + start
            if load and (inside, part) not in self._loaded:
                self._loaded.add((inside, part))
                ctypes.memmove(inside, outside, part)
            if store:
                self._back.append((outside, inside, part))
        return segment.number, offset + start

    def reserve(self, nbytes: int) -> Block:
        """Shared memory for the time of the op."""
        block = heap.allocate(nbytes)
        self._blocks.append(block)
        self.segments.add(block.segment)
        return block

    def chunk_done(self, chunk: int) -> int | None:
        """Chunk `chunk` is over; return the number of one there is now room for."""
        raise DistBackendError(f"{self.work.describe()} has no chunk {chunk}")

    def finish(self, report: Report) -> None:
        """Copy the results to where they belong and end the Work."""
        work = self.work
        if report.status == Status.SIZE_MISMATCH:
            work.mark_failed(self._wrong_size(report))
            return
        if not work.is_completed():
            self._copy_back()
        result = report.peer if work.op_type is OpType.RECV else None
        work.mark_completed(result, report.started_ns, report.completed_ns)

    def release(self) -> None:
        """Give the shared memory back; the side process does not use it any more."""
        blocks, self._blocks = self._blocks, []
        for block in blocks:
            heap.free(block)

    def _copy_back(self) -> None:
        for target, source, nbytes in self._back:
            ctypes.memmove(target, source, nbytes)

    def _wrong_size(self, report: Report) -> DistBackendError:
        return DistBackendError(
            f"{self.work.describe()}: the message from rank {report.peer} of the group "
            f"has {report.extra} bytes, the array given to recv has {self._nbytes}"
        )


class ChunkedOperation(Operation):
    """An op on one large array that is copied in and out while it runs."""

    def __init__(
        self,
        work: GlooWork,
        command: Command,
        array: np.ndarray,
        size: int,
        *,
        load: bool,
        store: bool,
    ) -> None:
        self._command = command
        super().__init__(work, _nothing, 0, (array,) if load else (), array.nbytes)
        self._array = array  # alive until the op is over
        self._address = address_of(array)
        self._step = chunk_bytes(size)
        self._total = -(-self._nbytes // self._step)
        self._slots = min(_SLOTS, self._total)
        self._load, self._store = load, store
        self._stored = 0
        self.staged = self._slots * self._step

    def start(self) -> bytes:
        self._block = self.reserve(self.staged)
        self._copy_in(0)
        return self._command._replace(
            number=self.number,
            segment=self._block.segment.number,
            offset=self._block.offset,
            extra=self._slots,
        ).pack()

    def credits(self) -> list[int]:
        for chunk in range(1, self._slots):
            self._copy_in(chunk)
        return list(range(1, self._slots))

    def copies_back(self) -> list[tuple[int, int]]:
        end = self._address + self._nbytes
        return [(self._address, end)] if self._store else []

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

    def _copy_back(self) -> None:
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
        start = chunk * self._step
        return (
            self._address + start,
            self._block.address + chunk % self._slots * self._step,
            min(self._step, self._nbytes - start),
        )


def _nothing(_: Operation) -> bytes:
    raise NotImplementedError("a chunked op builds its message itself")


def address_of(array: np.ndarray) -> int:
    """Where `array` begins; cheaper than ``array.ctypes.data``."""
    return array.__array_interface__["data"][0]


def credit(number: int, chunk: int) -> bytes:
    """The message that says that op `number` has room for `chunk`."""
    return Command(Kind.CREDIT, number, extra=chunk).pack()
