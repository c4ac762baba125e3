"""Job: this process as a rank of its job, and how ranks leave the job."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from multiprocessing import parent_process
from opcode import opname
from types import FrameType
from typing import Any

from ..errors import DistError
from ..stores.base import RANK_0, UNKNOWN_END, Store
from ..stores.prefix import PrefixStore
from ..thread_start import run_bounded
from ..work.flight_recorder import recorder, user_frame
from ..work.user_code import is_installed
from . import arrival
from .abort_reason import STORE, Departure, describe_death
from .generation import DRAIN_WAIT
from .key import GroupKey
from .process_group import ProcessGroup
from .remedies import after_death, after_departure, after_store_loss
from .row import PATIENCE, Row
from .unattended import before_leave
from .watchdog import watchdog

__all__ = ["DEFAULT", "Job", "leave_to_rebuild", "line_that_ended", "script_frame"]

_log = logging.getLogger(__name__)

#: The name of the default group.
DEFAULT = "default"

#: Seconds that a rank that leaves keeps the connections that others may need.
LINGER = 0.7


class Job:
    """The store and the groups of this process, which other ranks must see it leave."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self.size: int | None = None
        self.store: Store | None = None
        # The one that `init_process_group` has opened. It is left with the groups, also
        # where a notebook has had these go on in its own store.
        self._own_store: Store | None = None
        # Groups may share a name if their ranks differ: a rank has no record of the
        # groups that it is not in.
        self._groups: dict[GroupKey, ProcessGroup] = {}
        # Number of groups made with the same description and ranks.
        self._uses: dict[GroupKey, int] = {}
        #: The groups that an object of another library stands for, such as torch's: a
        #: fresh process has to make that object.
        self.wrapped: set[GroupKey] = set()
        #: What ``group=None`` means; ``None`` before there is a default group.
        self.current: ProcessGroup | None = None
        self._lock = threading.RLock()
        # The ranks that died or left all groups, and how this one learns of it.
        self._ended: dict[int, Departure] = {}
        self._ends: EndedRanks | None = None
        #: The line that has destroyed all groups, until there are others.
        self.groups_ended_at = ""
        #: The last exception that ended a thread, of a cell in this one alone, and the
        #: line that raised it: ``KeyError: 7 at data.py:5``.
        self.thread_exception = ""
        #: The line whose `sys.exit` ends the process, where a launcher of ours saw it.
        self.exit_line = ""
        self._script = script_frame()
        #: Why there are no groups, if it is known: in a forked child, in a rank that is
        #: being made ready.
        self.no_groups: str | None = None
        # In a forked child: what its parent has, so that nothing of it is closed here.
        self._of_parent: list[Any] = []
        os.register_at_fork(after_in_child=self._disown)

    def groups(self) -> list[ProcessGroup]:
        """All groups of this rank, the default one first."""
        return list(self._groups.values())

    def _join(self, store: Store, rank: int, size: int, owns_store: bool) -> None:
        self.rank, self.size = rank, size
        self.groups_ended_at = ""
        self.store, self._own_store = store, store if owns_store else None
        if owns_store:
            arrival.announce_death(store, rank)
            self._watch_ends(store)
            atexit.register(self._leave)

    def _watch_ends(self, store: Store) -> None:
        """Learn from now on which ranks end, of the processes that meet in `store`."""
        assert self.rank is not None
        if self._ends is not None:
            self._ends.close()
        self._ended.clear()
        made = [one.key.id for one in self.groups()]
        self._ends = EndedRanks(store, self.rank, made, self._rank_ended)

    def _rank_ended(self, departure: Departure) -> None:
        self._ended[departure.rank] = departure
        for group in self.groups():
            group.note_ended()

    def destroy(self, group: ProcessGroup | None = None) -> None:
        """Shut down `group`; if it is the default one, or ``None``, all groups."""
        where = recorder.name_source(user_frame())
        how = f" by destroy_process_group() at {where}"
        if group is not None and group.group_desc != DEFAULT:
            with self._lock:
                _leave_groups([group], how, after_departure())
                group.shutdown()
                group.current.forget()
                self._groups.pop(group.key, None)
                self.wrapped.discard(group.key)
                recorder.changed()
            return
        self.groups_ended_at = where
        self._before_leave()
        with self._lock:
            chosen, self._groups = self.groups(), {}
        remedy = self._remedy()
        try:
            _leave_groups(chosen, how, remedy)
            for one in reversed(chosen):
                one.shutdown()
            if self._ends is not None:
                self._ends.leave(how, remedy)
            if self.store is not self._own_store:
                # It serves later groups, too, which may have the same names.
                forget = [one.current.forget for one in chosen]
                run_bounded("forget", lambda: [call() for call in forget], PATIENCE)
        except BaseException as error:
            for one in chosen:
                one.abort(f"destroy_process_group() was ended by {error!r}")
            raise
        finally:
            self._forget()

    def _before_leave(self) -> None:
        store, rank, size = self.store, self.rank, self.size
        if store is not None and rank is not None and size is not None:
            for call in before_leave:
                call(store, rank, size)

    def _forget(self) -> None:
        """Return to the state before the default group was made."""
        watchdog.stop(timeout=5)
        store, self.store = self.store, None
        own, self._own_store = self._own_store, None
        if own is not None:
            atexit.unregister(self._leave)
            self._ends = None
            self._say_goodbye(own)
            own.close()
        elif store is not None and self.size is not None:
            arrival.forget(store, self.size)
        self._ended.clear()
        self.rank = self.size = None
        self._uses.clear()
        self.wrapped.clear()
        self.current = None
        recorder.changed()

    def _leave(self) -> None:
        """Leave the store at exit; a script that raised leaves without a goodbye."""
        store, error = self._own_store, getattr(sys, "last_value", None)
        if store is None:
            return
        arrival.hurry(store)
        if error is None or hasattr(sys, "ps1"):
            self._leave_at_end(store)
            return
        said = f": {error}" if str(error) else ""
        notice = f"rank {self.rank} ended with {type(error).__name__}{said}"
        try:
            for group in self.groups():
                group.current.publish_death_notice(notice)
            if self._ends is not None:
                self._ends.will_die(notice)
        except DistError as failed:
            _log.debug("rank %s: no notice: %s", self.rank, failed)

    def line_at_end(self) -> str:
        """Return the line that ended the script; empty: its last one, or unknown."""
        return self.exit_line or line_that_ended(self._script)

    def _leave_at_end(self, store: Store) -> None:
        """Leave the groups because the process ends: its last will says how it did."""
        self._before_leave()
        line = self.line_at_end()
        at = f" at {line}" if line else ""
        how = f": its process ended{at} ({UNKNOWN_END})"
        serves, remedy = self._serves_store(), self._remedy()
        if serves:
            # The store ends with this process, and reports nothing after it.
            how = f": its process, which serves the store, ends{at}"
        try:
            for group in self.groups():
                group.current.leave(how, ends=True, by_will=not serves, remedy=remedy)
            if self._ends is not None:
                tell = self._ends.leave if serves else self._ends.will_leave
                tell(how, remedy)
        except DistError as failed:
            _log.debug("no departure: %s", failed)
        if serves:
            self._say_goodbye(store, wait=False)

    def _serves_store(self) -> bool:
        store = self._own_store
        return self.rank == 0 and store is not None and store.server == RANK_0

    def _remedy(self) -> str:
        """Return what the others can do where this rank leaves all groups."""
        return after_store_loss() if self._serves_store() else after_departure()

    def _disown(self) -> None:
        """Leave the groups to the parent: this process is its forked child."""
        if self.rank is None:
            return
        self.no_groups = why = (
            f"process {os.getpid()} was forked from rank {self.rank} (process "
            f"{os.getppid()}) and has no part in its groups: start the process with "
            "multiprocessing's 'spawn' and call init_process_group() there, or leave "
            "collectives to the rank"
        )
        self._of_parent += [self.store, self._own_store, *self._groups.values()]
        for group in self._groups.values():
            group.current.disown(why)
        atexit.unregister(self._leave)
        self._lock = threading.RLock()
        self._groups, self._uses, self.current = {}, {}, None
        self.wrapped = set()
        self.store = self._own_store = self.rank = self.size = self._ends = None
        self._ended = {}

    def announce_end(self) -> None:
        """Have rank 0 not wait for this one, whose program an error has ended."""
        if self._own_store is not None and self.rank is not None:
            arrival.announce_end(self._own_store, self.rank)

    def _say_goodbye(self, store: Store, *, wait: bool = True) -> None:
        if self.rank is not None and self.size is not None:
            arrival.say_goodbye(store, self.rank, self.size, wait=wait)


def leave_to_rebuild(groups: Sequence[ProcessGroup], call: str) -> None:
    """Tell the other ranks that this one begins new generations by `call`."""
    error = sys.exc_info()[1]
    how = f" by {call} at {recorder.name_source(user_frame())}"
    if error is not None:
        how += f", as it handled {type(error).__name__}: {error}"
    remedy = f"the group goes on once every rank has called {call}"
    for group in groups:
        group.current.leave(how, ends=True, for_good=False, remedy=remedy)


def _leave_groups(groups: Sequence[ProcessGroup], how: str, remedy: str) -> None:
    """Tell the other ranks of `groups` that this one leaves them, and let them end."""
    drained = time.monotonic() + DRAIN_WAIT
    for group in groups:
        group.current.drain(drained)
    for group in groups:
        group.current.leave(how, remedy=remedy)
    deadline = time.monotonic() + LINGER
    for group in groups:
        group.current.linger(deadline)


class EndedRanks:
    """The ranks that ended, as the store tells, and what it is to tell of `rank`.

    A rank tells the members of each group that it has made. From here the others learn
    that it will not come to make one that they make later, such as that of a shrink.
    ``on_end(departure)`` is called on a thread of the store and must not use the store.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        made: Iterable[str],
        on_end: Callable[[Departure], None],
    ) -> None:
        self._row = Row(PrefixStore("ended", store), "rank", f"rank {rank}")
        self._rank, self._on_end = rank, on_end
        self._closed = False
        #: The ids of the groups that this rank has made.
        self.made = list(made)
        self._row.watch(self._heard, self._keep)
        self.will_die(describe_death(rank))

    def will_die(self, text: str) -> None:
        """Have the others told `text` once this process has ended."""
        died = Departure(self._rank, text, 0, after_death(), by=STORE)
        self._row.append_at_end(died.to_json())

    def will_leave(self, how: str, remedy: str) -> None:
        """Have the others told that this rank left, and `how`, once it has ended."""
        if not self._row.append_at_end(self._left(how, remedy)):
            self.leave(how, remedy)

    def leave(self, how: str, remedy: str) -> None:
        """Tell the others that this rank leaves all groups, as `will_leave` does."""
        self.close()
        self._row.append(self._left(how, remedy))

    def close(self) -> None:
        """Hear no more, as of what concerns processes that others have replaced."""
        self._closed = True
        self._cancel()

    def _keep(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        if self._closed:
            cancel()

    def _left(self, how: str, remedy: str) -> str:
        text = f"rank {self._rank} left{how}"
        return Departure(self._rank, text, 0, remedy, told=self.made).to_json()

    def _heard(self, _number: int, value: bytes) -> None:
        departure = Departure.from_json(value)
        if departure.by == STORE:
            # What helps is known here, and was not yet as the rank began.
            departure = replace(departure, remedy=after_death())
        if departure.rank != self._rank and not self._closed:
            self._on_end(departure)


def script_frame() -> FrameType | None:
    """Return the frame of the script that runs; None where another process runs it."""
    frame: FrameType | None = sys._getframe()
    found = None
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            found = frame if frame.f_globals.get("__name__") == "__main__" else found
        frame = frame.f_back
    return found if parent_process() is None else None


def line_that_ended(script: FrameType | None) -> str:
    """Return the line of `script` at which a `SystemExit` has left it; empty: none.

    A frame keeps its last instruction: a return, where the script came to its end.
    """
    if script is None or is_installed(script.f_code.co_filename):
        return ""
    code, number = script.f_code, script.f_lineno
    if number is None or opname[code.co_code[script.f_lasti]].startswith("RETURN"):
        return ""
    return recorder.name_source((code.co_filename, number, code.co_name))
