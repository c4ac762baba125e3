"""The Flight Recorder of every rank, from torch's debug server where a job has one.

``torch.distributed.debug.start_debug_server`` starts it in a child of rank 0, which
fetches from the servers of all ranks. These need no GIL: they answer while ranks hang.
"""

from __future__ import annotations

import http.client
from functools import partial

import psutil

from ..post_mortem.evidence_file import RawFile, UnreadableError
from ..post_mortem.files import answers_on
from ..post_mortem.flight_dump import read_dump
from .jobs import Job
from .py_spy import PySpyError, dump
from .reports import Found, Reports, found_in, ports_of

__all__ = ["debug_reports", "read_page"]

KIND = "torch's debug server"
#: Seconds for its answer, and bytes of it at most.
TIMEOUT, LARGEST = 10.0, 256 << 20
#: A frame of the server's process.
_FRAME = b"torch/distributed/debug/_frontend.py"


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
        page = answer.read(LARGEST)
    except (OSError, http.client.HTTPException) as error:
        return Found(problem=f"it has not answered: {error}")
    finally:
        connection.close()
    if answer.status != http.client.OK:
        return Found(problem=f"it answered {answer.status} {answer.reason}")
    return read_page(page)


def read_page(page: bytes) -> Found:
    """Return what the Flight Recorders of the ranks tell that are on the page."""
    # Of a rank that has not answered, it has the error.
    answers = {
        rank: text for rank, text in answers_on(page).items() if text[:1] == b"{"
    }
    if not answers:
        return Found(problem="no rank has answered it")
    try:
        dumps = {
            rank: read_dump(RawFile(f"rank_{rank}", text))
            for rank, text in answers.items()
        }
    except (UnreadableError, RecursionError) as error:
        return Found(problem=str(error))
    return found_in(dumps)
