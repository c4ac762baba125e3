"""The Flight Recorder dumps that ranks of a job over NCCL write when they are told to.

``TORCH_NCCL_DEBUG_INFO_PIPE_FILE`` has each rank make a named pipe. A byte in it has a
thread of torch write the dump of the rank, to the file that torch writes at a timeout,
too. The thread needs no GIL.
"""

from __future__ import annotations

import os
import pwd
import stat
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil

from ..post_mortem.evidence_file import RawFile, UnreadableError
from ..post_mortem.flight_dump import Dump, read_dump
from ..rank_sets import name_ranks
from .jobs import Job, Member
from .launchers import DUMP_FILES, DUMP_PIPE
from .reports import Found, Reports, found_in

__all__ = ["dump_reports"]

KIND = "dumps of torch's Flight Recorder, asked for"
#: Seconds in which all ranks write; the thread looks into its pipe once a second.
PATIENCE = 8.0
#: Bytes of a dump that are read.
LARGEST = 256 << 20
#: Where torch writes without a variable, by version: below the home folder, or as is.
_DEFAULTS = (
    "~/.cache/torch/comm_lib_trace_rank_",
    "~/.cache/torch/nccl_trace_rank_",
    "/tmp/nccl_trace_rank_",
)


def dump_reports(job: Job) -> Reports | None:
    """Ask the ranks of a job for their dumps; None: not all here have a pipe.

    A rank without a dump would look as if it had issued nothing.
    """
    pipes = [(one, pipe) for one in job.members if (pipe := _pipe(one)) is not None]
    if not pipes or len(pipes) < len(job.members):
        return None
    return Reports(f"{KIND} by named pipes", KIND, partial(_fetch, job, pipes))


def _pipe(member: Member) -> Path | None:
    """Return the pipe of a rank, which has to belong to the user of its process."""
    process, stem = member.process, member.process.variables.get(DUMP_PIPE)
    if member.rank is None or not stem:
        return None
    pipe = _within(process.pid, f"{stem}{member.rank}.pipe")
    try:
        found = pipe.lstat()
    except OSError:
        return None
    mine = stat.S_ISFIFO(found.st_mode) and found.st_uid == process.user
    return pipe if mine else None


def _within(pid: int, path: str) -> Path:
    """Return a path as the process `pid` means it, if that may be known."""
    try:
        return Path(psutil.Process(pid).cwd(), path)
    except psutil.Error:
        return Path(path)


def _fetch(job: Job, pipes: Sequence[tuple[Member, Path]]) -> Found:
    elsewhere = set(range(job.world_size or 0)) - {one.rank for one in job.members}
    if elsewhere:
        where = "is on another host" if len(elsewhere) == 1 else "are on other hosts"
        return Found(
            problem=f"{name_ranks(elsewhere)} {where}: have every rank write (echo 1 > "
            "its pipe), and give `rankscope diagnose` the dumps of all"
        )
    waiting: dict[int, Callable[[], Dump | None]] = {}
    for member, pipe in pipes:
        assert member.rank is not None
        # Before it is told to: what was there already is no answer.
        waiting[member.rank] = _written(member)
        try:
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(descriptor, b"1\n")
            finally:
                os.close(descriptor)
        except OSError as error:
            # Nobody reads it: the pipe of an earlier run, or of a rank that has ended.
            return Found(
                problem=f"rank {member.rank} does not take the request: {error}"
            )
    dumps: dict[int, Dump] = {}
    deadline = time.monotonic() + PATIENCE
    while waiting and time.monotonic() < deadline:
        for rank, look in list(waiting.items()):
            dump = look()
            if dump is not None:
                dumps[rank] = dump
                del waiting[rank]
        time.sleep(0.05)
    if waiting:
        late = f"{name_ranks(waiting)} wrote no dump in {PATIENCE:g} s"
        return Found(problem=late)
    return found_in(dumps)


def _written(member: Member) -> Callable[[], Dump | None]:
    """Return what returns the dump that a rank writes from now on, once it is whole."""
    process = member.process
    named = [value for name in DUMP_FILES if (value := process.variables.get(name))]
    paths = [
        _within(process.pid, f"{_at_home(stem, process.user)}{member.rank}")
        for stem in (named[:1] or _DEFAULTS)
    ]
    before = {path: _modified(path) for path in paths}

    def look() -> Dump | None:
        for path in paths:
            modified = _modified(path)
            if modified is None or modified == before[path]:
                continue
            try:
                with path.open("rb") as opened:
                    file = RawFile(str(path), opened.read(LARGEST), modified)
                return read_dump(file)
            except (OSError, UnreadableError, RecursionError):
                return None  # it is being written
        return None

    return look


def _modified(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _at_home(stem: str, user: int) -> str:
    """Return `stem` with the home folder of a user in the place of ``~``."""
    if not stem.startswith("~"):
        return stem
    try:
        return pwd.getpwuid(user).pw_dir + stem[1:]
    except KeyError:
        return stem
