"""Python tracebacks in a log, and exceptions that are consequences of a hang."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..observe.evidence import RankEvidence
from .user_frames import MOST, Frame, position

__all__ = [
    "BEGINS",
    "Raised",
    "TracebackReader",
    "evidence_of",
    "late_at_barrier",
    "raised_in",
]

#: Characters of an exception's text that are kept.
_LONGEST = 300

BEGINS = "Traceback (most recent call last):"
_FRAME = re.compile(r"\s*File \"(.*)\", line (\d{1,9})(?:, in (.*))?$")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:: .*|:)?$")
#: What a rank raises because another one is late, is dead or has left.
_CONSEQUENCES = re.compile(
    r"timed? ?out waiting|wait timeout|timeout waiting for key|monitoredbarrier"
    r"|timed out after \d+ seconds waiting for clients|store based barrier"
    # Of the store: rank 0 is not there, or not at that address.
    r"|client socket has (?:timed out|failed to connect)"
    r"|^RuntimeError: (?:socket timeout|broken pipe|connection reset by peer)"
    # A launcher has sent it a signal.
    r"|\bSIGTERMException|\bSignalException"
    r"|watchdog caught|remote process exited|communicator was aborted|ncclRemoteError"
    r"|recvValue|application timeout|^KeyboardInterrupt"
    # Ours of an op that another rank has ended, or did not come to.
    r"|Dist(?:Aborted|Timeout|StoreTimeout)Error|\bConnectionLostError"
    r"|the connection to the store at \S+ was lost",
    re.IGNORECASE,
)
#: What NCCL says of its own host, and where a connection to another rank is lost.
_OF_EITHER = re.compile(
    r"unhandled system error|internal error - please report"
    r"|nccl(?:System|Internal)Error"
)
#: The same of connections, but those of a data loader are its own.
_LOST = re.compile(
    r"connection (?:was )?(?:likely )?(?:closed|reset|refused|aborted)|broken pipe"
    r"|socket timeout",
    re.IGNORECASE,
)
_BETWEEN_RANKS = re.compile(r"gloo|c10d|nccl|TCPStore|Dist\w+Error", re.IGNORECASE)
#: The key by which a rank of gloo is found, in the group of all ranks.
_KEY = re.compile(r"timeout after \d+ms, keys: /?default_pg/0//\w+//\d+/(\d{1,6})$")
#: Of NCCL, the rank that makes the id of the communicator there, and never did.
_UNIQUE_ID = re.compile(
    r"retrieving ncclUniqueId from \[(\d{1,6})\] via c10d key-value store by key '\d+',"
    r".*timeout after \d+ms, keys: /?default_pg/0//"
)
#: What gloo says of a monitored barrier: its first rank, and the others. All ranks in
#: it are those of the group.
_LATE = re.compile(r"\[Rank 0\]: Ranks? ([\d, ]+) failed to pass monitoredBarrier")
_REACHED = re.compile(r"Rank (\d{1,6}) successfully reached monitoredBarrier")


class Raised(NamedTuple):
    """An exception: its text, and the frames of its traceback, the innermost first."""

    text: str
    frames: tuple[Frame, ...]

    @property
    def is_consequence(self) -> bool:
        """Whether the rank gave up waiting for others: it is no cause."""
        if _CONSEQUENCES.search(self.text) is not None:
            return True
        return bool(_LOST.search(self.text) and _BETWEEN_RANKS.search(self.text))

    @property
    def awaited(self) -> int | None:
        """The rank that had not joined the group of all ranks, if the text names it."""
        found = _KEY.search(self.text) or _UNIQUE_ID.search(self.text)
        return None if found is None else int(found[1])


def may_be_consequence(exception: str) -> bool:
    """Return whether nothing in an exception tells if it is a consequence."""
    return _OF_EITHER.search(exception) is not None


def late_at_barrier(
    found: Iterable[tuple[int, Raised]], world_size: int | None
) -> set[int]:
    """Return who has not come to a monitored barrier, as the exceptions of ranks tell.

    Only if it is certain which ranks are meant: groups have them in ascending order, so
    that those before a rank whose places are alike have their own numbers, too.
    """
    late: set[int] = set()
    #: The ranks below this one are their own places.
    certain = 0
    for rank, raised in found:
        named, reached = _LATE.search(raised.text), _REACHED.search(raised.text)
        if named is not None:
            late |= {int(one) for one in named[1].split(",") if one.strip()}
        elif reached is not None and int(reached[1]) != rank:
            return set()
        elif reached is not None:
            certain = max(certain, rank)
    if late and max(late) + 1 == world_size:
        return late
    return late if late and max(late) < certain else set()


class TracebackReader:
    """Finds the tracebacks in the lines of one rank; other lines may be between."""

    def __init__(self) -> None:
        self._frames: list[Frame] | None = None

    @property
    def is_open(self) -> bool:
        """Whether a traceback has begun, and its exception has not been seen."""
        return self._frames is not None

    @property
    def is_fresh(self) -> bool:
        """Whether a traceback has begun, and nothing of it has been seen."""
        return self._frames == []

    @staticmethod
    def is_frame(line: str) -> bool:
        return _FRAME.match(line) is not None

    def feed(self, line: str) -> Raised | None:
        """Take the next line; return the exception that ends a traceback."""
        if line.strip() == BEGINS:
            self._frames = []
        elif self._frames is None:
            return None
        elif (call := _FRAME.match(line)) is not None:
            if len(self._frames) < MOST:
                outermost = not self._frames
                name = call[3] or "<module>"
                self._frames.append(Frame(call[1], int(call[2]), name, outermost))
        elif line[:1].strip() and _EXCEPTION.match(line):
            frames, self._frames = self._frames, None
            return Raised(line[:_LONGEST].removesuffix(":"), tuple(reversed(frames)))
        return None


def raised_in(lines: Iterable[str]) -> Raised | None:
    """Return the last exception of a text: that which left the program."""
    reader, found = TracebackReader(), None
    for line in lines:
        found = reader.feed(line) or found
    return found


def evidence_of(rank: int, raised: Sequence[Raised], source: str) -> RankEvidence:
    """Return what the exceptions of a rank tell of it, in their order.

    One that is no consequence has ended the rank; else it says where the rank waited.
    """
    causes = [one for one in raised if not one.is_consequence]
    line, called = position((causes or raised)[-1].frames)
    if not causes:
        return RankEvidence(rank, location=line, called=called, source=source)
    text = causes[-1].text
    return RankEvidence(rank, exception=text, exception_line=line, source=source)
