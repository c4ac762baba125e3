"""NCCL's own account of its communicators, by its RAS service.

From 2.24 on the RAS threads of NCCL's processes form a network of their own and serve
clients at ``NCCL_RAS_ADDR``, by default ``localhost:28028`` on each host, with lines of
text: ``CLIENT PROTOCOL 2``, ``TIMEOUT seconds``, ``SET FORMAT json`` (2.28 and later)
and ``VERBOSE STATUS``, which is answered by a report up to the end of the connection.
All processes of a host listen at the one address, and the kernel chooses one of them
for each connection: one that is stopped never answers, so that a client tries again.

The threads need neither the GIL nor a GPU: they answer while every rank hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import LibraryFailure

__all__ = [
    "ADDRESS",
    "RasCommunicator",
    "RasRank",
    "address",
    "fetch",
    "parse_report",
    "query",
]

#: The variable that names the address, as NCCL reads it.
ADDRESS = "NCCL_RAS_ADDR"
_PORT = 28028
#: Seconds for the first answer of a connection, after which another one is tried.
_HANDSHAKE = 0.5
#: Bytes of a report at most; a report has some 700 bytes for each rank.
_MOST = 64 << 20

# 2.28.9 leaves out a comma in each missing rank.
_NO_COMMA = re.compile(r'("nvml_dev": -?\d+)(\s*"status":)')

# ncclResult_t, as a report of text names it.
_IN_PROGRESS = 7
_ERRORS = {
    1: "Unhandled CUDA error",
    2: "System error",
    3: "Internal error",
    4: "Invalid argument",
    5: "Invalid usage",
    6: "Remote process error",
}


@dataclass(frozen=True)
class RasRank:
    """One rank of a communicator."""

    #: The rank in the communicator, and the process; -1: not known.
    rank: int
    pid: int
    #: ``running``, ``init``, ``finalize``, ``abort`` or ``error: System error``; of a
    #: rank without data ``unresponsive``, ``dead`` or ``gone`` (from the communicator).
    state: str
    #: Function → how often it was launched; without functions that were never used.
    counts: Mapping[str, int] = field(default_factory=dict)
    #: The process's host and the CUDA device, as a report of JSON has them.
    host: str = ""
    device: int = -1


@dataclass(frozen=True)
class RasCommunicator:
    """One communicator."""

    hash: str
    size: int
    ranks: tuple[RasRank, ...]
    #: The counts of the ranks that are not in `ranks`: a report of text names outliers
    #: only.
    others: Mapping[str, int] = field(default_factory=dict)


def address(variables: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return host and port of the RAS service of this host."""
    value = variables.get(ADDRESS, f"localhost:{_PORT}")
    host, colon, port = value.rpartition(":")
    if not colon or not port.isdecimal():
        raise LibraryFailure(f"{ADDRESS}={value}: expected host:port")
    return host.strip("[]"), int(port)


def query(where: tuple[str, int], seconds: float) -> list[RasCommunicator]:
    """Return the communicators that the RAS service at `where` reports."""
    return parse_report(fetch(where, seconds))


def fetch(where: tuple[str, int], seconds: float) -> str:
    """Return the report of the RAS service at `where`, JSON or text; see `query`."""
    deadline = time.monotonic() + seconds
    place = f"{where[0]}:{where[1]}"
    while True:
        try:
            return _exchange(where, deadline)
        except TimeoutError:
            # A stopped process may have got the connection.
            if time.monotonic() + _HANDSHAKE > deadline:
                raise LibraryFailure(
                    f"NCCL's RAS service at {place} has not answered within "
                    f"{seconds:g} s"
                ) from None
        except OSError as error:
            raise LibraryFailure(
                f"NCCL's RAS service at {place} cannot be reached ({error}); NCCL 2.24 "
                "and later has one, unless NCCL_RAS_ENABLE is 0"
            ) from error


def _exchange(where: tuple[str, int], deadline: float) -> str:
    """Return the report; raise `TimeoutError` if one step takes too long."""
    with (
        socket.create_connection(where, _HANDSHAKE) as connection,
        contextlib.closing(connection.makefile("rb")) as lines,
    ):

        def ask(line: str) -> str:
            connection.sendall(f"{line}\n".encode("ascii"))
            return _line(lines.readline(200), where)

        if not ask("CLIENT PROTOCOL 2").startswith("SERVER PROTOCOL"):
            raise LibraryFailure(f"{where[0]}:{where[1]} is no RAS service of NCCL")
        left = max(1, int(deadline - time.monotonic()) - 1)
        ask(f"TIMEOUT {left}")
        # An older service answers with an error, and with text later.
        ask("SET FORMAT json")
        connection.sendall(b"VERBOSE STATUS\n")
        report = b"".join(_until_end(connection, lines, deadline))
    return report.decode("utf-8", errors="replace")


def _line(line: bytes, where: tuple[str, int]) -> str:
    if not line.endswith(b"\n"):
        raise LibraryFailure(
            f"{where[0]}:{where[1]} closed the connection, or is no RAS service of NCCL"
        )
    return line.decode("ascii", errors="replace").strip()


def _until_end(connection: Any, lines: Any, deadline: float) -> Iterator[bytes]:
    size = 0
    while size < _MOST:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        part = lines.read1(1 << 16)
        if not part:
            return
        size += len(part)
        yield part


# -- the report ------------------------------------------------------------------


def parse_report(text: str) -> list[RasCommunicator]:
    """Return the communicators of a report, JSON or text."""
    try:
        if text.lstrip().startswith("{"):
            report = json.loads(_NO_COMMA.sub(r"\1,\2", text))
            return [_communicator(one) for one in report["communicators"]]
        return _parse_text(text)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LibraryFailure(
            f"the report of NCCL's RAS service cannot be read ({error!r})"
        ) from error


def _communicator(one: Mapping[str, Any]) -> RasCommunicator:
    ranks = [
        RasRank(
            int(rank["rank"]),
            int(rank["pid"]),
            _state(rank["status"]),
            {name: int(n) for name, n in rank["collective_counts"].items() if n},
            *_place(rank),
        )
        for rank in one["ranks"]
    ]
    for rank in one["missing_ranks"]:
        status = rank["status"]
        state = "unresponsive" if status["unresponsive"] else "gone"
        state = "dead" if status["considered_dead"] else state
        lost = int(rank["rank"]), int(rank["pid"]), state
        ranks.append(RasRank(*lost, {}, *_place(rank)))
    ranks.sort(key=lambda rank: rank.rank)
    return RasCommunicator(str(one["hash"]), int(one["size"]), tuple(ranks))


def _place(rank: Mapping[str, Any]) -> tuple[str, int]:
    return str(rank.get("host", "")), int(rank.get("cuda_dev", -1))


def _state(status: Mapping[str, Any]) -> str:
    for key in ("init_state", "async_error"):
        if status[key] not in (0, _IN_PROGRESS):
            return f"error: {_ERRORS.get(status[key], status[key])}"
    if status["abort_flag"]:
        return "abort"
    if status["finalize_called"] or status["destroy_flag"]:
        return "finalize"
    return "init" if status["init_state"] else "running"


_GROUP = re.compile(
    r"\s*(\d+)\s+\d+\s+\d+\s+[\d-]+\s+(\d+)\s+\d+\s+[A-Z]+\s+[A-Z,]+\s*$"
)
_COMMUNICATOR = re.compile(r"#(\d+)-\d+ \(([0-9a-f]+)\) ([A-Z]+)$")
_DIFFERENT = re.compile(r"\s+Communicator ranks have different (\w+) operation counts$")
_SEVERAL = re.compile(
    r"\s+\d+ ranks (?:have launched up to operation (\d+)|have not launched any "
    r"operations|have status (\w+)|reported (.+))$"
)
_ONE = re.compile(
    r"\s+Rank (\d+) (?:has launched up to operation (\d+) |(has not launched any "
    r"operations) |has status (\w+) |reported (.+?) )?"
    r"-- (?:GPU .* managed by process (\d+) on node .*|\[.*\])$"
)


def _parse_text(text: str) -> list[RasCommunicator]:
    """Return the communicators that a report of text says anything about."""
    if "Job summary" not in text:
        raise ValueError("it has no summary of a job")
    sizes: dict[str, int] = {}
    found: dict[str, _Outliers] = {}
    current: _Outliers | None = None
    for line in text.splitlines():
        if (group := _GROUP.match(line)) is not None:
            sizes[group[1]] = int(group[2])
        elif (header := _COMMUNICATOR.match(line)) is not None:
            current = found.setdefault(
                header[2], _Outliers(header[2], sizes.get(header[1], 0))
            )
            current.begin("unresponsive" if header[3] == "INCOMPLETE" else "")
        elif not line.startswith(" "):
            # An empty line, or a paragraph about the job as a whole.
            continue
        elif current is not None:
            current.read(line)
    return [one.communicator() for one in found.values()]


class _Outliers:
    """The ranks of one communicator that a report of text names."""

    def __init__(self, hash_: str, size: int) -> None:
        self._hash, self._size = hash_, size
        self._ranks: dict[int, RasRank] = {}
        self._others: dict[str, int] = {}
        self._function = ""
        # Of the ranks on the next lines.
        self._count: int | None = None
        self._status = ""

    def begin(self, state: str) -> None:
        """Begin a paragraph, whose ranks are in `state`."""
        self._function, self._count, self._status = "", None, state

    def read(self, line: str) -> None:
        if (different := _DIFFERENT.match(line)) is not None:
            self._function, self._count, self._status = different[1], None, ""
        elif (several := _SEVERAL.match(line)) is not None:
            if several[2] or several[3]:
                self._status = _text_state(several[2], several[3])
                return
            self._count = int(several[1] or 0)
            # The most frequent count is the first.
            self._others.setdefault(self._function, self._count)
        elif (one := _ONE.match(line)) is not None:
            rank, pid = int(one[1]), int(one[6] or -1)
            known = self._ranks.get(rank, RasRank(rank, pid, "running"))
            state = _text_state(one[4], one[5]) or self._status or known.state
            count = int(one[2]) if one[2] else 0 if one[3] else self._count
            counts = dict(known.counts)
            if self._function and count is not None:
                counts[self._function] = count
            self._ranks[rank] = RasRank(rank, pid, state, counts)

    def communicator(self) -> RasCommunicator:
        ranks = tuple(self._ranks[rank] for rank in sorted(self._ranks))
        return RasCommunicator(self._hash, self._size, ranks, self._others)


def _text_state(status: str | None, error: str | None) -> str:
    if error:
        return f"error: {error}"
    return {"NOCOMM": "gone"}.get(status or "", (status or "").lower())
