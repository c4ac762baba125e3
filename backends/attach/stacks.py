"""Where processes are: their stacks, read twice, as lines of the user's program."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..observe.evidence import SourceLine
from ..post_mortem.evidence_file import RawFile, UnreadableError
from ..post_mortem.stacks import frames_of_main
from ..post_mortem.user_frames import Frame, position
from .process_table import Process
from .py_spy import PySpyError, dump

__all__ = ["Stack", "read_stacks", "spawned_rank"]

#: Programs of py-spy that run at once: each takes some 20 ms of a core.
_AT_ONCE = min(8, os.cpu_count() or 1)
#: Bytes of a source file from which a line is shown, and characters of the line.
_LARGEST_SOURCE, _LONGEST_LINE = 4 << 20, 80
#: It has the call of `os.fork`.
_FORK = "multiprocessing/popen_fork.py"
#: The functions that `torch.multiprocessing` calls with the index of a process, and
#: their argument with it.
_SPAWNED = ("torch/multiprocessing/spawn.py", "_wrap", "i")


@dataclass(frozen=True)
class Stack:
    """Where the main thread of a process is."""

    line: SourceLine | None = None
    #: What it called there: a function of a library, or else the text of the line.
    called: str | None = None
    #: Two stacks of it differ.
    moves: bool = False
    #: Why there is no stack, and what to do; empty: there is one.
    problem: str = ""


def read_stacks(
    processes: Iterable[Process], py_spy: str, told: Callable[[int], None]
) -> dict[int, Stack]:
    """Return the place of each process, by its pid.

    Each is read twice, with all others in between: what hangs has not moved. `told` is
    called with the number of stacks that were read, after each.
    """
    ordered = list(processes)
    looks: list[list[list[Frame] | str]] = []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            for _ in range(2):
                looks.append([])
                for one in pool.map(lambda each: _frames(each, py_spy), ordered):
                    looks[-1].append(one)
                    told(sum(map(len, looks)))
        finally:
            # An interrupt ends what has not begun.
            pool.shutdown(cancel_futures=True)
    return {
        process.pid: _stack(process, first, second)
        for process, first, second in zip(ordered, *looks, strict=True)
    }


def _frames(process: Process, py_spy: str) -> list[Frame] | str:
    try:
        data = dump(py_spy, process.pid)
        frames = frames_of_main(RawFile(f"process {process.pid}", data))
    except (PySpyError, UnreadableError) as error:
        return str(error)
    # Below the fork stand the calls of the parent.
    forked = (n for n, one in enumerate(frames) if one.file.endswith(_FORK))
    return frames[: next(forked, len(frames))] or frames


def _stack(
    process: Process, first: list[Frame] | str, second: list[Frame] | str
) -> Stack:
    if isinstance(second, str):
        # Also where it has ended after the first look.
        return Stack(problem=second)
    line, called = position(second)
    if line is not None and called is None and (text := _source(line, process)):
        called = f"`{text}`"
    return Stack(line, called, moves=first != second)


def _source(line: SourceLine, process: Process) -> str:
    """Return the text of a line, unless the file is newer than the process."""
    # As the process sees its files: in a container they are others.
    base = "root" if os.path.isabs(line.file) else "cwd"
    path = f"/proc/{process.pid}/{base}/{line.file.lstrip('/')}"
    try:
        status = os.stat(path)
        if status.st_size > _LARGEST_SOURCE or status.st_mtime > process.started:
            return ""
        # A program names its files as it likes, and root may read those of others.
        its_own = status.st_uid == process.user or bool(status.st_mode & stat.S_IROTH)
        if not its_own or not stat.S_ISREG(status.st_mode):
            return ""
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read(_LARGEST_SOURCE).splitlines()
    except OSError:
        return ""
    text = lines[line.line - 1].strip() if 0 < line.line <= len(lines) else ""
    return text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE - 1]}…"


def spawned_rank(process: Process, py_spy: str) -> int | None:
    """Return the index that `torch.multiprocessing` gave a process it has started.

    None: something else has started it, or it cannot be read. Of the local variables,
    which may be secret, this one alone is looked at.
    """
    try:
        threads = json.loads(dump(py_spy, process.pid, variables=True))
    except (PySpyError, ValueError, RecursionError):
        return None
    file, function, name = _SPAWNED
    for thread in threads if isinstance(threads, list) else ():
        for frame in _list(thread, "frames"):
            if not str(frame.get("filename")).endswith(file):
                continue
            if frame.get("name") != function:
                continue
            for variable in _list(frame, "locals"):
                value = str(variable.get("repr"))
                if variable.get("name") == name and value.isdecimal():
                    return int(value)
    return None


def _list(of: Any, key: str) -> list[Mapping[str, Any]]:
    found = of.get(key) if isinstance(of, Mapping) else None
    return [one for one in found or () if isinstance(one, Mapping)]
