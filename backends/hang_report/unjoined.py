"""Ranks that write no reports yet: found among the processes of this host.

A script on our own groups joins the others in `init_process_group`. Where a rank does
not come to it, its environment says which one it is, and py-spy where it is.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import psutil

from ..attach.jobs import find_jobs
from ..attach.launchers import VARIABLES, stated_rank
from ..attach.process_table import Process, read_table
from ..attach.py_spy import PySpyError, dump, find_py_spy
from ..post_mortem.evidence_file import RawFile, UnreadableError
from ..post_mortem.stacks import frames_of_main
from ..post_mortem.user_frames import Frame, position
from .part import STACKS, write_facts
from .waiting import makes_group

__all__ = ["add_unjoined"]

#: Stacks that are read: each takes a twentieth of a second, and the ranks wait.
_MOST = 16


def add_unjoined(folder: Path, ranks: Collection[int], address: str) -> None:
    """Add what is known of those of `ranks` whose processes are on this host."""
    found = _processes(ranks)
    for number, (rank, process) in enumerate(sorted(found.items())):
        facts: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": process.pid,
            "has_ended": False,
        }
        try:
            if number >= _MOST:
                raise PySpyError(f"{_MOST} other stacks were read")
            stacks = dump(find_py_spy(), process.pid)
            (folder / f"{STACKS}{rank}.txt").write_bytes(stacks)
            frames = frames_of_main(RawFile(f"process {process.pid}", stacks))
            facts["rendezvous"] = _making(frames, address)
        except (PySpyError, UnreadableError) as error:
            facts["unseen"] = str(error)
        write_facts(folder, rank, facts)


def _making(frames: Sequence[Frame], address: str) -> dict[str, Any] | None:
    for place, frame in enumerate(frames):
        if makes_group(frame.file, frame.function):
            line, _ = position(frames[place + 1 :])
            return {
                "call": frame.function,
                "address": address,
                "line": None if line is None else list(line[:3]),
            }
    return None


def _processes(ranks: Collection[int]) -> dict[int, Process]:
    # A script may have set others since.
    begun = psutil.Process().environ()
    own = stated_rank({name: begun[name] for name in VARIABLES & begun.keys()})
    mine = {pid: one for pid, one in read_table().items() if one.user == os.getuid()}
    found: dict[int, Process] = {}
    for process in (one.process for job in find_jobs(mine) for one in job.members):
        stated = process.stated
        if own is None or stated is None or stated.rank not in ranks:
            continue
        alike = (stated.launcher, stated.job) == (own.launcher, own.job)
        if alike and (own.job or process.parent == os.getppid()):
            found[stated.rank] = process
    return found
