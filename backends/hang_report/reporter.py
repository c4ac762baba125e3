"""A thread of each rank that sees its job hang or fail, and has all ranks write."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

from ..errors import DistAbortedError
from ..groups.inquiry import current_exception, main_thread_place
from .c_signals import end_by
from .conclusion import Conclusion
from .host_rank import HostRank
from .last_line import (
    LAST_OVER_HOSTS,
    SERVER_WAIT,
    KeyValues,
    OverHosts,
    last_line,
    last_ops,
    tells,
)
from .meeting import Meeting
from .place import Place
from .polling import until
from .reports import LOOK as FROM_OUTSIDE
from .reports import VERDICT_WAIT, Wish, is_consequence, say_on_stderr
from .settings import Settings, this_host
from .waiting import Waiting

__all__ = ["Reporter"]

_log = logging.getLogger(__name__)

#: Seconds between two looks at the own ops.
LOOK = 1.0
#: Seconds that a rank waits for its own error, where another one has had one.
ERROR_WAIT = 0.3
#: Reasons that come with the end of a rank.
_ENDS = ("error", "exception", "crash")
#: Seconds in which a process of before may still be this rank.
TAKEN_WAIT = 20.0
#: Seconds that the store of the job has for the last ops of this rank.
STORE_WAIT = SERVER_WAIT + 1.0


class Reporter:
    """Watches this rank's ops, from `start` to the end of its process.

    `is_attended` is whether somebody looks at the job: then no report of a hang is
    written. `say` tells the verdict, on one rank.
    """

    def __init__(
        self,
        settings: Settings,
        place: Place,
        is_attended: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = say_on_stderr,
    ) -> None:
        assert settings.folder is not None
        self._folder = settings.folder
        self._say = say
        self._after = settings.after
        self._place = place
        self.is_attended = is_attended
        self._waiting = Waiting()
        self._joined: HostRank | None = None
        self._process = os.getpid()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)
        self._lock = threading.Lock()
        self._wishes: list[tuple[Wish, threading.Event]] = []
        self._calls: list[Callable[[], None]] = []
        self._over_hosts = OverHosts()
        self._stopped = threading.Event()
        self._began = time.monotonic()
        self._looked = 0.0
        #: The exception that has ended the main thread's work: what is thought of it
        #: takes a while on a busy host, and a peer may ask before.
        self.ended_by: BaseException | None = None
        #: The last error because of which no report was written.
        self._failed = ""
        #: Called before this rank leaves the others at its end.
        self.before_end: list[Callable[[], None]] = []
        #: Called on the thread with each byte that a signal has written.
        self.on_signal: Callable[[int], None] = lambda number: None
        #: Called on the thread before a crash ends the process.
        self.on_crash: Callable[[], None] = lambda: None
        #: Called on the thread at its end.
        self.on_stop: Callable[[], None] = lambda: None
        self._thread = threading.Thread(
            target=self._run, name="rankscope-hang-report", daemon=True
        )

    @property
    def bell(self) -> int:
        """A descriptor: what is written to it wakes the thread."""
        return self._write

    def start(self) -> None:
        os.register_at_fork(after_in_child=self._disown)
        atexit.register(self.end)
        self._wake()
        self._thread.start()

    def _disown(self) -> None:
        """In the child of a fork: it is no rank."""
        self._stopped.set()
        if self._joined is not None:
            self._joined.silent.forget()

    # -- what other threads ask for ---------------------------------------------------

    def report(
        self, reason: str, error: BaseException | None = None, ended: bool = False
    ) -> Conclusion | None:
        """Have a report written, and wait for its verdict; None: there is none.

        An error that follows from one that was reported has the verdict of that.
        """
        self.ask(Wish(reason, error, ended)).wait(VERDICT_WAIT)
        found = None if self._joined is None else self._joined.reports.last
        return found if found is not None and found.folder is not None else None

    def ask(self, wish: Wish) -> threading.Event:
        """Have a report written; return what is set when it is, or none will be."""
        done = threading.Event()
        here = os.getpid() == self._process and self._thread.is_alive()
        # Without a rank it joins nobody.
        nobody = self._joined is None and self._place.rank is None
        if nobody or not here or self._is_told(wish):
            done.set()
            return done
        with self._lock:
            self._wishes.append((wish, done))
        self._wake()
        return done

    def _is_told(self, wish: Wish) -> bool:
        """Whether somebody looks at the job who needs no report.

        Of an op that hangs, and of an abort: an error ends what there is to look at.
        """
        told = wish.reason not in _ENDS or isinstance(wish.error, DistAbortedError)
        return told and self.is_attended()

    def is_over_hosts(self, size: int) -> bool:
        """Whether not all of `size` ranks are on this host."""
        joined = self._joined
        if joined is None or os.getpid() != self._process:
            return False
        return size > len(joined.meeting.known())

    def leave_groups(
        self, store: KeyValues | None, rank: int, size: int, *, serves: bool
    ) -> bool:
        """Leave the last ops for ranks on other hosts; return False if that hangs.

        Nothing is left of a rank that ends by an error. `store` is that of the job,
        ``None`` if it has ended; `serves` is whether it ends with this rank.
        """
        found = self._over_hosts
        failed = current_exception() or getattr(sys, "last_value", None)
        if failed is not None or not self._thread.is_alive():
            return True
        if store is None:
            found.unknown = "the job's store has ended"
            return True
        done = threading.Event()

        def leave() -> None:
            try:
                ops = last_ops(LAST_OVER_HOSTS)
                found.leave(store, rank, size, this_host(), ops, serves=serves)
                found.unknown = ""
            except Exception as error:  # noqa: BLE001 - the program goes on
                text = str(error).partition("\n")[0]
                found.unknown = f"the job's store has failed: {text}"
            finally:
                done.set()

        found.unknown = f"the job's store has not answered within {STORE_WAIT:g} s"
        self._calls.append(leave)
        self._wake()
        return done.wait(STORE_WAIT)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._write, b"\0")

    def end(self) -> None:
        """Leave the ranks of this host: the process ends."""
        if os.getpid() != self._process or self._stopped.is_set():
            return
        for call in self.before_end:
            call()
        self._stopped.set()
        self._wake()
        self._thread.join(VERDICT_WAIT)
        joined = self._joined
        if joined is not None:
            meeting = joined.meeting
            with contextlib.suppress(OSError):
                said = meeting.last_words(meeting.rank).exists()
                # The exception that has ended the script, if one has.
                error = getattr(sys, "last_value", None)
                if not said and len(meeting.living()) > 1:
                    joined.reports.leave_words(error)
                if not said and error is None and (line := self._last_line(meeting)):
                    self._say(f"rankscope: {line}")
            joined.leave()

    def _last_line(self, meeting: Meeting) -> str:
        found = self._over_hosts
        if not found.unknown:
            return found.line if found.has_left else last_line(meeting)
        why = f"late rank: not known: ranks are on several hosts, and {found.unknown}"
        return why if tells(meeting) else ""

    # -- the thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                try:
                    self._round()
                except OSError as error:
                    joined = self._joined
                    if joined is not None and not joined.meeting.is_there:
                        # Deleted amid the round: it is tried again where it joins anew.
                        continue
                    self._fail(error)
                    self._stopped.wait(ERROR_WAIT)
        except Exception:  # noqa: BLE001 - the program goes on
            _log.exception("no report of a hang can be written")
        finally:
            self.on_stop()
            for _, done in self._wishes:
                done.set()

    def _round(self) -> None:
        # First: a signal is to be heard where a rank cannot join.
        self._hear()
        while self._calls:
            self._calls.pop(0)()
        joined = self._join()
        if joined is None:
            return
        self._look(joined)
        self._look_for_crash(joined)
        if time.monotonic() - self._looked >= LOOK:
            self._looked = time.monotonic()
            self._look_at_ops(joined)

    def _fail(self, error: OSError) -> None:
        """Say once why no report can be written; it is tried again."""
        while self._wishes:
            self._fulfil()
        why = error.strerror or str(error)
        if error.filename is not None:
            why = f"{error.filename}: {why}"
        if not isinstance(error, BlockingIOError):
            why += "; RANKSCOPE_REPORT and TMPDIR choose the folders"
        if why == self._failed:
            return
        self._failed, op = why, self._waiting.oldest
        waits = f" waits in {op}; it" if op else ""
        with contextlib.suppress(OSError, ValueError):
            self._say(
                f"rankscope: rank {self._place.rank}{waits} can write no report: {why}"
            )

    def _hear(self) -> None:
        """Wait for a wish, for a signal, or for the next look."""
        for descriptor, _ in self._poll.poll(LOOK * 1000):
            if descriptor != self._read:
                assert self._joined is not None
                self._joined.meeting.answer()
                continue
            with contextlib.suppress(BlockingIOError):
                for number in filter(None, os.read(self._read, 256)):
                    self.on_signal(number)

    def _join(self) -> HostRank | None:
        """Join the ranks of this host; once more, if this is another one by now."""
        joined, rank, key = self._joined, self._place.rank, self._place.key
        same = joined is not None and rank in (None, joined.rank) and key == joined.key
        # Else its files were deleted, and with them those of the peers.
        if joined is not None and same and joined.meeting.is_there:
            return joined
        if joined is not None:
            self._poll.unregister(joined.meeting.bell)
            joined.leave(ends=False)
            self._joined = None
        if rank is None:
            return None
        made = (self._folder, self._waiting, self._place, self._say)
        try:
            self._joined = HostRank(rank, key, *made)
        except BlockingIOError:
            # The rank's process of before may be about to end.
            if time.monotonic() - self._began > TAKEN_WAIT:
                raise
        else:
            self._poll.register(self._joined.meeting.bell, select.POLLIN)
        return self._joined

    def _look(self, joined: HostRank) -> None:
        """Do what a peer asks for, and what other threads of this rank do."""
        request = joined.reports.pending()
        if request is not None:
            if request.reason in ("error", "exception"):
                # This rank may have failed, too, and its error is on its way.
                until(lambda: bool(self._wishes), ERROR_WAIT)
            if self._wishes and request.reason != FROM_OUTSIDE:
                joined.reports.take_part(request, self._wishes[0][0])
                self._fulfil()
            else:
                joined.reports.take_part(request, self._end())
        while self._wishes and not self._stopped.is_set():
            wish = self._wishes[0][0]
            if not joined.reports.are_told(wish):
                joined.reports.request(wish)
            self._fulfil()

    def _end(self) -> Wish:
        """Return what this rank tells of its end where a peer wants a report."""
        error = self.ended_by
        if error is None:
            return Wish("")
        kind = "error" if is_consequence(error) else "exception"
        return Wish(kind, error, ended=True)

    def _fulfil(self) -> None:
        with self._lock:
            _, done = self._wishes.pop(0)
        done.set()

    def _look_for_crash(self, joined: HostRank) -> None:
        """Have a report written while the end of this process is held up."""
        if joined.silent.has_crashed():
            wish = Wish("crash")
            if not joined.reports.are_told(wish):
                joined.reports.request(wish)
            joined.leave()
            with contextlib.suppress(Exception):
                self.on_crash()
            end_by(signal.SIGABRT)

    def _look_at_ops(self, joined: HostRank) -> None:
        joined.tell_signal()
        since = self._waiting.since()
        if since is None:
            return
        joined.reports.interrupt_crashes()
        if time.time() - since < self._after or self.is_attended():
            return
        if not joined.reports.are_told(Wish("stall")):
            joined.reports.request(Wish("stall"))

    # -- the end by a signal, on the thread --------------------------------------------

    def report_at_end(self, old: float, grace: float) -> None:
        """Have a report written, or take part in one: a launcher ends this rank.

        A report is written if the rank waits for `old` seconds at least, or if another
        rank of this host is gone. Another rank has `grace` seconds to ask for one.
        """
        joined = self._joined
        if joined is None or self.is_attended():
            return
        reports, since = joined.reports, self._waiting.since()
        if since is not None and not reports.are_told(Wish("signal")):
            waited = time.time() - since
            meeting = joined.meeting
            lost = len(meeting.known()) > len(meeting.living())
            if lost or waited >= min(old, self._after):
                try:
                    reports.request(Wish("signal"))
                except OSError as error:
                    self._fail(error)
                return
        deadline, count = time.monotonic() + grace, reports.count
        while reports.count == count and time.monotonic() < deadline:
            self._look(joined)
            time.sleep(0.02)

    def leave(self) -> None:
        """Leave the ranks of this host, as one that SIGTERM ends and no error."""
        joined = self._joined
        if joined is not None:
            place = main_thread_place().location
            with contextlib.suppress(OSError):
                at = f" at {place}" if place else ""
                joined.meeting.tell({"end": f"ended by SIGTERM{at}"})
            joined.leave()
