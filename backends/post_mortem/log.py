"""Reads a log of torchrun, as a stream: the watchdog, tracebacks, ranks that ended."""

from __future__ import annotations

import io
import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from ..observe.evidence import RankEvidence
from ..rank_sets import name_ranks
from .evidence_file import RawFile
from .log_groups import LogGroups
from .log_lines import Source, group_line, split_line, work_line
from .stacks import FAULT_LINE, main_thread, threads_in
from .torchelastic import FailureTable, death_by_signal
from .tracebacks import Raised, TracebackReader, evidence_of
from .user_frames import position

__all__ = ["Log", "LogReader", "read_log"]

#: Bytes of a line; what a longer one has more is read as further lines.
_LINE = 1 << 16
#: Lines of stacks that are kept of one source.
_STACK_LINES = 5000

#: What makes a file a log of ranks, and a line worth to be split.
_SIGNS = re.compile(
    rb"\[rank\d+\]:|ProcessGroupNCCL|Watchdog caught|Root Cause \(first observed"
    rb"|will restart worker group|global_world_sizes=|noticed that process rank \d"
    rb"|Traceback \(most recent call last\)"
)
_FAULT = re.compile(rb"\(most recent call first\):")
_RESTART = re.compile(r"Worker group .*will restart worker group")
_WORLD = re.compile(r"global_world_sizes=\[(\d+)")
_MPIRUN = re.compile(
    r"noticed that process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)"
)


@dataclass
class _Stream:
    """The lines of one source, which those of others interrupt."""

    tracebacks: TracebackReader = field(default_factory=TracebackReader)
    raised: list[Raised] = field(default_factory=list)
    #: The last dump of faulthandler.
    stacks: list[str] = field(default_factory=list)
    in_stacks: bool = False

    def feed(self, text: str) -> None:
        raised = self.tracebacks.feed(text)
        if raised is not None:
            self.raised.append(raised)
        if FAULT_LINE.match(text):
            if not self.in_stacks:
                self.stacks = []
            self.in_stacks = True
        elif text.strip() and not text.startswith("  "):
            self.in_stacks = False
        if self.in_stacks and len(self.stacks) < _STACK_LINES:
            self.stacks.append(text)

    @property
    def is_open(self) -> bool:
        return self.tracebacks.is_open or self.in_stacks


class Log:
    """What the lines of a log have told so far; those of the last attempt alone."""

    def __init__(self) -> None:
        #: Ranks that have a line.
        self.present: set[int] = set()
        self.world_size: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._streams: dict[Source, _Stream] = {}
        self._open: set[Source] = set()
        self._locals: dict[str, set[int]] = {}
        self._groups = LogGroups()
        self._table = FailureTable()
        self._deaths: dict[int, str] = {}

    def feed(self, line: bytes) -> None:
        """Take the next line."""
        if not (
            self._open
            or self._table.is_open
            or _SIGNS.search(line)
            or _FAULT.search(line)
            or self._table.may_begin(line)
        ):
            return
        source, text = split_line(line.decode("utf-8", errors="replace"))
        if source.rank is None and source.local is None and self._table.feed(text):
            return
        if _RESTART.search(text):
            self._begin()
        elif (world := _WORLD.search(text)) is not None:
            self.world_size = int(world[1])
        elif (killed := _MPIRUN.search(text)) is not None:
            rank, number = int(killed[1]), int(killed[2])
            self._deaths[rank] = death_by_signal(rank, number)
        else:
            self._feed_rank(source, text)

    def _feed_rank(self, source: Source, text: str) -> None:
        known = group_line(text)
        rank = source.rank
        if known is not None:
            if rank is None:
                rank = known.rank
            if rank is None and known.is_default:
                rank = known.place
        if rank is not None:
            self.present.add(rank)
            if source.local is not None:
                self._locals.setdefault(source.local, set()).add(rank)
            work = work_line(text)
            if work is not None:
                self._groups.add_work(rank, work)
            if known is not None:
                self._groups.add(rank, known)
        # Torch's excepthook writes the rank before each line; what is not empty.
        stream = self._streams.setdefault(source, _Stream())
        stream.feed(text)
        if stream.is_open:
            self._open.add(source)
        else:
            self._open.discard(source)

    # -- the result --------------------------------------------------------------

    def evidence(self, path: str) -> list[RankEvidence]:
        """Return what the log tells of each rank."""
        size = self._groups.world_size or self.world_size
        found = list(self._groups.evidence(path, self.present, size))
        raised: dict[int, list[Raised]] = {}
        for rank, stream in self._placed():
            if stream.raised:
                raised.setdefault(rank, []).extend(stream.raised)
            processes = threads_in(stream.stacks)
            thread = processes and main_thread(processes[-1].threads)
            if thread:
                line, called = position(thread.frames)
                found.append(
                    RankEvidence(rank, location=line, called=called, source=path)
                )
        for rank, failure in self._table.failures.items():
            if failure.raised is not None and rank not in raised:
                raised[rank] = [failure.raised]
        found += [evidence_of(rank, all_, path) for rank, all_ in raised.items()]
        return found + list(self._ends(path, raised))

    def _ends(
        self, path: str, raised: dict[int, list[Raised]]
    ) -> Iterator[RankEvidence]:
        for rank, death in self._deaths.items():
            yield RankEvidence(rank, death=death, source=path)
        for rank, failure in self._table.failures.items():
            # The watchdog ends its process with SIGABRT: it has waited.
            waited = rank in self._groups.timed_out or rank in raised
            if failure.death and not (waited and failure.exit_code == -signal.SIGABRT):
                process = f"pid {failure.pid}"
                yield RankEvidence(
                    rank, death=failure.death, process=process, source=path
                )

    def _placed(self) -> Iterator[tuple[int, _Stream]]:
        """Yield the streams whose global rank is known."""
        ranks = dict(self._locals)
        for failure in self._table.failures.values():
            ranks.setdefault(f"default{failure.local_rank}", set()).add(failure.rank)
        for source, stream in self._streams.items():
            if source.rank is not None:
                yield source.rank, stream
            elif source.local is not None and len(ranks.get(source.local, ())) == 1:
                yield next(iter(ranks[source.local])), stream

    def note(self) -> str:
        """Return what is to be known about the log: which ranks have no line."""
        notes = []
        seen = self.present | self._table.failures.keys()
        size = self._groups.world_size or self.world_size or max(seen, default=-1) + 1
        absent = sorted(set(range(size)) - seen)
        if seen and absent:
            notes.append(f"it has no line of {name_ranks(absent)}: it may be cut")
        unknown = [
            raised
            for source, stream in self._streams.items()
            if stream not in [one for _, one in self._placed()]
            for raised in stream.raised
            if not raised.text.startswith("torch.distributed.elastic")
            and source.rank is None
        ]
        if unknown and not self._table.failures:
            notes.append(
                f"{unknown[-1].text}: it does not say on which rank that was raised"
            )
        return "; ".join([*notes, *self._groups.notes()])


def read_log(file: BinaryIO) -> Log:
    """Return what a log tells; the log is never in memory as a whole."""
    log = Log()
    for line in _lines(file):
        log.feed(line)
    return log


def _lines(file: BinaryIO) -> Iterable[bytes]:
    return iter(lambda: file.readline(_LINE), b"")


class LogReader:
    """Reads logs of torchrun, of mpirun, and of ranks that NCCL's watchdog ended."""

    kind = "torchrun log"

    def recognises(self, file: RawFile) -> bool:
        """Return whether a line of the file is of a rank or of its launcher."""
        return b"\0" not in file.data[:4096] and _SIGNS.search(file.data) is not None

    def read(self, file: RawFile) -> list[RankEvidence]:
        """Return what the log tells of each rank."""
        log = read_log(io.BytesIO(file.data))
        return log.evidence(file.path)
