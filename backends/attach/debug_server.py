"""The Flight Recorder of every rank, from torch's debug server where a job has one.

``torch.distributed.debug.start_debug_server`` starts it in a child of rank 0, which
fetches from the servers of all ranks. These need no GIL: they answer while ranks hang.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Mapping
from functools import partial

import psutil

from ..post_mortem.evidence_file import RawFile, UnreadableError
from ..post_mortem.flight_dump import read_dump
from .jobs import Job
from .py_spy import PySpyError, dump
from .reports import Found, Reports, found_in, ports_of

__all__ = ["debug_reports", "ranks_in"]

KIND = "torch's debug server"
#: Seconds for its answer, and bytes of it at most.
TIMEOUT, LARGEST = 10.0, 256 << 20
#: A frame of the server's process.
_FRAME = b"torch/distributed/debug/_frontend.py"
#: What the page has of each rank; where one did not answer, its state comes first.
_RANK = re.compile(r"<h2>Rank (\d{1,6}): [^<]*</h2>\s*<pre>(\{.*?\n?\})</pre>", re.S)


def debug_reports(job: Job, py_spy: str) -> Reports | None:
    """Ask the debug server of a job; None: it has none on this host.

    `py_spy` tells the server from what else a job may serve: nothing is sent to another
    port.
    """
    for member in job.members:
        if member.rank != 0:
            continue
        inherited = ports_of(member.process.pid)
        for child in _children(member.process.pid):
            for port in ports_of(child) - inherited:
                if _serves(child, py_spy):
                    fetched = partial(_fetch, port)
                    return Reports(f"{KIND} at port {port}", KIND, fetched)
    return None


def _children(pid: int) -> list[int]:
    try:
        return [one.pid for one in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def _serves(pid: int, py_spy: str) -> bool:
    try:
        return _FRAME in dump(py_spy, pid)
    except PySpyError:
        return False


def _fetch(port: int) -> Found:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        connection.request("GET", "/fr_trace_json")
        answer = connection.getresponse()
        page = answer.read(LARGEST).decode("utf-8", errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return Found(problem=f"it has not answered: {error}")
    finally:
        connection.close()
    if answer.status != http.client.OK:
        return Found(problem=f"it answered {answer.status} {answer.reason}")
    return _read(ranks_in(page))


def ranks_in(page: str) -> dict[int, str]:
    """Return rank → its Flight Recorder as JSON, of the server's page."""
    return {int(rank): text for rank, text in _RANK.findall(page)}


def _read(texts: Mapping[int, str]) -> Found:
    if not texts:
        return Found(problem="no rank has answered it")
    try:
        dumps = {
            rank: read_dump(RawFile(f"rank_{rank}", text.encode()))
            for rank, text in texts.items()
        }
    except (UnreadableError, RecursionError) as error:
        return Found(problem=str(error))
    return found_in(dumps)
