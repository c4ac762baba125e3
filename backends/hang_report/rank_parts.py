"""What ranks that watch themselves for a hang tell of it: their records, on this host.

Those of a job to which nobody can attach, as its rank 0 has ended, or has never come,
tell it too; so do those on Rankscope's own groups. The process that asks is none of
them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ..attach.jobs import Job
from ..attach.reports import Found, Reports
from ..post_mortem.report import examine
from .conclusion import add_absent_ranks
from .meeting import Meeting, find_meeting
from .reports import AFTERMATH, LOOK, await_parts

__all__ = ["rank_parts"]

KIND = "records of ranks"


def rank_parts(job: Job) -> Reports | None:
    """Ask the ranks of a job; None: they do not watch themselves."""
    key = find_meeting([one.process.pid for one in job.members])
    if key is None:
        return None
    return Reports("what the ranks record", KIND, partial(_fetch, key))


def _fetch(key: str) -> Found:
    try:
        with _parts_of(key) as folder:
            evidence = examine([folder]).evidence
    except OSError as error:
        return Found(problem=f"the ranks were not asked: {error}")
    progress = {
        (one.rank, group): [(op.order, op.state) for op in known.ops if op.in_flight]
        for one in evidence.ranks.values()
        for group, known in one.groups.items()
    }
    return Found(tuple(evidence.ranks.values()), evidence.groups, progress)


@contextlib.contextmanager
def _parts_of(key: str) -> Iterator[Path]:
    """Have the ranks write their parts into a folder, which is there for the block.

    Those that have ended have left words there. It is the folder of the last report if
    that tells of the end of the job: the ops that failed are not in flight any more.
    `key` is what `find_meeting` returns. Raises `OSError` where that cannot be.
    """
    # No rank has such a number; another process may look, too.
    own = -os.getpid()
    folder = Path(tempfile.mkdtemp(prefix="rankscope-look-"))
    try:
        meeting = Meeting(key, own)
        try:
            number, told = _next_request(meeting)
            if told is not None:
                yield told
                return
            request = {
                "folder": str(folder),
                "rank": own,
                "reason": LOOK,
                "at": time.time(),
            }
            while not meeting.put(f"request_{number}", request):
                number += 1
            meeting.ring()
            await_parts(folder, meeting)
            add_absent_ranks(folder, meeting)
            yield folder
        finally:
            meeting.leave_nothing()
    finally:
        # Afterwards: a rank that is late removes what it wrote for nobody.
        shutil.rmtree(folder, ignore_errors=True)


def _next_request(meeting: Meeting) -> tuple[int, Path | None]:
    """Return the number of the next request, and the folder of a report of the end."""
    told = None
    for number in itertools.count(1):
        request = meeting.get(f"request_{number}")
        if request is None:
            break
        result = meeting.get(f"result_{number}")
        if result is not None and request["reason"] != "stall":
            lately = result["folder"] and time.time() - request["at"] < AFTERMATH
            told = Path(request["folder"]) if lately else None
    return number, told
