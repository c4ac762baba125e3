"""The messages between a rank and its gloo side process: fixed-size records.

Standard library only: the side process imports this before anything else.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "BITWISE",
    "COMMAND_BYTES",
    "DTYPES",
    "ENUM_DTYPES",
    "MESSAGE_BYTES",
    "REDUCTIONS",
    "REPORT_BYTES",
    "SIGNATURE_BYTES",
    "WIDENED",
    "Command",
    "EagerLayout",
    "Kind",
    "Piece",
    "Progress",
    "Report",
    "Status",
    "Transfer",
    "chunk_bytes",
    "eager_bytes",
    "ring_bytes",
]

#: The longest message: a command with 1,000 transfers.
MESSAGE_BYTES = 64 << 10

#: In the order of the libraries' enum of dtypes.
ENUM_DTYPES = (
    "int8",
    "uint8",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
)

#: A dtype's number is its position. The libraries have none of the last three.
DTYPES = (*ENUM_DTYPES, "bfloat16", "int16", "uint16")

#: Data of these dtypes are passed as those. Commands name the dtype itself, so that
#: ranks whose dtypes differ do not match.
WIDENED = {
    "float16": "float32",
    "bfloat16": "float32",
    "int16": "int32",
    "uint16": "uint32",
}

#: In the order of the libraries' ReduceOp, whose bitwise ops throw for every dtype.
REDUCTIONS = ("sum", "product", "min", "max")

#: The side process computes these; their numbers follow those of REDUCTIONS.
BITWISE = ("band", "bor", "bxor")


class Kind:
    """What a command asks for."""

    ALL_REDUCE, REDUCE, REDUCE_SCATTER, BROADCAST, EXCHANGE = range(5)
    #: A small all_reduce or a barrier, whose data lies in an eager buffer.
    EAGER = 5
    SEND, RECV, CREDIT, CLOSE = range(6, 10)


class Status:
    """What a report says of its op: over, one chunk of it over, refused."""

    DONE, CHUNK, SIZE_MISMATCH = range(3)


_COMMAND = struct.Struct("=BBBxiQQQIIQQQ")
_TRANSFER = struct.Struct("=iIIxxxxQQQQ")
_PIECE = struct.Struct("=IxxxxQQ")
_REPORT = struct.Struct("=QQBxxxiQQQ")

COMMAND_BYTES = _COMMAND.size
REPORT_BYTES = _REPORT.size
#: The start of a command, in which all ranks must agree: up to `sequence`.
SIGNATURE_BYTES = 24

# In larger groups a posted receive per peer and size class is too much.
_MOST_POSTED = 32


class Command(NamedTuple):
    """One op, or one step of an op, for the side process.

    `peer` is the root, the source or the destination; `length` elements (of a
    reduction) or bytes (of a move) lie in segment `segment` at `offset`;
    `sequence` counts the group's collectives, `number` the rank's ops. A
    reduce-scatter puts its result into segment `target` at `target_offset`.

    `extra` depends on the kind. In-place ops: the number of slots of one chunk
    each through which the array passes, 0 if the array is there as a whole.
    CREDIT: the number of the chunk. SEND and RECV: the tag. EXCHANGE: which op
    of the API it is. An EAGER command names buffer `target` of size class
    `segment`.
    """

    kind: int
    dtype: int = 0
    reduction: int = 0
    peer: int = 0
    length: int = 0
    sequence: int = 0
    number: int = 0
    segment: int = 0
    target: int = 0
    offset: int = 0
    target_offset: int = 0
    extra: int = 0

    def pack(self, details: Sequence[Transfer] | Sequence[Piece] = ()) -> bytes:
        """Return the message: the command and the records that belong to it."""
        command = _COMMAND.pack(*self)
        if not details:
            return command
        return b"".join([command, *(detail.pack() for detail in details)])

    @classmethod
    def unpack(cls, message: memoryview) -> Command:
        """Read a command from the start of `message`."""
        # Not _make, which costs another 0.1 µs per op.
        return tuple.__new__(cls, _COMMAND.unpack_from(message))


class Transfer(NamedTuple):
    """What one exchange sends to and receives from one peer; 0 bytes: nothing."""

    peer: int
    source: int
    source_offset: int
    source_bytes: int
    target: int
    target_offset: int
    target_bytes: int

    def pack(self) -> bytes:
        """Return the record's bytes."""
        return _TRANSFER.pack(
            self.peer,
            self.source,
            self.target,
            self.source_offset,
            self.source_bytes,
            self.target_offset,
            self.target_bytes,
        )

    @classmethod
    def unpack_all(cls, message: memoryview) -> list[Transfer]:
        """Read the transfers that follow the command in `message`."""
        return [
            cls(peer, source, at, nbytes, target, put, room)
            for peer, source, target, at, nbytes, put, room in _TRANSFER.iter_unpack(
                message[COMMAND_BYTES:]
            )
        ]


class Piece(NamedTuple):
    """Where one rank's part of a reduce-scatter's input lies; `length` in elements."""

    segment: int
    offset: int
    length: int

    def pack(self) -> bytes:
        """Return the record's bytes."""
        return _PIECE.pack(*self)

    @classmethod
    def unpack_all(cls, message: memoryview) -> list[Piece]:
        """Read the pieces that follow the command in `message`."""
        return [cls(*fields) for fields in _PIECE.iter_unpack(message[COMMAND_BYTES:])]


class Report(NamedTuple):
    """What the side process reports on op `number`.

    `serial` counts the reports. `peer` is the sender of what was received,
    `extra` the chunk that is done, or the size of a message that did not fit.
    Times are ``time.time_ns`` around the gloo calls.
    """

    serial: int
    number: int
    status: int
    peer: int = 0
    started_ns: int = 0
    completed_ns: int = 0
    extra: int = 0

    def pack(self) -> bytes:
        """Return the record's bytes."""
        return _REPORT.pack(*self)

    @classmethod
    def unpack(cls, message: bytearray) -> Report:
        """Read a report from the start of `message`."""
        return tuple.__new__(cls, _REPORT.unpack_from(message))


class Progress:
    """A page of shared memory in which the side process notes which ops started.

    Ops start in the order of their numbers, so the last number is enough; the
    start times of the last ops stand in a ring. Nothing is sent: the rank reads
    the page when it needs to know.
    """

    SIZE = 4096
    _RING = 256

    def __init__(self, page: memoryview) -> None:
        self._words = page.cast("Q")

    def start(self, number: int, now_ns: int) -> None:
        """Note that op `number` starts (the side process)."""
        self._words[2 + number % self._RING] = now_ns
        self._words[0] = number

    @property
    def last_started(self) -> int:
        """The number of the last op that has started; 0: none."""
        return self._words[0]

    def started_ns(self, number: int) -> int:
        """When op `number` started; 0 if too many have started since."""
        last = self._words[0]
        at = self._words[2 + number % self._RING]
        return at if number > last - self._RING + 1 else 0

    @property
    def connected(self) -> bool:
        """Whether the side process is connected to all peers."""
        return bool(self._words[1])

    def connect(self) -> None:
        """Note that it is (the side process)."""
        self._words[1] = 1

    def release(self) -> None:
        """Release the view of the page."""
        self._words.release()


class EagerLayout:
    """Where the eager buffers lie in the memory that rank and side process share.

    An eager buffer holds a command and its data. There is a size class for each
    power of two, because gloo wants every receive exactly as long as its send,
    and the receives are posted in advance. Each size class has two buffers, so
    that one can be filled while the other is sent, and a result for each.

    With 2 ranks the size classes are 4 KiB to 256 KiB and take 2 MiB in each rank, and
    the side process has 1 MiB more for what the peers send. With 4 ranks they are 4 KiB
    to 64 KiB, and take 0.5 MiB and 0.5 MiB; with 32 ranks one of 4 KiB and one of 8
    KiB, 48 KiB and 384 KiB. Larger groups have none.
    """

    BUFFERS = 2

    def __init__(self, size: int) -> None:
        #: The longest array of each size class, in bytes.
        self.capacities: list[int] = []
        nbytes = 4096
        while size <= _MOST_POSTED and nbytes <= eager_bytes(size):
            self.capacities.append(nbytes)
            nbytes *= 2
        #: Bytes of a buffer of each size class, the command included.
        self.buffer_bytes = [each + COMMAND_BYTES for each in self.capacities]
        self.nbytes = 2 * self.BUFFERS * sum(self.buffer_bytes) or 4096

    def buffer(self, size_class: int, index: int) -> int:
        """Return the offset of a buffer."""
        before = 2 * self.BUFFERS * sum(self.buffer_bytes[:size_class])
        return before + index * self.buffer_bytes[size_class]

    def result(self, size_class: int, index: int) -> int:
        """Return the offset of the result that belongs to that buffer."""
        return self.buffer(size_class, self.BUFFERS + index)


def eager_bytes(size: int) -> int:
    """The longest array that each of `size` ranks sends to every other in one round.

    A rank sends 256 KiB at most: 256 KiB to one peer, 85 KiB to each of three.
    """
    return (256 << 10) // max(size - 1, 1)


def ring_bytes(size: int) -> int:
    """The size from which gloo's ring is faster than its BCUBE (measured)."""
    return (size // 2) << 20


def chunk_bytes(size: int) -> int:
    """The chunk in which a large array passes; a multiple of every dtype's size.

    All ranks must cut alike, whether they copy or not, so it depends on the
    world size alone.
    """
    return min(max(2 * size, 4), 16) << 20
