"""What a rank and its gloo side process say to each other: fixed-size records.

Standard library only: the side process imports this before anything else.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "DTYPES",
    "MESSAGE_BYTES",
    "REDUCTIONS",
    "REPORT_BYTES",
    "Command",
    "Kind",
    "Piece",
    "Progress",
    "Report",
    "Status",
    "Transfer",
    "chunk_bytes",
    "latency_bytes",
    "pack",
]

#: No message is longer: that is room for 1,000 transfers.
MESSAGE_BYTES = 64 << 10

#: In the order of pygloo.glooDataType_t: the number is the position.
DTYPES = (
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

#: In the order of pygloo.ReduceOp, whose bitwise ops throw for every dtype.
REDUCTIONS = ("sum", "product", "min", "max")


class Kind:
    """What a command asks for."""

    SEGMENT, ALL_REDUCE, REDUCE, REDUCE_SCATTER, BROADCAST = range(5)
    EXCHANGE, BARRIER, SEND, RECV, CREDIT, CLOSE = range(5, 11)


class Status:
    """What a report says of its op: over, one chunk of it over, refused."""

    DONE, CHUNK, SIZE_MISMATCH = range(3)


_COMMAND = struct.Struct("=BBBxiQIIQQQQ")
_TRANSFER = struct.Struct("=iIIxxxxQQQQ")
_PIECE = struct.Struct("=IxxxxQQ")
_REPORT = struct.Struct("=QQBxxxiQQQ")

REPORT_BYTES = _REPORT.size


class Command(NamedTuple):
    """One op, or one step of an op, for the side process.

    Ops are numbered as they are issued.
    `peer` is the root, the source or the destination; `length` elements (of a
    reduction) or bytes (of a move) lie in segment `segment` at `offset`;
    `target`, `target_offset` is where a reduce-scatter puts its result. If
    `slots` is not 0, the array passes through that many slots of one chunk
    each and the side process waits for a CREDIT before it uses a slot again.
    """

    kind: int
    number: int = 0
    dtype: int = 0
    reduction: int = 0
    peer: int = 0
    segment: int = 0
    offset: int = 0
    length: int = 0
    target: int = 0
    target_offset: int = 0
    #: Slots of a chunked op, the chunk of a CREDIT, the tag of a message, and
    #: which op of the API an EXCHANGE is.
    extra: int = 0

    def pack(self) -> bytes:
        """The record's bytes."""
        return _COMMAND.pack(
            self.kind,
            self.dtype,
            self.reduction,
            self.peer,
            self.number,
            self.segment,
            self.target,
            self.offset,
            self.target_offset,
            self.length,
            self.extra,
        )

    @classmethod
    def unpack(cls, message: memoryview) -> Command:
        """Read a record from the start of `message`."""
        kind, dtype, reduction, peer, number, segment, target, *rest = (
            _COMMAND.unpack_from(message)
        )
        offset, target_offset, length, extra = rest
        return cls(
            kind,
            number,
            dtype,
            reduction,
            peer,
            segment,
            offset,
            length,
            target,
            target_offset,
            extra,
        )


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
        """The record's bytes."""
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
                message[_COMMAND.size :]
            )
        ]


class Piece(NamedTuple):
    """Where one rank's part of a reduce-scatter's input lies, in elements."""

    segment: int
    offset: int
    length: int

    def pack(self) -> bytes:
        """The record's bytes."""
        return _PIECE.pack(*self)

    @classmethod
    def unpack_all(cls, message: memoryview) -> list[Piece]:
        """Read the pieces that follow the command in `message`."""
        return [cls(*fields) for fields in _PIECE.iter_unpack(message[_COMMAND.size :])]


class Report(NamedTuple):
    """What the side process reports on op `number`.

    `serial` counts the reports. `peer` is the sender of what was received,
    `extra` the chunk that is done, or the size of a message that did not fit.
    Times are ``time.time_ns`` around the gloo calls.
    """

    serial: int
    number: int
    status: int
    peer: int
    started_ns: int
    completed_ns: int
    extra: int

    def pack(self) -> bytes:
        """The record's bytes."""
        return _REPORT.pack(*self)

    @classmethod
    def unpack(cls, message: bytearray) -> Report:
        """Read a record from the start of `message`."""
        return cls(*_REPORT.unpack_from(message))


class Progress:
    """A page of shared memory that says which ops have started, at no cost.

    Ops start in the order of their numbers, so one number tells; the times of
    the last ones stand in a ring. Nothing is sent: the rank looks when asked.
    """

    SIZE = 4096
    _RING = 256

    def __init__(self, page: memoryview) -> None:
        self._words = page.cast("Q")

    def start(self, number: int, now_ns: int) -> None:
        """Note that op `number` begins (the side process)."""
        self._words[2 + number % self._RING] = now_ns
        self._words[0] = number

    @property
    def last_started(self) -> int:
        """The number of the last op that has begun; 0: none."""
        return self._words[0]

    def started_ns(self, number: int) -> int:
        """When op `number` began; 0 if too many have begun since."""
        last = self._words[0]
        at = self._words[2 + number % self._RING]
        return at if number > last - self._RING + 1 else 0

    @property
    def connected(self) -> bool:
        """Whether the connections to all peers stand."""
        return bool(self._words[1])

    def connect(self) -> None:
        """Note that they do (the side process)."""
        self._words[1] = 1

    def release(self) -> None:
        """Let go of the page."""
        self._words.release()


def latency_bytes(size: int) -> int:
    """Up to here every rank of `size` sends its array to every other, in one round."""
    return (256 << 10) // (size - 1) if size > 1 else 0


def chunk_bytes(size: int) -> int:
    """How much of a large array is under way at a time; a multiple of every dtype.

    All ranks must cut alike, whether they copy or not, so it depends on the
    world size alone.
    """
    return min(max(2 * size, 4), 16) << 20


def pack(command: Command, details: Sequence[Transfer] | Sequence[Piece] = ()) -> bytes:
    """The bytes of one message: a command and the records that belong to it."""
    return b"".join([command.pack(), *(detail.pack() for detail in details)])
