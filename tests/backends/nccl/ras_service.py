"""A RAS service as NCCL's processes run it: its protocol and its reports."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["TEXT", "Server", "missing", "rank", "report", "service"]

#: A job of three processes: rank 1 is one AllReduce behind, rank 2 does not answer.
FUNCTIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
FINE = {
    "init_state": 0,
    "async_error": 0,
    "finalize_called": False,
    "destroy_flag": False,
    "abort_flag": False,
}


def _process(number: int, pid: int) -> dict[str, Any]:
    return {
        "rank": number,
        "host": "10.0.0.1",
        "pid": pid,
        "cuda_dev": number,
        "nvml_dev": number,
    }


def rank(number: int, pid: int, all_reduces: int, **status: Any) -> dict[str, Any]:
    return {
        **_process(number, pid),
        "status": {**FINE, **status},
        "collective_counts": {**dict.fromkeys(FUNCTIONS, 0), "AllReduce": all_reduces},
    }


def missing(number: int, pid: int, *, unresponsive: bool, dead: bool) -> dict[str, Any]:
    return {
        **_process(number, pid),
        "status": {"unresponsive": unresponsive, "considered_dead": dead},
    }


def report(ranks: list[dict[str, Any]], lost: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "nccl_version": "2.28.9",
        "cuda_runtime_version": 13000,
        "cuda_driver_version": 13000,
        "timestamp": "2026-01-01 00:00:00",
        "communicators_count": 1,
        "communicators": [
            {
                "hash": "0xab",
                "secondary_hash": "0x1:0x2",
                "size": len(ranks) + len(lost),
                "ranks_count": len(ranks),
                "missing_ranks_count": len(lost),
                "ranks": ranks,
                "missing_ranks": lost,
            }
        ],
        "ras": {"collection_time_sec": 0.01, "timeouts_count": 0},
    }


JSON = json.dumps(
    report(
        [rank(0, 100, 15), rank(1, 101, 14)],
        [missing(2, 102, unresponsive=True, dead=False)],
    ),
    indent=2,
)

#: The same job, as versions before 2.28 report it.
TEXT = """\
NCCL version 2.27.5 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          3            1          3        3

Communicators... (2.01s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         2         3         2   RUNNING  INCOMPLETE,MISMATCH

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 102 on node h managing GPU 2

#0-0 (00000000000000ab) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 2 -- GPU 2 (NVML 5) managed by process 102 on node h

Warnings
========

TIMEOUT
  Encountered 1 communication timeout while gathering communicator data

#0-0 (00000000000000ab) MISMATCH
  Communicator ranks have different AllReduce operation counts
  Rank 0 has launched up to operation 15 -- GPU 0 managed by process 100 on node h
  Rank 1 has launched up to operation 14 -- GPU 1 managed by process 101 on node h

"""


class Server:
    """A RAS service of this host; `talk` serves each connection. Port 0: a free one."""

    def __init__(self, talk: Callable[[Any, Any], None], port: int = 0) -> None:
        self._listening = socket.create_server(("127.0.0.1", port))
        self._talk = talk
        self.connections = 0
        self.lines: list[str] = []
        self.address = self._listening.getsockname()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            with connection, connection.makefile("rwb") as lines:
                try:
                    self._talk(self, lines)
                except OSError:
                    # The client has closed the connection.
                    continue

    def ask(self, lines: Any) -> str:
        line = lines.readline().decode().strip()
        self.lines.append(line)
        return line

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(10)


def service(
    knows_json: bool, said: Callable[[], str] = lambda: JSON
) -> Callable[[Any, Any], None]:
    """The protocol; a version before 2.28 does not know of formats."""

    def talk(server: Server, lines: Any) -> None:
        body = TEXT
        while line := server.ask(lines):
            if line.startswith("CLIENT PROTOCOL"):
                answer = "SERVER PROTOCOL 2\n"
            elif line.startswith("TIMEOUT "):
                answer = "OK\n"
            elif line == "SET FORMAT json" and knows_json:
                answer, body = "OK\n", said()
            elif line == "VERBOSE STATUS":
                # In parts, as the service sends it.
                middle = len(body) // 2
                lines.write(body[:middle].encode())
                lines.flush()
                answer = body[middle:]
            else:
                answer = f"ERROR: Unknown command {line}\n"
            lines.write(answer.encode())
            lines.flush()
            if line == "VERBOSE STATUS":
                return

    return talk
