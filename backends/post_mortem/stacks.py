"""Stacks of a rank's threads: of py-spy, of faulthandler, of torch's debug server.

They say where the rank's main thread is, which no recorder can say of a rank that never
came. A rank is what the file states, in its name or in its text; else it is not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..observe.evidence import RankEvidence
from .evidence_file import RawFile, UnreadableError, parse_json
from .user_frames import (
    LONGEST,
    MOST,
    Frame,
    position,
    rank_in_name,
    waits_for_threads,
)

__all__ = [
    "FAULT_LINE",
    "FaulthandlerReader",
    "PySpyReader",
    "Thread",
    "frames_of_main",
    "main_thread",
    "threads_in",
]

#: Processes without a rank that a problem tells of.
MOST_TOLD = 8
#: Bytes at the beginning by which a file is recognised; a log may stand before it.
_BEGINNING = 1 << 16

_RANK_HEADER = re.compile(r"=== Rank (\d{1,6}): .* ===$")
_PROCESS = re.compile(r"Process (\d{1,18}): (.*)$")
_PY_SPY_THREAD = re.compile(
    r"Thread ((?:0x)?[\dA-Fa-f]+) \((?:active|idle)[^)]*\)(?:: \"(.*)\")?$"
)
_PY_SPY_FRAME = re.compile(r" {4}(\S.*) \(([^()]+?)(?::(\d{1,9}))?\)$")
#: The line with which faulthandler begins a thread.
FAULT_LINE = re.compile(
    r"(?:(?:Current t|T)hread 0x[\dA-Fa-f]+.*|Stack) \(most recent call first\):$"
)
_FAULT_FRAME = re.compile(r"  File \"(.*)\", line (\d{1,9}|\?\?\?) in (.*)$")
_RANK_OF_PROCESS = re.compile(r"(?:^|\s)(?:RANK=|--rank[= ])(\d{1,6})(?!\S)")
_RANK_LINE = re.compile(r"\s*(?:export )?RANK[=:] ?(\d{1,6})\s*$")
#: The names of Rankscope's own threads begin with it.
_OWN_THREADS = "rankscope-"
#: What a main thread calls that waits for another thread of the program.
_JOINS = re.compile(r"\bjoin of threading\.py$| of concurrent/futures/")
#: py-spy names no thread of a program without `threading`: there the main thread is the
#: first of its process, whose number is the pid.
_PY_SPY_MAIN = "MainThread"


@dataclass
class Thread:
    """One thread: its frames, the innermost first."""

    #: Empty where the source has no names of threads.
    name: str = ""
    frames: list[Frame] = field(default_factory=list)


@dataclass
class _Process:
    """The threads of one process, and what is known of it."""

    rank: int | None = None
    pid: int | None = None
    threads: list[Thread] = field(default_factory=list)
    #: The dump has left out threads.
    cut: bool = False

    def state_rank(self, stated: re.Match[str] | None) -> None:
        if stated is not None and self.rank is None:
            self.rank = int(stated[1])


def main_thread(threads: Iterable[Thread], cut: bool = False) -> Thread | None:
    """Return the main thread: by its name, else the last, as faulthandler writes it."""
    found = list(threads)
    if any(one.name for one in found):
        return next((one for one in found if one.name == _PY_SPY_MAIN), None)
    return None if cut or not found else found[-1]


def threads_in(lines: Iterable[str]) -> list[_Process]:
    """Return the processes whose threads a text shows, whatever stands between."""
    processes = [_Process()]
    thread: Thread | None = None
    for line in lines:
        line = line[:LONGEST].rstrip("\r\n")
        if (header := _RANK_HEADER.match(line)) is not None:
            processes.append(_Process(rank=int(header[1])))
            thread = None
        elif (process := _PROCESS.match(line)) is not None:
            # Below the debug server's header of a rank it is that rank's process.
            if processes[-1].threads or processes[-1].pid is not None:
                processes.append(_Process())
            processes[-1].pid = int(process[1])
            processes[-1].state_rank(_RANK_OF_PROCESS.search(process[2]))
        elif (begins := _PY_SPY_THREAD.match(line)) is not None:
            is_first = begins[1] == str(processes[-1].pid)
            thread = Thread(begins[2] or (_PY_SPY_MAIN if is_first else "unnamed"))
            processes[-1].threads.append(thread)
        elif FAULT_LINE.match(line) is not None:
            thread = Thread()
            processes[-1].threads.append(thread)
        elif thread is None:
            # Variables of the process that somebody wrote above its stack.
            processes[-1].state_rank(_RANK_LINE.match(line))
        elif line.strip() == "..." and not thread.name:
            processes[-1].cut = True
        elif len(thread.frames) < MOST:
            frame = _frame(line, bool(thread.name))
            if frame is not None:
                thread.frames.append(frame)
            elif not line.strip() and not thread.name:
                thread = None
    return [one for one in processes if one.threads]


def _frame(line: str, by_py_spy: bool) -> Frame | None:
    if by_py_spy:
        call = _PY_SPY_FRAME.match(line)
        return call and Frame(call[2], int(call[3] or 0), call[1])
    call = _FAULT_FRAME.match(line)
    if call is None:
        return None
    return Frame(call[1], int(call[2]) if call[2].isdecimal() else 0, call[3])


def _evidence(file: RawFile, processes: list[_Process]) -> list[RankEvidence]:
    named = rank_in_name(file.path)
    found: dict[int, RankEvidence] = {}
    without = []
    for process in processes:
        rank = process.rank
        if rank is None and len(processes) == 1:
            rank = named
        if rank is None:
            without.append(process)
            continue
        frames = _main_frames(process)
        if frames is None:
            continue
        line, called = position(frames)
        pid = None if process.pid is None else f"pid {process.pid}"
        # A later dump of a rank in the same file replaces the one before.
        found[rank] = RankEvidence(
            rank,
            location=line,
            called=called,
            has_left=waits_for_threads(frames) or None,
            process=pid,
            source=file.path,
        )
    if found or not without:
        return list(found.values())
    told = "; ".join(map(_without_rank, without[:MOST_TOLD]))
    raise UnreadableError(f"{told}: put rank_N into its name")


def _without_rank(process: _Process) -> str:
    """Return ``it does not say which rank process 4711 is, which is at data.py:77``."""
    who = "it" if process.pid is None else f"process {process.pid}"
    line, called = position(_main_frames(process) or [])
    place = f", which is at {line}" if line else ""
    called = f" in {called}" if called else ""
    return f"it does not say which rank {who} is{place}{called}"


def _main_frames(process: _Process) -> list[Frame] | None:
    """Return the calls of the main thread, the innermost first; None: there is none.

    Where it waits for a thread to end, those of that thread: the one other thread that
    runs code of the user.
    """
    thread = main_thread(process.threads, process.cut)
    if thread is None:
        return None
    frames = _calls(thread)
    if _JOINS.search(position(frames)[1] or ""):
        others = [
            _calls(one)
            for one in process.threads
            if one is not thread and not one.name.startswith(_OWN_THREADS)
        ]
        working = [one for one in others if any(frame.is_users for frame in one)]
        frames = working[0] if len(working) == 1 else frames
    return frames


def _calls(thread: Thread) -> list[Frame]:
    outermost = [one._replace(outermost=True) for one in thread.frames[-1:]]
    return [*thread.frames[:-1], *outermost]


def frames_of_main(file: RawFile) -> list[Frame]:
    """Return the main thread's calls, as JSON of py-spy; raises `UnreadableError`."""
    for process in _from_json(file.text()):
        if (frames := _main_frames(process)) is not None:
            return frames
    raise UnreadableError("py-spy shows no main thread of Python in it")


class PySpyReader:
    """Reads what ``py-spy dump`` prints, as text or with ``--json``."""

    kind = "py-spy stacks"

    def recognises(self, file: RawFile) -> bool:
        """Return whether the file has the header of py-spy's text, or its objects."""
        start = file.data[:_BEGINNING]
        if start.lstrip()[:1] == b"[":
            return b'"os_thread_id"' in start and b'"frames"' in start
        text = start.decode("utf-8", errors="replace")
        return any(_PY_SPY_THREAD.match(line) for line in text.splitlines())

    def read(self, file: RawFile) -> list[RankEvidence]:
        text = file.text()
        if text.lstrip()[:1] == "[":
            return _evidence(file, _from_json(text))
        return _evidence(file, threads_in(text.splitlines()))


class FaulthandlerReader:
    """Reads the dumps of `faulthandler`, and torch's debug server's of all ranks."""

    kind = "faulthandler stacks"

    def recognises(self, file: RawFile) -> bool:
        text = file.data[:_BEGINNING].decode("utf-8", errors="replace")
        return any(FAULT_LINE.match(line) for line in text.splitlines())

    def read(self, file: RawFile) -> list[RankEvidence]:
        """Return the main thread's line of each rank: of its last dump."""
        return _evidence(file, threads_in(file.text().splitlines()))


def _from_json(text: str) -> list[_Process]:
    listed = parse_json(text)
    processes: dict[int, _Process] = {}
    for one in listed if isinstance(listed, list) else ():
        if not isinstance(one, Mapping) or type(one.get("pid")) is not int:
            continue
        process = processes.setdefault(one["pid"], _Process(pid=one["pid"]))
        about = one.get("process_info")
        if isinstance(about, Mapping) and isinstance(about.get("command_line"), str):
            process.state_rank(_RANK_OF_PROCESS.search(about["command_line"]))
        name = one.get("thread_name")
        if not isinstance(name, str) or not name:
            is_first = one.get("os_thread_id") == one["pid"]
            name = _PY_SPY_MAIN if is_first else "unnamed"
        thread = Thread(name)
        thread.frames.extend(_json_frames(one.get("frames")))
        process.threads.append(thread)
    return list(processes.values())


def _json_frames(frames: Any) -> Iterator[Frame]:
    for one in frames[:MOST] if isinstance(frames, list) else ():
        if not isinstance(one, Mapping):
            continue
        file, line, name = (one.get(key) for key in ("filename", "line", "name"))
        if isinstance(file, str) and type(line) is int and isinstance(name, str):
            yield Frame(file, line, name)
