"""The reports of one job on one host: each is asked for by a rank, written by all.

The rank that asks for one makes the verdict of the parts. If its process ends before,
the first of those that live does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..groups.inquiry import main_thread_place
from .conclusion import (
    MAIN_AT,
    Conclusion,
    add_absent_ranks,
    conclude,
    death_by_signal,
    read_stacks,
)
from .meeting import Meeting
from .part import FACTS, STACKS, write_part
from .place import Place
from .polling import until
from .silent import Silent, request_stacks
from .waiting import Waiting, rendezvous

__all__ = [
    "AFTERMATH",
    "LOOK",
    "VERDICT_WAIT",
    "Reports",
    "Request",
    "Wish",
    "await_parts",
    "is_consequence",
    "say_on_stderr",
]

#: Seconds that ranks get for their parts: then those without one get the signal at
#: which they write their stacks, for which they get as much again.
PART_WAIT = 0.8
STACKS_WAIT = 0.4
#: Seconds after which the thread of a rank that crashes cannot run.
CRASH_WAIT = 1.5
#: Seconds that a rank waits for the verdict: then it goes on without it.
VERDICT_WAIT = 6.0
#: Seconds after an error in which the errors of other ranks follow from it.
AFTERMATH = 30.0
#: The reason of somebody outside of the job, who makes the verdict and keeps nothing.
LOOK = "look"
#: Reports of one job that are kept: it may go on after a stall.
MOST = 5
#: Bytes for which there has to be room where a report goes.
ROOM = 1 << 20


class Wish(NamedTuple):
    """Why this rank wants a report."""

    #: ``stall``; what comes before the end of the job: ``error`` of an op, ``overdue``
    #: before such an error, ``exception``, ``signal``, ``crash``; empty: it does not
    #: want one itself.
    reason: str
    error: BaseException | None = None
    #: The main thread has come to its end.
    ended: bool = False


class Request(NamedTuple):
    """What a rank asks of its peers."""

    number: int
    #: The folder of the report.
    folder: str
    #: The rank that asks.
    rank: int
    #: That of its `Wish`.
    reason: str
    #: When, ``time.time``.
    at: float


class Reports:
    """What one rank does for the reports of its job."""

    def __init__(
        self,
        folder: Path,
        meeting: Meeting,
        waiting: Waiting,
        place: Place,
        say: Callable[[str], None],
    ) -> None:
        self._parent = folder
        self._meeting = meeting
        self._waiting = waiting
        self._place = place
        self._say = say
        #: How many there were; also those that were not kept.
        self.count = 0
        #: The last one.
        self.last: Conclusion | None = None
        self._last_request: Request | None = None
        self._kept = 0
        #: Why reports of this rank go elsewhere than they should; empty: they do not.
        self._elsewhere = ""

    def are_told(self, wish: Wish) -> bool:
        """Whether the last report tells already what is wrong now."""
        if self._kept >= MOST:
            return True
        before = self._last_request
        if before is None:
            return False
        if self.last is None:
            # This rank went on before the verdict had come: on a busy machine it takes
            # longer, and each rank that asked for another made it take longer still.
            found = self._meeting.get(f"result_{before.number}")
            late = time.time() - before.at > AFTERMATH
            if found is not None:
                self._note(before, Conclusion(**found))
            elif late or self._maker(before) == self._meeting.rank:
                return False
        if self.last is not None and self.last.folder is None:
            return False
        # A rank has told that the stall has come to its end.
        end = self._meeting.get(f"end_{before.number}")
        if end is not None or before.reason != "stall":
            at = before.at if end is None else float(end["at"])
            return time.time() - at < AFTERMATH
        # An op that has just failed is not in flight any more.
        seen = self._waiting.seen
        since = self._waiting.since() or seen
        told = since is not None and since < before.at
        if told and wish.reason != "stall":
            self._meeting.put(f"end_{before.number}", {"at": time.time()})
        return told

    def pending(self) -> Request | None:
        """Return what a peer asks for, and this rank has no part in yet."""
        number = self.count + 1
        found = self._meeting.get(f"request_{number}")
        return None if found is None else Request(number, **found)

    def request(self, wish: Wish) -> None:
        """Have all ranks of this host write; make the verdict."""
        while (first := self.pending()) is not None and first.reason == LOOK:
            self.take_part(first, Wish(""))
        folder = self._make_folder()
        request = Request(
            self.count + 1, str(folder), self._meeting.rank, wish.reason, time.time()
        )
        content = request._asdict()
        del content["number"]
        if self._meeting.put(f"request_{request.number}", content):
            self._meeting.ring()
            try:
                self._write_part(request, wish)
            finally:
                # The peers have written theirs.
                self._conclude(request)
            return
        folder.rmdir()
        first = self.pending()
        assert first is not None
        if first.reason == LOOK:
            self.request(wish)
        else:
            self.take_part(first, wish)

    def take_part(self, request: Request, wish: Wish) -> None:
        """Write this rank's part, and wait for the verdict, if one is to come."""
        if request.reason == LOOK:
            # Who asks may be gone, and its folder too.
            if Path(request.folder).exists():
                self._write_part(request, wish)
                if not self._meeting.lives(request.rank):
                    shutil.rmtree(request.folder, ignore_errors=True)
            self.count = request.number
            return
        meeting, result = self._meeting, f"result_{request.number}"
        if meeting.get(f"closed_{request.number}") is None:
            self._write_part(request, wish)
        deadline = time.monotonic() + VERDICT_WAIT
        while (found := meeting.get(result)) is None and time.monotonic() < deadline:
            if self._maker(request) == meeting.rank:
                self._conclude(request)
                return
            time.sleep(0.02)
        self._note(request, Conclusion(**found) if found else None)
        if self.last is not None and self.last.folder is None:
            # A part that came late has made it anew.
            self._remove(Path(request.folder))

    def interrupt_crashes(self) -> None:
        """End the sleep in which peers end that crash: no thread runs where the GIL is.

        See `silent`. A signal that has a handler, as the one for stacks, ends it.
        """
        meeting = self._meeting
        # Each rank looks each second, and mostly all of these are empty.
        for entry in os.scandir(meeting.folder):
            with contextlib.suppress(OSError, ValueError):
                if not entry.name.startswith(STACKS) or not entry.stat().st_size:
                    continue
                path = Path(entry)
                rank = int(path.stem.removeprefix(STACKS))
                old = time.time() - entry.stat().st_mtime > CRASH_WAIT
                if old and death_by_signal(rank, read_stacks(path)):
                    peer = _silent(meeting, rank, meeting.known()[rank])
                    if peer is not None:
                        os.kill(peer.pid, peer.signal)

    def leave_words(self, error: BaseException | None) -> None:
        """Leave what is known of this rank for reports after its end."""
        words = self._meeting.last_words(self._meeting.rank)
        words.mkdir(exist_ok=True)
        write_part(
            words, self._meeting.rank, self._place, error=error, ended=True, final=True
        )

    def _make_folder(self) -> Path:
        at = time.strftime("%Y%m%d-%H%M%S")
        host = socket.gethostname().partition(".")[0]
        name = f"{self._place.name}-{at}-{host}"
        for count in range(1, 100):
            folder = self._parent / (name if count == 1 else f"{name}-{count}")
            try:
                folder.mkdir(parents=True)
                check_room(folder)
            except (FileExistsError, FileNotFoundError):
                # The latter: a peer that kept no report has just removed the parent.
                continue
            except OSError as error:
                # The working directory may be read-only, or its disk full.
                self._elsewhere = f"not in {self._parent}: {error.strerror}"
                shutil.rmtree(folder, ignore_errors=True)
                break
            self._elsewhere = ""
            return folder
        return Path(tempfile.mkdtemp(prefix=f"{name}-"))

    def _remove(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._parent.rmdir()

    def _note(self, request: Request, found: Conclusion | None) -> None:
        self.count, self.last = request.number, found
        self._last_request = request
        self._kept += found is not None and found.folder is not None

    def _write_part(self, request: Request, wish: Wish) -> None:
        if wish.ended:
            self.leave_words(wish.error)
        folder = Path(request.folder)
        folder.mkdir(parents=True, exist_ok=True)
        failed = wish.reason == "error"
        waits = self._waiting.since() is not None
        death = ""
        if wish.reason == "crash" and not waits:
            # In an op, its library gives up: that it waited is what counts.
            mine = self._meeting.folder / f"{STACKS}{self._meeting.rank}.txt"
            death = death_by_signal(self._meeting.rank, read_stacks(mine))
            if not death:
                # The stacks are where the program wants them.
                death = f"rank {self._meeting.rank} is dead: ended by SIGABRT"
                if place := main_thread_place().location:
                    death += f" {MAIN_AT} {place}"
        try:
            write_part(
                folder,
                self._meeting.rank,
                self._place,
                error=wish.error,
                ended=wish.ended,
                in_flight=failed or waits,
                failed=failed,
                final=request.reason not in ("stall", LOOK),
                death=death,
            )
        except FileNotFoundError:
            # Who asked has removed it: nothing is to be told, or this rank was late.
            if folder.exists():
                raise

    def _maker(self, request: Request) -> int:
        """Return the rank that makes the verdict, unless it has done so."""
        meeting = self._meeting
        closed = meeting.get(f"closed_{request.number}")
        rank = request.rank if closed is None else closed["rank"]
        return rank if meeting.lives(rank) else meeting.living()[0]

    def _conclude(self, request: Request) -> None:
        found = Conclusion(None, "")
        try:
            found = self._find(request)
        finally:
            self._note(request, found)
            # The peers wait for it.
            self._meeting.put(f"result_{request.number}", found.__dict__)

    def _find(self, request: Request) -> Conclusion:
        folder = Path(request.folder)
        await_parts(folder, self._meeting)
        add_absent_ranks(folder, self._meeting)
        lacking = set(range(self._place.world_size or 0)) - _told(folder)
        if lacking and rendezvous() is not None:
            # Its imports take as long as a report: only a rank that waits needs it.
            from .unjoined import add_unjoined

            add_unjoined(folder, lacking, self._place.address)
        # A part that comes now would tell otherwise than the verdict.
        self._meeting.put(f"closed_{request.number}", {"rank": self._meeting.rank})
        if request.reason == "exception" and not _others_wait(folder, request.rank):
            # A rank that fails alone has told its reason itself.
            self._remove(folder)
            return Conclusion(None, "")
        found = conclude(folder)
        if request.rank == self._meeting.rank and self._elsewhere:
            problems = filter(None, (self._elsewhere, found.problem))
            found = replace(found, problem="; ".join(problems))
        with contextlib.suppress(OSError, ValueError):
            self._say(f"rankscope: {found}")
        return found


def is_consequence(error: BaseException) -> bool:
    """Whether an op has failed because another rank was late, or is gone."""
    if not isinstance(error, RuntimeError):
        return False
    # Only where an op has failed.
    from ..post_mortem.tracebacks import Raised

    return Raised(f"{type(error).__name__}: {error}", ()).is_consequence


def check_room(folder: Path) -> None:
    """Raise `OSError` where a report cannot be written: a full disk makes folders."""
    probe = folder / ".room"
    try:
        probe.write_bytes(bytes(ROOM))
    finally:
        probe.unlink(missing_ok=True)


def await_parts(folder: Path, meeting: Meeting) -> None:
    """Wait for the parts of the ranks, or for the stacks of those that write none."""

    def lacking() -> list[int]:
        return [
            rank
            for rank in meeting.living()
            if not (folder / f"{FACTS}{rank}.json").exists()
        ]

    until(lambda: not lacking(), PART_WAIT)
    known = meeting.known()
    silent = (_silent(meeting, rank, known[rank]) for rank in lacking())
    if asked := [one for one in silent if one is not None]:
        request_stacks(asked, STACKS_WAIT)


def _silent(meeting: Meeting, rank: int, about: Mapping[str, Any]) -> Silent | None:
    """Return how to ask a rank for stacks; None: it has no signal, or has ended."""
    number, pid = about.get("signal"), about.get("pid")
    if type(number) is int and type(pid) is int and meeting.lives(rank):
        path = meeting.folder / f"{STACKS}{rank}.txt"
        return Silent(pid, number, about.get("threads") or [], path)
    return None


def say_on_stderr(text: str) -> None:
    # Torch collects what is written to `sys.stderr` while an exception ends the script.
    print(text, file=sys.__stderr__ or sys.stderr, flush=True)


def _told(folder: Path) -> set[int]:
    names = (path.stem.removeprefix(FACTS) for path in folder.glob(f"{FACTS}*.json"))
    return {int(name) for name in names if name.isdecimal()}


def _others_wait(folder: Path, rank: int) -> bool:
    for path in folder.glob(f"{FACTS}*.json"):
        if path.name != f"{FACTS}{rank}.json" and '"waits": true' in path.read_text():
            return True
    return False
