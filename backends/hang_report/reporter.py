"""A thread of each rank that sees that its job hangs or fails, and has all ranks write.

The first rank of a host to see it puts a request where its peers look; each writes its
part, and the first one makes the verdict of the parts. If it ends before, another does.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..groups.world import world
from .c_signals import end_by
from .conclusion import Conclusion, add_absent_ranks, conclude
from .meeting import Meeting
from .part import FACTS, STACKS, write_part
from .rendezvous import rendezvous
from .settings import RANK, Settings, job_key, job_name, number_of
from .silent import SilentStacks, request_stacks

__all__ = ["Reporter"]

_log = logging.getLogger(__name__)

#: Seconds between two looks for a request, and between two at the own ops.
LOOK = 0.2
LOOK_AT_OPS = 1.0
#: Seconds that ranks get for their parts: then those without one get the signal at
#: which they write their stacks, for which they get as much again.
PART_WAIT = 0.8
STACKS_WAIT = 0.4
#: Seconds that a rank waits for its own error, where another one has had one.
ERROR_WAIT = 0.15
#: Seconds that a rank waits for the verdict: then it goes on without it.
VERDICT_WAIT = 6.0
#: Seconds after an error in which the errors of other ranks follow from it.
AFTERMATH = 30.0
#: Reports of one job: it may go on after a stall.
MOST = 5

_REQUEST, _RESULT = "request_", "result_"


class _Wish(NamedTuple):
    """Why this rank wants a report."""

    #: ``stall``, ``error``, ``exception``, ``signal``, ``crash``
    reason: str
    error: BaseException | None = None
    #: The main thread has come to its end.
    ended: bool = False


class Reporter:
    """Watches this rank's ops, from `start` to the end of its process.

    Parameters
    ----------
    settings
        Where and when reports are written.
    write_page
        Writes the page of a report into its folder.
    is_attended
        Whether somebody looks at the job: then no report is written.
    """

    def __init__(
        self,
        settings: Settings,
        write_page: Callable[[Any, Path], None] | None = None,
        is_attended: Callable[[], bool] = lambda: False,
    ) -> None:
        assert settings.folder is not None
        self.settings = settings
        self._folder = settings.folder
        self._write_page = write_page
        self._is_attended = is_attended
        self._meeting: Meeting | None = None
        self._silent: SilentStacks | None = None
        self._process = os.getpid()
        self._parent = os.getppid()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._lock = threading.Lock()
        self._wishes: list[tuple[_Wish, threading.Event]] = []
        #: The reports so far, that of the last request last.
        self._count = 0
        self._last: Conclusion | None = None
        self._last_at = 0.0
        self._last_reason = ""
        self._kept = 0
        self._making_since: float | None = None
        #: Since when this rank waited at the last look at its ops.
        self._waited_since: float | None = None
        self._stopped = threading.Event()
        #: Called on the thread with each byte that a signal has written.
        self.on_signal: Callable[[int], None] = lambda number: None
        self._thread = threading.Thread(
            target=self._run, name="rankscope-hang-report", daemon=True
        )

    @property
    def bell(self) -> int:
        """A descriptor: what is written to it wakes the thread."""
        return self._write

    def start(self) -> None:
        """Begin."""
        os.register_at_fork(after_in_child=self._disown)
        atexit.register(self.end)
        self._thread.start()

    def _disown(self) -> None:
        """In the child of a fork: it is no rank."""
        self._stopped.set()
        if self._silent is not None:
            self._silent.forget()

    # -- what other threads ask for ---------------------------------------------------

    def report(
        self, reason: str, error: BaseException | None = None, ended: bool = False
    ) -> Conclusion | None:
        """Have a report written, and wait for its verdict; None: there is none.

        An error that follows from one that was reported has the verdict of that.
        """
        if not self._is_here() or self._meeting is None or self._is_attended():
            return None
        done = threading.Event()
        with self._lock:
            self._wishes.append((_Wish(reason, error, ended), done))
        self._wake()
        done.wait(VERDICT_WAIT)
        found = self._last
        return found if found is not None and found.folder is not None else None

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._write, b"\0")

    def _is_here(self) -> bool:
        """Whether the thread runs in this process, and not in the parent of a fork."""
        return (
            os.getpid() == self._process
            and self._thread.is_alive()
            and self._thread is not threading.current_thread()
        )

    def end(self) -> None:
        """Leave the meeting: the process ends."""
        if os.getpid() != self._process or self._stopped.is_set():
            return
        self._stopped.set()
        self._wake()
        self._thread.join(VERDICT_WAIT)
        meeting = self._meeting
        if meeting is not None:
            with contextlib.suppress(OSError):
                words = meeting.last_words(meeting.rank)
                if not words.exists() and len(meeting.living()) > 1:
                    self._leave_words(None)
            self.leave()

    def leave(self) -> None:
        """Leave the ranks of this host."""
        meeting, self._meeting = self._meeting, None
        if self._silent is not None:
            self._silent.close()
        if meeting is not None:
            with contextlib.suppress(OSError):
                meeting.close()

    def _leave_words(self, error: BaseException | None) -> None:
        """Leave what is known of this rank for a report after its end."""
        assert self._meeting is not None
        words = self._meeting.last_words(self._meeting.rank)
        words.mkdir(exist_ok=True)
        write_part(words, self._meeting.rank, error=error, ended=True, final=True)

    # -- the thread -------------------------------------------------------------------

    def _run(self) -> None:
        looked = 0.0
        while not self._stopped.is_set():
            try:
                self._hear()
                if self._meeting is None and not self._join():
                    continue
                self._look()
                self._look_for_crash()
                if time.monotonic() - looked >= LOOK_AT_OPS:
                    looked = time.monotonic()
                    self._look_at_ops()
            except Exception:  # noqa: BLE001 - the program goes on
                _log.exception("no report of a hang can be written")
                return
            finally:
                if self._stopped.is_set():
                    self._release()

    def _hear(self) -> None:
        """Wait for a wish, for a signal, or for the next look."""
        ready, _, _ = select.select([self._read], [], [], LOOK)
        if ready:
            with contextlib.suppress(BlockingIOError):
                for number in os.read(self._read, 256):
                    if number:
                        self.on_signal(number)

    def _join(self) -> bool:
        rank = number_of(RANK)
        if rank is None:
            rank = next((r for s in world.sources if (r := s.rank) is not None), None)
        rank = world.rank if rank is None else rank
        if rank is None:
            return False
        self._meeting = Meeting(job_key(self._parent), rank, {})
        self._silent = SilentStacks(self._meeting.folder / f"{STACKS}{rank}.txt")
        self._meeting.tell({"signal": self._silent.signal})
        return True

    def _look(self) -> None:
        """Follow a request of a peer, or make one."""
        assert self._meeting is not None
        request = self._meeting.get(f"{_REQUEST}{self._count + 1}")
        if request is not None:
            self._take_part(request)
        while self._wishes and not self._stopped.is_set():
            wish, _ = self._wishes[0]
            if not self._is_told(wish):
                self._request(wish)
            self._release_first()

    def _release_first(self) -> None:
        with self._lock:
            _, done = self._wishes.pop(0)
        done.set()

    def _release(self) -> None:
        with self._lock:
            for _, done in self._wishes:
                done.set()
            self._wishes.clear()

    def _is_told(self, wish: _Wish) -> bool:
        """Whether the last report is about the same."""
        if self._kept >= MOST:
            return True
        if self._last is None or self._last.folder is None:
            return False
        if self._last_reason != "stall":
            return time.time() - self._last_at < AFTERMATH
        # An op that has just failed is not in flight any more.
        since = self.waits_since() or self._waited_since
        return since is not None and since < self._last_at

    def _oldest(self) -> float | None:
        """Return since when the oldest op of this rank is in flight."""
        now = time.time()
        ages = [
            now - one.oldest.elapsed
            for one in world.summary()
            if one.state == "ready" and one.oldest is not None and one.oldest.elapsed
        ]
        return min(ages, default=None)

    def waits_since(self) -> float | None:
        """Return since when this rank waits for others; None: it does not."""
        oldest = self._oldest()
        if oldest is not None:
            return oldest
        if rendezvous() is None:
            self._making_since = None
        elif self._making_since is None:
            self._making_since = time.time()
        return self._making_since

    def peer_has_ended(self) -> bool:
        """Whether the process of another rank of this host has ended."""
        meeting = self._meeting
        return meeting is not None and len(meeting.known()) > len(meeting.living())

    def _look_for_crash(self) -> None:
        """Have a report written while the end of this process is held up."""
        if self._silent is None or not self._silent.has_crashed():
            return
        if not self._is_attended() and not self._is_told(_Wish("crash")):
            self._request(_Wish("crash"))
        self.leave()
        end_by(signal.SIGABRT)

    def _look_at_ops(self) -> None:
        meeting, silent = self._meeting, self._silent
        assert meeting is not None
        if silent is not None and silent.signal is not None and not silent.is_mine():
            silent.signal = None
            meeting.tell({"signal": None})
        since = self._waited_since = self.waits_since()
        if since is None or time.time() - since < self.settings.after:
            return
        if not self._is_attended() and not self._is_told(_Wish("stall")):
            self._request(_Wish("stall"))

    def report_at_end(self, old: float, grace: float) -> None:
        """On the thread: a launcher ends this rank. Have a report, or part in one.

        A report is written if the rank waits for `old` seconds at least, or if another
        rank of this host is gone. Another rank has `grace` seconds to ask for one.
        """
        if self._meeting is None or self._is_attended():
            return
        since = self.waits_since()
        if since is not None and not self._is_told(_Wish("signal")):
            waited = time.time() - since
            if waited >= min(old, self.settings.after) or self.peer_has_ended():
                self._request(_Wish("signal"))
                return
        deadline, count = time.monotonic() + grace, self._count
        while self._count == count and time.monotonic() < deadline:
            self._look()
            time.sleep(0.02)

    # -- one report -------------------------------------------------------------------

    def _request(self, wish: _Wish) -> None:
        """Have all ranks of this host write; make the verdict."""
        assert self._meeting is not None
        meeting, number = self._meeting, self._count + 1
        folder = self._new_folder()
        request = {
            "folder": str(folder),
            "rank": meeting.rank,
            "reason": wish.reason,
            "at": time.time(),
        }
        if not meeting.put(f"{_REQUEST}{number}", request):
            first = meeting.get(f"{_REQUEST}{number}")
            assert first is not None
            self._take_part(first, wish)
            return
        if wish.ended:
            self._leave_words(wish.error)
        self._write_part(folder, wish, wish.reason)
        self._conclude(request, number)

    def _new_folder(self) -> Path:
        at = time.strftime("%Y%m%d-%H%M%S")
        host = socket.gethostname().partition(".")[0]
        return self._folder / f"{job_name()}-{at}-{host}"

    def _take_part(self, request: dict[str, Any], wish: _Wish | None = None) -> None:
        assert self._meeting is not None
        meeting, number = self._meeting, self._count + 1
        folder = Path(request["folder"])
        if request["reason"] == "error" and wish is None:
            # The own op may have failed, too, and the error is on its way.
            _until(lambda: bool(self._wishes), ERROR_WAIT)
        joins = wish is None and bool(self._wishes)
        wish = self._wishes[0][0] if joins else wish or _Wish("")
        result = f"{_RESULT}{number}"
        if meeting.get(result) is None:
            if wish.ended:
                self._leave_words(wish.error)
            self._write_part(folder, wish, request["reason"])
        deadline = time.monotonic() + VERDICT_WAIT
        while (found := meeting.get(result)) is None and time.monotonic() < deadline:
            if (
                not meeting.lives(request["rank"])
                and meeting.living()[0] == meeting.rank
            ):
                self._conclude(request, number)
                break
            time.sleep(0.02)
        else:
            self._note(number, request, Conclusion(**found) if found else None)
        if self._last is not None and self._last.folder is None:
            # A part that came late has made it anew.
            self._remove(folder)
        if joins:
            self._release_first()

    def _remove(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _note(
        self, number: int, request: dict[str, Any], found: Conclusion | None
    ) -> None:
        self._count, self._last = number, found
        self._kept += found is not None and found.folder is not None
        self._last_at, self._last_reason = request["at"], request["reason"]

    def _write_part(self, folder: Path, wish: _Wish, reason: str) -> None:
        assert self._meeting is not None
        folder.mkdir(parents=True, exist_ok=True)
        write_part(
            folder,
            self._meeting.rank,
            error=wish.error,
            ended=wish.ended,
            in_flight=self.waits_since() is not None or wish.reason == "error",
            failed=wish.reason == "error",
            final=reason != "stall",
        )

    def _conclude(self, request: dict[str, Any], number: int) -> None:
        assert self._meeting is not None
        meeting, folder = self._meeting, Path(request["folder"])
        self._await_parts(folder)
        add_absent_ranks(folder, meeting)
        waits = request["reason"] != "exception" or _others_wait(folder, meeting.rank)
        found = conclude(folder, waits, self._write_page)
        if found.folder is not None:
            # Torch collects what is written to `sys.stderr` while an exception ends
            # the script.
            to = sys.__stderr__ or sys.stderr
            print(f"rankscope: {found}", file=to, flush=True)
        else:
            self._remove(folder)
        self._note(number, request, found)
        meeting.put(f"{_RESULT}{number}", found.__dict__)

    def _await_parts(self, folder: Path) -> None:
        assert self._meeting is not None
        meeting = self._meeting

        def lacking() -> list[int]:
            return [
                rank
                for rank in meeting.living()
                if not (folder / f"{FACTS}{rank}.json").exists()
            ]

        _until(lambda: not lacking(), PART_WAIT)
        silent = lacking()
        known = meeting.known()
        paths = []
        for rank in silent:
            number, pid = known[rank].get("signal"), known[rank].get("pid")
            if type(number) is int and type(pid) is int and meeting.lives(rank):
                request_stacks(pid, number)
                paths.append(meeting.folder / f"{STACKS}{rank}.txt")
        if paths:
            _until(lambda: all(one.stat().st_size for one in paths), STACKS_WAIT)
            # Until all of it is there.
            time.sleep(0.05)


def _until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def _others_wait(folder: Path, rank: int) -> bool:
    for path in folder.glob(f"{FACTS}*.json"):
        if path.name != f"{FACTS}{rank}.json" and '"waits": true' in path.read_text():
            return True
    return False
