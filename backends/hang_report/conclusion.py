"""The verdict of a report: made of the files there, as ``rankscope diagnose`` does."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..groups.unattended import page_writers
from ..groups.world import world
from ..rank_sets import name_ranks
from ..stores.process_end import is_stopped
from .meeting import Meeting
from .part import FACTS, STACKS, write_facts

__all__ = [
    "MAIN_AT",
    "Conclusion",
    "add_absent_ranks",
    "conclude",
    "death_by_signal",
    "read_stacks",
]

#: Bytes of one rank's stacks, and of its last words, that are copied.
_LARGEST = 1 << 20
_LARGEST_WORDS = 64 << 20
_FATAL = re.compile(r"Fatal Python error: (.{1,80})")
#: Stands before the line of the main thread, where the thread that crashed has none.
MAIN_AT = "with its main thread at"
#: What `faulthandler` calls signals.
_SIGNALS = {
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
    "Segmentation fault": "SIGSEGV",
}


@dataclass(frozen=True)
class Conclusion:
    """What a report says."""

    #: Its folder; None: nobody waits, and nothing is kept.
    folder: str | None
    #: Why the job hangs, in one line.
    text: str
    #: What is not as it should be with the report; empty: nothing.
    problem: str = ""

    def __str__(self) -> str:
        note = f" ({self.problem})" if self.problem else ""
        return f"{self.text}; the report is {self.folder}{note}"


def add_absent_ranks(folder: Path, meeting: Meeting) -> None:
    """Add what ranks have left that wrote no part: they have ended, or cannot run."""
    deaths = _deaths()
    for rank, about in meeting.known().items():
        if (folder / f"{FACTS}{rank}.json").exists():
            continue
        words = meeting.last_words(rank)
        stacks = meeting.folder / f"{STACKS}{rank}.txt"
        text = read_stacks(stacks)
        if (words / f"{FACTS}{rank}.json").exists():
            # Last words are about the end itself.
            for path in words.iterdir():
                if path.stat().st_size <= _LARGEST_WORDS:
                    shutil.copy(path, folder)
            continue
        if text:
            (folder / f"{STACKS}{rank}.txt").write_text(text, encoding="utf-8")
        facts: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": about.get("pid"),
            "has_ended": not meeting.lives(rank),
        }
        if facts["has_ended"]:
            how = about.get("end", "its process has ended")
            default = f"rank {rank} is dead: {how}"
            facts["death"] = death_by_signal(rank, text) or deaths.get(rank, default)
        elif is_stopped(pid := facts["pid"]):
            facts["silence"] = (
                "has not answered: its process is stopped (SIGSTOP, or a debugger): "
                f"kill -CONT {pid} continues it"
            )
        write_facts(folder, rank, facts)
    for rank, death in deaths.items():
        # It is on another host, or ended before it had begun here.
        if not (folder / f"{FACTS}{rank}.json").exists():
            write_facts(folder, rank, {"has_ended": True, "death": death})


def death_by_signal(rank: int, text: str) -> str:
    """Return how a crash ended a rank, by what `faulthandler` wrote; empty: none did.

    ``rank 1 is dead: ended by SIGSEGV at train.py:7``: the line of the thread that got
    the signal, where it runs Python code of the user; else that of the main thread.
    """
    from ..post_mortem.stacks import main_thread, threads_in
    from ..post_mortem.user_frames import position

    fatal = _FATAL.search(text)
    if fatal is None:
        return ""
    death = f"rank {rank} is dead: ended by {_SIGNALS.get(fatal[1], fatal[1])}"
    _, current, rest = text.partition("Current thread ")
    for at, part in ("at", current + rest), (MAIN_AT, text):
        for process in threads_in(part.splitlines()):
            threads = process.threads
            thread = threads[0] if at == "at" else main_thread(threads, process.cut)
            if thread is not None and any(one.is_users for one in thread.frames):
                return f"{death} {at} {position(thread.frames)[0]}"
    return death


def read_stacks(path: Path) -> str:
    """Return what a file of stacks has, as far as it is read; empty without it."""
    with (
        contextlib.suppress(OSError),
        path.open(encoding="utf-8", errors="replace") as f,
    ):
        return f.read(_LARGEST)
    return ""


def _deaths() -> dict[int, str]:
    """Return how ranks have died, as the store has told the groups that it ended."""
    found: dict[int, str] = {}
    for reason in filter(None, (one.aborted for one in world.groups())):
        if len(reason.culprits) != 1:
            continue
        (rank,) = reason.culprits
        how = reason.text.partition(" is gone: ")[2]
        if how:
            found[rank] = f"rank {rank} is dead: {how}"
        elif reason.text.startswith(f"rank {rank} ended with "):
            found[rank] = reason.text
    return found


def conclude(folder: Path) -> Conclusion:
    """Write the verdict into `folder` as text, JSON and page; return it."""
    # The readers take long to import: no job that ends well does.
    from ..post_mortem.rank_facts import TITLE
    from ..post_mortem.report import examine

    shown = str(folder)
    with contextlib.suppress(OSError):
        near = os.path.relpath(folder)
        shown = shown if near.startswith(os.pardir) else near
    report = examine([shown])
    told = (str(one).rstrip(".") for one in report.verdicts)
    text = "; ".join(told) or "no cause is found"
    size = report.world_size or 0
    elsewhere = sorted(set(range(size)) - report.evidence.ranks.keys())
    if elsewhere:
        who = name_ranks(elsewhere)
        known = text.endswith(f"nothing is known of {who}")
        text += " on this host" if known else f"; nothing of {who} is on this host"
        text += ": rankscope diagnose joins the reports of several"
    files = {
        "verdict.json": f"{report.as_json()}\n",
        "verdict.txt": f"{TITLE}\n\n{report.as_text()}\n",
    }
    problem = ""
    try:
        for name, content in files.items():
            (folder / name).write_text(content, encoding="utf-8")
    except OSError as error:
        problem = f"not whole: {error}"
    for write_page in page_writers:
        with contextlib.suppress(Exception):
            write_page(report, folder)
    return Conclusion(shown, text, problem)
