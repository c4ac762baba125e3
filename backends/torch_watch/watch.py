"""The watch of torch in this process: a thread that reads what torch's groups do."""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from ..groups.abort_reason import FoundCause
from ..groups.key import GroupKey
from ..groups.world import world
from ..observe.joint_ops import slim
from ..thread_start import start_thread
from ..work.flight_recorder import recorder
from ..work.user_code import frame_of, users_frame
from . import creation
from .calls import CallLog
from .errors import install_excepthook, on_broken
from .frames import note_submitters
from .given_up import has_timed_out, note_failed_call, note_given_up
from .groups import TorchGroup, base_name
from .patching import replace, when_imported
from .private.groups import C10D, RECORDER_SIZE, REGISTER, SET_DEFAULT, Names, probe
from .stores import is_gone
from .tracker import Status, Tracker
from .unfinished import PendingGroup, UnfinishedGroup, UnfinishedGroups

__all__ = ["TorchWatch", "watch"]

_log = logging.getLogger(__name__)

#: The entries of torch's Flight Recorder, if the user has not set their number: a
#: reading costs 10 µs for each.
ENTRIES = 256

#: Records of groups that are destroyed that are kept.
PAST = 600

#: The advice where torch records nothing.
RECORDER_OFF = (
    "torch's Flight Recorder is off, or lacks gloo, so only ops that Python code "
    "issues are shown, and none of DDP's gradients: set TORCH_FR_BUFFER_SIZE="
    f"{ENTRIES} before torch makes its first group, or use a newer torch"
)

#: Seconds between two looks at torch's counters, which cost little.
INTERVAL = 0.1
#: The part of one core that the readings may take: they are seldom if they cost much.
SHARE = 1 / 150

#: Seconds after which torch's entries are read anew: while its counters go on, and
#: while ops are in flight though they stand still.
_STALE = 1.0
#: The part of torch's recorder that may be new at the next reading: it must not turn
#: over meanwhile.
_NEW = 1 / 4
# Seconds that a summary may be older than the last reading.
_FRESH = 0.1


def _users_line() -> str:
    frame = users_frame(sys._getframe())
    return "" if frame is None else recorder.name_source(frame_of(frame))


class TorchWatch:
    """The groups of torch in this process: a `GroupSource` of the world.

    The watch begins when this process imports ``torch.distributed``, or at once if it
    did. It never imports torch.
    """

    library = "torch"

    def __init__(self) -> None:
        self.names: Names | None = None
        self.calls: CallLog | None = None
        self._tracker = Tracker()
        self._groups: dict[Any, TorchGroup] = {}
        self._pending: list[PendingGroup] = []
        self._unfinished = UnfinishedGroups(self._key)
        self._born: dict[str, int] = {}
        self._status: Any = None
        self._confirmed = False
        self._enqueued = 0
        self._lock = threading.RLock()
        self._read_at = self._dumped_at = 0.0
        #: See `GroupSource.past`.
        self.past: Mapping[str, Any] = {}
        #: What a person should change so that the watch sees all; mostly empty.
        self.advice: list[str] = []
        #: Mean CPU seconds of a reading.
        self.cost = 0.0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._undo: list[Callable[[], None]] = []
        self._warned = False
        self._sets_size = False
        #: Each is called as ``listener(group, error)`` with the error of an op, before
        #: it is raised.
        self.on_error: list[Callable[[Any, BaseException], None]] = []
        #: Each is called before all groups are destroyed; it must not raise.
        self.before_destroy: list[Callable[[], None]] = []

    # -- start and stop -------------------------------------------------------------

    def start(self) -> None:
        """Watch from now on, or from the import of ``torch.distributed`` on."""
        # Torch reads it when the first group is made.
        self._sets_size = not any(name in os.environ for name in RECORDER_SIZE)
        if self._sets_size:
            os.environ[RECORDER_SIZE[0]] = str(ENTRIES)
        self._undo.append(when_imported(C10D, self._install))

    def stop(self) -> None:
        """End the thread and take the wrappers out of torch."""
        self._stopped.set()
        while self._undo:
            self._undo.pop()()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _install(self, c10d: ModuleType) -> None:
        names = probe(c10d)
        for sentence in names.missing:
            self._advise(sentence)
        # Newer ones warn of the older name.
        if self._sets_size and names.release < (2, 9):
            os.environ[RECORDER_SIZE[1]] = str(ENTRIES)
        self.calls = CallLog(names)
        self.calls.install()
        self.calls.on_error = self.on_error
        self.on_error.insert(0, note_failed_call)
        on_broken.append(self._note_broken)
        self._undo += [
            self.calls.remove,
            creation.install(names, self._unfinished.making),
            install_excepthook(),
            note_submitters(),
            lambda: on_broken.remove(self._note_broken),
            self._note_births(names),
            self._keep_past(names),
        ]
        with self._lock:
            self.names = names
            self._discover()
        self._thread = start_thread("torch-watch", self._run)
        # Torch must not be read while its library is taken down.
        atexit.register(self.stop)
        self._undo.append(lambda: atexit.unregister(self.stop))

    def _advise(self, sentence: str) -> None:
        """Show a sentence on the board, and in the log for those who have none."""
        self.advice.append(sentence)
        _log.warning(sentence)

    def _note_births(self, torch: Names) -> Callable[[], None]:
        """Note when each group is made: numbers and names are used again."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def register(name: str, group: Any) -> Any:
                # The groups before it first: their order gives them their names.
                with self._lock:
                    self._discover()
                    self._born[name] = time.time_ns()
                result = original(name, group)
                recorder.changed()
                return result

            return register

        return replace(torch.c10d, REGISTER, wrap)

    def _keep_past(self, torch: Names) -> Callable[[], None]:
        """Keep what tells of the last ops when all groups are destroyed."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def update(default: Any) -> Any:
                if default is None and torch.default is not None:
                    for call in self.before_destroy:
                        call()
                    try:
                        self.past = {**self._last_ops(), "ended_at": _users_line()}
                    except Exception:  # noqa: BLE001 - the script goes on
                        _log.exception("what torch's groups did last is not kept")
                return original(default)

            return update

        return replace(torch.c10d, SET_DEFAULT, wrap)

    def _last_ops(self) -> dict[str, Any]:
        records = [slim(one) for one in self.records()[-PAST:]]
        groups = {
            one.key.id: {"name": one.name, "ranks": [*one.key.ranks]}
            for one in self._groups.values()
        }
        return {"groups": groups, "records": records}

    # -- GroupSource -------------------------------------------------------------------

    @property
    def rank(self) -> int | None:
        """The global rank of this process, if torch has a default group."""
        default = self._default()
        return None if default is None else int(default.rank())

    @property
    def world_size(self) -> int | None:
        """The number of ranks of torch's default group, if there is one."""
        default = self._default()
        return None if default is None else int(default.size())

    def store(self) -> Any:
        """Return torch's store of the default group; ``None`` where there is none."""
        default = self._default()
        if self.names is None or default is None:
            return None
        return self.names.store(default)

    def living_store(self) -> Any:
        """Return what `store` does; ``None`` also where nobody serves it any more."""
        names, default = self.names, self._default()
        if names is None or default is None or is_gone(names.own_store(default)):
            return None
        return self.store()

    def groups(self) -> Sequence[TorchGroup | PendingGroup | UnfinishedGroup]:
        """Return the groups of this rank, the default one first, unmade ones last."""
        with self._lock:
            self._discover()
            made = list(self._groups.values())
            known = {one.key for one in made}
            self._pending = [one for one in self._pending if one.key not in known]
            return [*made, *self._pending, *self._unfinished_groups()]

    def note_causes(self, found: Mapping[str, FoundCause]) -> None:
        """Keep why ops hang, for the errors of those that torch gives up."""
        with self._lock:
            for group in self._groups.values():
                group.made.cause = found.get(group.key.id)

    def import_group(self, exported: Mapping[str, Any]) -> None:
        """Have a group that other ranks exported, until its rebuild makes it here."""
        with self._lock:
            known = {one.key for one in self.groups()}
            pending = PendingGroup(exported)
            member = int(os.environ.get("RANK", "-1")) in pending.key.ranks
            if member and pending.key not in known:
                self._pending.append(pending)

    def records(self) -> Sequence[dict[str, Any]]:
        """Return the records of the ops of the groups there are, oldest first."""
        with self._lock:
            self.read()
            # A rank that is about to end has been in its last op for a moment.
            self._tracker.find_frames(0.0)
            records = self._tracker.records(self._groups.values())
            return [
                *(one.as_dict() for one in records),
                *(one.record() for one in self._unfinished_groups()),
            ]

    def _unfinished_groups(self) -> list[UnfinishedGroup]:
        known = {one.key for one in self._groups.values()}
        return [one for one in self._unfinished if one.key not in known]

    def _default(self) -> Any:
        return None if self.names is None else self.names.default

    # -- reading torch ---------------------------------------------------------------

    def refresh(self, *, fully: bool = False) -> None:
        """Look at torch, unless that was done a moment ago; note the ends of calls.

        The last ops may be missing, unless torch is read `fully`.
        """
        with self._lock:
            calls = self.calls
            if fully:
                self.read()
            elif time.monotonic() - self._read_at > max(_FRESH, self.cost / SHARE):
                self.read(lazily=True)
            elif calls is not None and calls.changed:
                calls.changed = False
                self._tracker.update(None, (), self._groups, self._registered())

    def read(self, *, lazily: bool = False) -> None:
        """Read registry, recorder and calls; call the listeners with what has changed.

        The entries of the recorder cost much: they are read `lazily` where ops follow
        each other, and in any case where one has not ended since the last look.
        """
        began = time.thread_time()
        with self._lock:
            names, calls = self.names, self.calls
            if names is None or calls is None:
                return
            changed = self._discover()
            calls.changed = False
            taken = calls.take()
            entries = self._dump(names, bool(taken), lazily)
            changed |= self._tracker.update(
                entries, taken, self._groups, self._registered()
            )
            self._read_at = time.monotonic()
            if self._tracker.blind and RECORDER_OFF not in self.advice:
                self._advise(RECORDER_OFF)
                changed = True
            # A mean over the last ones: the first one is slow.
            self.cost += 0.2 * (time.thread_time() - began - self.cost)
        if changed:
            recorder.changed()

    def _note_broken(self, group: Any, error: str) -> None:
        with self._lock:
            self.read()
            known = self._groups.get(group)
            record = known and self._tracker.fail_last(known, error)
        if record:
            if has_timed_out(error):
                note_given_up(group, record, record.created_ns)
            recorder.changed()

    def _registered(self) -> list[Any]:
        return [] if self.names is None else self.names.groups()

    def _discover(self) -> bool:
        """Bring the groups up to date; return whether there are others."""
        names = self.names
        if names is None:
            return False
        living = names.groups()
        if len(living) == len(self._groups) and all(
            one in self._groups for one in living
        ):
            return False
        self._groups = {
            group: known for group, known in self._groups.items() if group in living
        }
        for group in living:
            ranks = None if group in self._groups else names.ranks(group)
            if ranks is not None:
                self._groups[group] = TorchGroup(
                    group,
                    self._key(group.group_name, group.group_desc, ranks),
                    names,
                    self._born.get(group.group_name, 0),
                    self.refresh,
                )
        # A group that was rebuilt has the place of the one before.
        in_order = sorted(self._groups.items(), key=lambda one: one[1].made.place)
        self._groups = dict(in_order)
        return True

    def _key(self, name: str, description: str, ranks: tuple[int, ...]) -> GroupKey:
        """Return the first name that no other group of the same ranks has."""
        base = base_name(name, description, ranks)
        used = {one.key for one in self._groups.values()}
        key, count = GroupKey(base, ranks), 1
        while key in used:
            count += 1
            key = GroupKey(f"{base} ({count})", ranks)
        return key

    def _dump(
        self, names: Names, called: bool, lazily: bool
    ) -> list[dict[str, Any]] | None:
        """Return the entries of torch's recorder; ``None`` if they were not read."""
        if names.dump is None:
            return []
        status = pickle.loads(names.dump(False, False, False)).get("pg_status")
        age = time.monotonic() - self._dumped_at
        same = status is not None and status == self._status
        self._status = status
        if status is not None:
            self._tracker.note_status(status, time.time_ns())
        if same and self._confirmed and not called:
            if self._tracker.in_flight == 0 or age < _STALE:
                return None
        elif lazily and status is not None and age < _STALE:
            waits = same and (called or _pending(status))
            if not waits and not self._fills(status):
                self._confirmed = False
                return None
        # Torch may count an op before it has its entry: once more when nothing changes.
        self._confirmed = same
        self._dumped_at = time.monotonic()
        self._enqueued = _enqueued(status)
        self._tracker.dumped_ns = time.time_ns()
        return pickle.loads(names.dump(True, False, False)).get("entries", [])

    def _fills(self, status: Status) -> bool:
        """Return whether much of torch's recorder is new since the last reading."""
        sizes = (os.environ.get(name, "") for name in RECORDER_SIZE)
        size = next((int(one) for one in sizes if one.isdecimal()), ENTRIES)
        return _enqueued(status) - self._enqueued >= size * _NEW

    def _run(self) -> None:
        while not self._stopped.wait(max(INTERVAL, self.cost / SHARE)):
            try:
                self.read(lazily=True)
            except Exception:  # noqa: BLE001 - the thread goes on
                # The next reading may succeed: torch's groups come and go.
                if not self._warned:
                    self._warned = True
                    _log.exception("torch's groups could not be read")


def _enqueued(status: Status | None) -> int:
    """Return how many ops torch's groups have enqueued, by its counters."""
    counters = (status or {}).values()
    return sum(max(0, one.get("last_enqueued_collective", 0)) for one in counters)


def _pending(status: Status) -> bool:
    return any(
        one.get("last_enqueued_collective", 0) > one.get("last_completed_collective", 0)
        for one in status.values()
    )


_watch: TorchWatch | None = None
_lock = threading.Lock()


def watch() -> TorchWatch:
    """Watch the groups of ``torch.distributed`` in this process; return the watch.

    The groups appear in `world.summary`, `local_dump` and on the board. Later calls
    return the same watch. Torch is not imported: the watch begins when it is.
    """
    global _watch
    with _lock:
        if _watch is None:
            _watch = TorchWatch()
            world.sources.append(_watch)
            _watch.start()
        return _watch
