"""What torchrun says of ranks that ended: its table of failures, its error files."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from ..observe.evidence import RankEvidence
from .evidence_file import RawFile, UnreadableError, parse_json
from .log_lines import host_in
from .tracebacks import Raised, TracebackReader, evidence_of, raised_in
from .user_frames import position, rank_in_name

__all__ = ["ErrorFileReader", "Failure", "FailureTable"]

#: Bytes of an error file at most.
_LARGEST = 16 << 20

_FIELD = re.compile(r" {2}(time|host|rank|exitcode|error_file|traceback) *: (.*)$")
_RAW_FIELDS = (b"  time ", b"  host ", b"  rank ")
_ROOT_CAUSE = "Root Cause (first observed failure):"
_RANK = re.compile(r"(\d{1,6}) \(local_rank: (\d{1,6})\)")
#: The row by which it is seen what a launcher has put before each line of the table.
_RANK_ROW = re.compile(r"((?:.{0,300}\S )?)  rank +: \d{1,6} \(local_rank: ")
_EXIT = re.compile(r"(-?\d{1,9}) +\(pid: (\d{1,18})\)")
_BORDER = re.compile(r"(?:=+|-+|\[\d+\]:)$")
#: What a launcher sends to the ranks that are left, and what the watchdog ends with.
_SENT = (signal.SIGTERM, signal.SIGINT)


@dataclass
class Failure:
    """One row of the table: how one rank ended."""

    rank: int
    #: As torchrun's ``--tee`` names it: `Source.local`.
    local: str
    exit_code: int = 0
    pid: int = -1
    raised: Raised | None = None

    @property
    def was_ended(self) -> bool:
        """Whether the launcher has ended the rank, which was alive."""
        return -self.exit_code in _SENT and self.raised is None

    @property
    def death(self) -> str | None:
        """Return how a signal killed the rank; None: no signal, or a launcher's."""
        if self.exit_code >= 0 or -self.exit_code in _SENT:
            return None
        return death_by_signal(self.rank, -self.exit_code)


def death_by_signal(rank: int, number: int) -> str:
    """Return ``rank 2 was killed by signal 9 (SIGKILL)``."""
    try:
        name = f" ({signal.Signals(number).name})"
    except ValueError:
        name = ""
    return f"rank {rank} was killed by signal {number}{name}"


class FailureTable:
    """Reads the table that torchrun prints when ranks have failed."""

    def __init__(self) -> None:
        #: Rank → its failure.
        self.failures: dict[int, Failure] = {}
        self._failure: Failure | None = None
        self._traceback: TracebackReader | None = None
        #: What a launcher has put before each line, and whose lines these are: two
        #: hosts may write their tables at the same time.
        self._prefix = re.compile("")
        self._host = ""

    def feed(self, line: str) -> bool:
        """Take the next line of a log; return whether it is one of a table."""
        row = _RANK_ROW.match(line) if "(local_rank: " in line else None
        if row is not None:
            # A time may have more or fewer digits in the next line.
            words = [r"[^ ]+"] * len(row[1].split())
            self._prefix = re.compile(f" *{' +'.join(words)} " if words else "")
        if (prefix := self._prefix.match(line)) is not None:
            line = line[prefix.end() :]
            host = host_in(prefix[0])
            if host != self._host:
                if row is None:
                    return False
                self._host, self._traceback = host, None
        if line.strip() == _ROOT_CAUSE:
            self._failure = self._traceback = None
            return True
        found = _FIELD.match(line)
        if found is None:
            return self._traceback is not None and self._continue(line)
        name, value = found.groups()
        if name == "rank" and (rank := _RANK.match(value)) is not None:
            local = f"{self._host}default{rank[2]}"
            self._failure = Failure(int(rank[1]), local)
            self.failures[self._failure.rank] = self._failure
        elif self._failure is None:
            return name in ("time", "host")
        elif name == "exitcode" and (code := _EXIT.match(value)) is not None:
            self._failure.exit_code, self._failure.pid = int(code[1]), int(code[2])
        elif name == "traceback":
            self._traceback = TracebackReader()
            self._traceback.feed(value)
        return True

    @property
    def is_open(self) -> bool:
        return self._failure is not None

    @staticmethod
    def may_begin(lines: bytes) -> bool:
        """Whether a table may begin in lines that are not decoded yet."""
        return lines.startswith(_RAW_FIELDS) or b"(local_rank: " in lines

    def _continue(self, line: str) -> bool:
        """Take a line of the traceback, which the table indents by two spaces."""
        if _BORDER.match(line.strip()):
            self._failure = self._traceback = None
            return True
        if self._traceback is not None and self._failure is not None:
            raised = self._traceback.feed(line.removeprefix("  "))
            self._failure.raised = raised or self._failure.raised
        return True


class ErrorFileReader:
    """Reads ``error.json``, which `torch.distributed.elastic` leaves for a rank."""

    kind = "torchelastic error file"

    def recognises(self, file: RawFile) -> bool:
        start = file.data[:4096].lstrip()
        return start[:1] == b"{" and start[1:].lstrip().startswith(b'"message"')

    def read(self, file: RawFile, rank: int | None = None) -> list[RankEvidence]:
        """Return the exception, of `rank` or of the rank that its name states."""
        raised = _error(file.text(_LARGEST))
        rank = rank_in_name(file.path) if rank is None else rank
        if rank is None:
            line, _ = position(raised.frames)
            raise UnreadableError(
                f"{raised.text}{f' at {line}' if line else ''}: it does not say which "
                "rank that was (the folder's number is a local rank)"
            )
        return [evidence_of(rank, [raised], file.path)]


def _error(text: str) -> Raised:
    told = parse_json(text)
    message = told.get("message") if isinstance(told, dict) else None
    if isinstance(message, str):
        return Raised(message[:300], ())
    if not isinstance(message, Mapping) or not isinstance(message.get("message"), str):
        raise UnreadableError("its message is none of torchelastic's")
    more = message.get("extraInfo")
    stack = more.get("py_callstack") if isinstance(more, Mapping) else None
    raised = raised_in(stack.splitlines()) if isinstance(stack, str) else None
    return raised or Raised(message["message"][:300], ())
