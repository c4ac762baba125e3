"""What a rank and its gloo side process say to each other: fixed-size records.

Standard library only: the side process imports this before anything else.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "COMMAND_BYTES",
    "DTYPES",
    "MESSAGE_BYTES",
    "REDUCTIONS",
    "REPORT_BYTES",
    "SIGNATURE_BYTES",
    "Command",
    "Kind",
    "Mailbox",
    "Piece",
    "Progress",
    "Report",
    "Status",
    "Transfer",
    "chunk_bytes",
    "latency_bytes",
    "pack",
    "pack_report",
    "ring_bytes",
]

#: No message is longer: that is room for 1,000 transfers.
MESSAGE_BYTES = 64 << 10

#: In the order of pygloo.glooDataType_t: the number is the position. What is called
#: float16 comes as float32, which both sides know, so that ranks of other dtypes do
#: not match.
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

    ALL_REDUCE, REDUCE, REDUCE_SCATTER, BROADCAST, EXCHANGE = range(5)
    #: Small all_reduce and barrier: the data is in a frame of the mailbox.
    FRAME = 5
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
# In larger groups a receive from everybody for every class is too much.
_MOST_POSTED = 32
#: The start of a command, in which all ranks must agree: up to `sequence`.
SIGNATURE_BYTES = 24


class Command(NamedTuple):
    """One op, or one step of an op, for the side process.

    `peer` is the root, the source or the destination; `length` elements (of a
    reduction) or bytes (of a move) lie in segment `segment` at `offset`;
    `sequence` counts the group's collectives; `number` is the rank's own for
    every op. `target`, `target_offset` is where a reduce-scatter puts its
    result. `extra` is how many slots of one chunk an array passes through (0:
    it is there as a whole), the chunk of a CREDIT, the tag of a message, which
    op of the API an EXCHANGE is; a FRAME is number `target` of class `segment`.
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

    @classmethod
    def unpack(cls, message: memoryview) -> Command:
        """Read a record from the start of `message`."""
        return cls._make(_COMMAND.unpack_from(message))


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
                message[COMMAND_BYTES:]
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
    peer: int
    started_ns: int
    completed_ns: int
    extra: int

    @classmethod
    def unpack(cls, message: bytearray) -> Report:
        """Read a record from the start of `message`."""
        return cls._make(_REPORT.unpack_from(message))


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


class Mailbox:
    """The layout of the memory that small all_reduces pass through.

    A frame is a command with its data. There are classes of frames by size,
    because gloo wants every receive exactly as long as its send, and the
    receives are posted ahead. Of each class there are two frames, so that one
    can be filled while the other is on its way, and a result for each.
    """

    FRAMES = 2

    def __init__(self, size: int) -> None:
        #: The longest array for each class.
        self.rooms: list[int] = []
        nbytes = 4096
        while size <= _MOST_POSTED and nbytes <= latency_bytes(size):
            self.rooms.append(nbytes)
            nbytes *= 2
        #: Bytes of the frames of each class, the command included.
        self.classes = [each + COMMAND_BYTES for each in self.rooms]
        self.nbytes = 2 * self.FRAMES * sum(self.classes) or 4096

    def frame(self, kind: int, number: int) -> int:
        """The offset of frame `number` of class `kind`."""
        before = 2 * self.FRAMES * sum(self.classes[:kind])
        return before + number * self.classes[kind]

    def result(self, kind: int, number: int) -> int:
        """The offset of the result that belongs to that frame."""
        return self.frame(kind, self.FRAMES + number)


def latency_bytes(size: int) -> int:
    """Up to here every rank of `size` sends its array to every other, in one round."""
    return (256 << 10) // max(size - 1, 1)


def ring_bytes(size: int) -> int:
    """From here up gloo's ring is faster than its BCUBE (measured)."""
    return (size // 2) << 20


def chunk_bytes(size: int) -> int:
    """How much of a large array is under way at a time; a multiple of every dtype.

    All ranks must cut alike, whether they copy or not, so it depends on the
    world size alone.
    """
    return min(max(2 * size, 4), 16) << 20


def pack(
    kind: int,
    *,
    dtype: int = 0,
    reduction: int = 0,
    peer: int = 0,
    length: int = 0,
    sequence: int = 0,
    number: int = 0,
    segment: int = 0,
    target: int = 0,
    offset: int = 0,
    target_offset: int = 0,
    extra: int = 0,
    details: Sequence[Transfer] | Sequence[Piece] = (),
) -> bytes:
    """The bytes of one message: a command (see `Command`) and its records."""
    command = _COMMAND.pack(
        kind,
        dtype,
        reduction,
        peer,
        length,
        sequence,
        number,
        segment,
        target,
        offset,
        target_offset,
        extra,
    )
    if not details:
        return command
    return b"".join([command, *(detail.pack() for detail in details)])


def pack_report(
    serial: int,
    number: int,
    status: int,
    peer: int,
    started_ns: int,
    completed_ns: int,
    extra: int,
) -> bytes:
    """The bytes of one report (see `Report`)."""
    return _REPORT.pack(serial, number, status, peer, started_ns, completed_ns, extra)
