"""World: the registry of this process's groups."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from ..errors import DistError
from ..interface.registry import (
    note_registered_elsewhere,
    registering_modules,
    registrations_at_init,
)
from ..rank_sets import describe_members, name_ranks
from ..stores.base import RANK_0, UNKNOWN_END, Store
from ..thread_start import run_bounded
from ..work.async_errors import take_async_error
from ..work.flight_recorder import recorder, user_frame
from . import arrival
from .abort_reason import AbortReason, Departure, FoundCause
from .config import BackendConfig
from .ended_ranks import EndedRanks
from .generation import DRAIN_WAIT
from .key import GroupKey
from .launched import LaunchedStore, later_round
from .process_group import ProcessGroup
from .remedies import after_death, after_departure, after_store_loss, in_torch
from .row import PATIENCE
from .script_end import line_that_ended, script_frame
from .spec import NON_GROUP_MEMBER, NonGroupMember, Origin
from .summary import GroupSource, GroupStatus, WatchedGroup
from .unattended import before_leave
from .watchdog import watchdog

__all__ = ["DEFAULT", "World", "leave_to_rebuild", "world"]

_log = logging.getLogger(__name__)

G = TypeVar("G", bound="ProcessGroup | WatchedGroup")

#: The name of the default group.
DEFAULT = "default"

#: Seconds that a rank that leaves keeps the connections that others may need.
LINGER = 0.7
# Seconds that the end of a cell or script waits for the end of an abort.
_SETTLE_WAIT = 2.0


class World:
    """All groups of this process.

    The methods with ids or names are for the agent of an engine: they return at once,
    and any thread may call them while the main thread is blocked.
    """

    def __init__(self) -> None:
        self.rank: int | None = None
        self.size: int | None = None
        self.store: Store | None = None
        # The one that `init_process_group` has opened. It is left with the groups, also
        # where a notebook has had these go on in its own store.
        self._own_store: Store | None = None
        #: The first generation of the groups that are made: see `begin_round`.
        self.round = 0
        #: The store, rank and world size of a launcher that made no default group, for
        #: an `init_process_group` that names none.
        self.offered: tuple[Store, int, int] | None = None
        #: When the main thread called `init_process_group` (``time.monotonic()``),
        #: while it meets the other ranks there.
        self.joining_since: float | None = None
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
        #: The libraries whose groups are watched on this rank.
        self.sources: list[GroupSource] = []
        # The ranks that were dead when the running cell was sent, and since when this
        # one knows it (``time.monotonic()``).
        self._dead: dict[int, float] = {}
        # The ranks that died or left all groups, and how this one learns of it.
        self._ended: dict[int, Departure] = {}
        self._ends: EndedRanks | None = None
        #: The line whose `sys.exit` ends the process, where a launcher of ours saw it.
        self.exit_line = ""
        self._script = script_frame()
        #: Why there are no groups, if it is known: in a forked child, in a rank that is
        #: being made ready.
        self.no_groups: str | None = None
        # In a forked child: what its parent has, so that nothing of it is closed here.
        self._of_parent: list[Any] = []
        os.register_at_fork(after_in_child=self._disown)

    # -- making and finding groups -----------------------------------------

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """Note that this thread meets the other ranks, to make the default group."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.joining_since = time.monotonic()
        try:
            yield
        finally:
            self.joining_since = None

    def init(
        self,
        config: BackendConfig,
        store: Store,
        rank: int,
        size: int,
        timeout: float,
        owns_store: bool,
    ) -> ProcessGroup:
        """Make the default group."""
        with self._lock:
            if self.default is not None:
                raise ValueError(
                    "init_process_group: the default group is there already "
                    f"({self.default!r}); call destroy_process_group() first"
                )
            self.rank, self.size = rank, size
            self.store, self._own_store = store, store if owns_store else None
            later = later_round(store)
            self.round = 0 if later is None else later.number
            if owns_store:
                arrival.announce_death(store, rank)
                self._watch_ends(store)
                atexit.register(self._leave)
            for registration in registrations_at_init():
                registration.on_init()
            self.current = self._add(DEFAULT, range(size), config, timeout, self.round)
            return self.current

    def _add(
        self,
        name: str,
        ranks: Sequence[int],
        config: BackendConfig,
        timeout: float,
        generation: int,
        origin: Origin | None = None,
    ) -> ProcessGroup:
        assert self.rank is not None
        assert self.store is not None
        made = ProcessGroup(
            name,
            ranks,
            self.rank,
            config,
            self.store,
            timeout,
            generation,
            origin,
            self._ended,
        )
        self._groups[made.key] = made
        group_id = made.key.id
        recorder.set_apart(group_id)
        if self._ends is not None:
            self._ends.made.append(group_id)
        # Those of before, and one that ended before the group was among these.
        made.note_ended()
        self.no_groups = None
        recorder.changed()
        return made

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

    def new_group(
        self,
        ranks: Sequence[int],
        description: str | None,
        config: BackendConfig,
        timeout: float,
        origin: Origin | None = None,
    ) -> ProcessGroup | NonGroupMember:
        """Make a group of `ranks`; its name needs no communication.

        A name is the description, or the ranks, and a count if the same name was
        used for the same ranks before. Members that make their common groups in
        the same order obtain equal names, whatever other groups each is in.
        """
        assert self.rank is not None
        with self._lock:
            base = description or describe_members(ranks)
            if self.rank not in ranks:
                return NON_GROUP_MEMBER
            key = GroupKey(base, tuple(ranks))
            self._uses[key] = count = self._uses.get(key, 0) + 1
            name = base if count == 1 else f"{base} ({count})"
            return self._add(name, ranks, config, timeout, self.round, origin)

    def shrink(
        self, group: ProcessGroup, excluded: Sequence[int], *, abort: bool
    ) -> ProcessGroup:
        """Make a group of the ranks of `group` without its ranks `excluded`.

        With `abort`, `group` is aborted as soon as the new group does not need it.
        """
        staying = [r for place, r in enumerate(group.ranks) if place not in excluded]
        left_out = [group.ranks[place] for place in excluded]
        reason = (
            f"shrink_group: its {name_ranks(staying)} go on without "
            f"{name_ranks(left_out)}"
        )
        parent = group.current
        # `group` is aborted only after the new backends are split from its own.
        splits = [name for name, one in parent.backends.items() if one.supports_split]
        released = threading.Semaphore(max(0, len(splits) - 1))

        def end() -> None:
            parent.abort(reason)

        def release() -> None:
            if not released.acquire(blocking=False):
                end()

        made = self.new_group(
            staying,
            f"{group.group_desc} without {','.join(map(str, left_out))}",
            group.config,
            group.timeout,
            Origin(group, tuple(excluded), release if abort else None),
        )
        assert isinstance(made, ProcessGroup)
        try:
            for device in splits:
                made.backend_for(device)
        except BaseException:
            if abort:
                end()
            raise
        if abort and not splits:
            end()
        return made

    def get_group(self, name: str | None = None) -> ProcessGroup:
        """Return the group with the name or id `name` (default: the current one).

        Raises `ValueError` if there is none, or if several have the name.
        """
        if name is None and self.current is not None:
            return self.current
        return self._find(DEFAULT if name is None else name, self.groups())

    def _search(self, wanted: str, groups: Sequence[G]) -> G | None:
        """Return the one of `groups` that has the id, or else the name, `wanted`."""
        found = [one for one in groups if one.key.id == wanted] or [
            one for one in groups if one.key.name == wanted
        ]
        if len(found) > 1:
            listed = "; ".join(
                f"{name_ranks(one.key.ranks)} ({one.key.id!r})" for one in found
            )
            raise ValueError(
                f"rank {self.rank} is in {len(found)} groups called {wanted!r}: "
                f"{listed}"
            )
        return found[0] if found else None

    def _find(self, wanted: str, groups: Sequence[G]) -> G:
        """Return what `_search` does; raise `ValueError` where there is none."""
        found = self._search(wanted, groups)
        if found is not None:
            return found
        if not groups and self.no_groups is not None:
            raise DistError(self.no_groups)
        if not groups:
            raise ValueError(
                "there is no process group yet: call init_process_group() first "
                "(%dist_init does it in a notebook)"
            )
        known = ", ".join(repr(one.key.name) for one in groups)
        raise ValueError(
            f"rank {self.rank} is in no group called {wanted!r}; it is in {known}"
        )

    @property
    def default(self) -> ProcessGroup | None:
        """The default group; ``None`` before it is made."""
        return next((one for one in self.groups() if one.group_desc == DEFAULT), None)

    def groups(self) -> list[ProcessGroup]:
        """All groups of this rank, the default one first."""
        return list(self._groups.values())

    @contextlib.contextmanager
    def default_group(self, name: str) -> Iterator[ProcessGroup]:
        """Within the block, ``group=None`` means the group called `name`."""
        chosen = self.get_group(name)
        previous, self.current = self.current, chosen
        try:
            yield chosen
        finally:
            self.current = previous

    # -- for the agent ----------------------------------------------------

    def watched_groups(self) -> list[WatchedGroup]:
        """Return the groups of this rank that other libraries made."""
        return [one for source in self.sources for one in source.groups()]

    def _all_groups(self) -> list[ProcessGroup | WatchedGroup]:
        return [*self.groups(), *self.watched_groups()]

    def summary(self) -> tuple[GroupStatus, ...]:
        """Return the status of this rank in each of its groups.

        The groups of other libraries follow our own.
        """
        return tuple(one.summary() for one in self._all_groups())

    def advice(self) -> tuple[str, ...]:
        """Return what a person should change so that all is shown, in sentences."""
        return tuple(sentence for source in self.sources for sentence in source.advice)

    def note_causes(self, found: Mapping[str, tuple[str, Sequence[int]]]) -> None:
        """Keep why ops hang for the errors of those that time out.

        `found` has the text and the ranks at fault, by the id of the group; what was
        found earlier no longer holds.
        """
        causes = {key: FoundCause(*told) for key, told in found.items()}
        for group in self.groups():
            group.current.deadlines.cause = causes.get(group.key.id)
        for source in self.sources:
            source.note_causes(causes)

    def abort(
        self,
        groups: Iterable[str] | None,
        reason: str,
        *,
        by: str = "",
        culprits: Sequence[int] = (),
        dead: Sequence[int] = (),
    ) -> list[str]:
        """Abort groups, all at once; return their names.

        `groups` are ids (`GroupKey.id`), or names that one group has; ``None``: all.
        Errors contain `reason`, `culprits` and who aborts, `by` (default: this rank).
        Where ranks that are `dead` are the reason, what goes on without them is left
        alone: groups that were made without them once their death was known here, and
        other libraries' that `WatchedGroup.goes_on_without` them. What a person aborts
        ends in every group: one group may wait because another one does. Groups that
        this rank is not in, or has not made, are left out.

        Raises `ValueError` for a name that several groups have; then none is aborted.
        """
        chosen = known = self._all_groups()
        if groups is not None:
            found = [self._search(one, known) for one in groups]
            chosen = [one for one in found if one is not None]
        if dead:
            chosen = [one for one in chosen if not self._outlives(one, dead)]
        # At once: a backend waits up to a second for its library to end a group.
        about: dict[str, Any] = {"by": by, "culprits": culprits}
        remedy = after_death() if dead else ""
        watched = AbortReason(
            reason, by, culprits=tuple(culprits), remedy=in_torch(dead=bool(dead))
        )
        aborts = [
            partial(one.current.abort, reason, **about, remedy=remedy)
            if isinstance(one, ProcessGroup)
            else partial(one.abort, watched)
            for one in chosen
        ]
        if len(aborts) < 2:
            for abort in aborts:
                abort()
        else:
            with ThreadPoolExecutor(len(aborts), "rankscope-abort") as pool:
                for done in [pool.submit(abort) for abort in aborts]:
                    done.result()
        return [one.key.name for one in chosen]

    def note_dead(self, ranks: Iterable[int]) -> None:
        """Keep which ranks were dead when the cell that begins here was sent."""
        now = time.monotonic()
        self._dead = {rank: self._dead.get(rank, now) for rank in ranks}

    def _outlives(
        self, group: ProcessGroup | WatchedGroup, dead: Sequence[int]
    ) -> bool:
        """Return whether `group` goes on when this rank is told that others are `dead`.

        The message may come after this rank has learned of the death in another way,
        and made a group without them.
        """
        if not isinstance(group, ProcessGroup):
            return group.goes_on_without(dead)
        if not set(dead).isdisjoint(group.ranks):
            return False
        known = [self._dead[rank] for rank in dead if rank in self._dead]
        for one in self.groups():
            ended, reason = one.current.ended, one.aborted
            if ended and reason and not set(dead).isdisjoint(reason.culprits):
                known.append(ended)
        return any(at <= group.current.began for at in known)

    def rebuild(
        self,
        group: str | None,
        generation: int | None = None,
        store: Store | None = None,
    ) -> list[str]:
        """Begin a new generation of groups; return their names.

        `group` is an id (`GroupKey.id`), or a name that one group has; ``None``: all.
        `generation` is the number, the same on every rank (default: the next one).
        `store` replaces the store of all groups rebuilt from now on. Raises
        `ValueError` where this rank is not in `group`.
        """
        with self._lock:
            # A notebook restarts dead ranks first.
            self._dead.clear()
            if store is not None:
                self.store = store
                self._ended.clear()
            known = self._all_groups()
            chosen = known if group is None else [self._find(group, known)]
            for one in chosen:
                one.rebuild(generation, store or self.store)
            return [one.key.name for one in chosen]

    def begin_round(self, store: LaunchedStore) -> None:
        """Have all own groups, and those made later, go on in the keys of `store`.

        Their generation is the number of the round: that of fresh processes, too.
        """
        with self._lock:
            self.store, self.round = store, store.number
            if self._own_store is not None:
                self._own_store = store
            self._watch_ends(store)
            for one in self.groups():
                one.rebuild(store.number, store)

    def export_groups(self) -> dict[str, Any]:
        """Return the state that a fresh process needs to join the same groups."""
        with self._lock:
            backends = {
                name
                for one in self.groups()
                for name in one.config.device_backend_map.values()
            }
            return {
                "modules": registering_modules(backends),
                "uses": [(*key, count) for key, count in self._uses.items()],
                "groups": [
                    {
                        "id": one.key.id,
                        "name": one.group_desc,
                        "ranks": one.ranks,
                        "backend": str(one.config),
                        "timeout": one.timeout,
                        "generation": one.generation,
                        "wrapped": one.key in self.wrapped,
                    }
                    for one in self.groups()
                ],
                # A group that is still being made has nothing to export.
                "watched": [
                    exported
                    for one in self.watched_groups()
                    if (exported := one.export())
                ],
            }

    def import_groups(self, exported: dict[str, Any]) -> list[str]:
        """Make this rank's groups from another rank's `export_groups`; return names.

        The backends of a group need not be registered here: see `registry.resolve`.
        """
        note_registered_elsewhere(exported["modules"])
        with self._lock:
            made = []
            for one in exported["groups"]:
                key = GroupKey(one["name"], tuple(one["ranks"]))
                if one["wrapped"]:
                    self.wrapped.add(key)
                if self.rank not in one["ranks"]:
                    continue
                known = self._groups.get(key)
                if known is None:
                    self._add(
                        one["name"],
                        one["ranks"],
                        BackendConfig.from_peer(one["backend"]),
                        one["timeout"],
                        one["generation"],
                    )
                    made.append(one["name"])
                elif known.generation != one["generation"]:
                    # The default group, which was made first: not in the generation
                    # of a hang that the others have left behind.
                    known.rebuild(one["generation"], self.store)
            for one in exported["watched"]:
                for source in self.sources:
                    if source.library == one["library"]:
                        source.import_group(one)
                        made.append(one["name"])
            self.import_uses(exported)
            return made

    def import_uses(self, exported: dict[str, Any]) -> None:
        """Name groups that are made later as the rank of `exported` does."""
        with self._lock:
            for base, ranks, count in exported["uses"]:
                key = GroupKey(base, tuple(ranks))
                self._uses[key] = max(count, self._uses.get(key, 0))

    def destroy(self, group: ProcessGroup | None = None) -> None:
        """Shut down `group`; if it is the default one, or ``None``, all groups."""
        where = recorder.name_source(user_frame())
        how = f" by destroy_process_group() at {where}"
        if group is None or group.group_desc == DEFAULT:
            self._before_leave()
        with self._lock:
            if group is not None and group.group_desc != DEFAULT:
                _leave_groups([group], how, after_departure())
                group.shutdown()
                group.current.forget()
                self._groups.pop(group.key, None)
                self.wrapped.discard(group.key)
                recorder.changed()
                return
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
                run_bounded("forget", lambda: _forget_groups(chosen), PATIENCE)
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

    def async_error(self) -> BaseException | None:
        """Return an unreported error of an op, if any; see `work.async_errors`.

        Waits up to 2 s for the end of aborts: kernels end before their Works do.
        """
        deadline = time.monotonic() + _SETTLE_WAIT
        while time.monotonic() < deadline and any(
            group.aborted is not None and group.status.in_flight
            for group in self.groups()
        ):
            time.sleep(0.005)
        return take_async_error()

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
        """Leave the groups to the parent: this process is its forked child.

        The child would read and write the parent's sockets. It may make groups of its
        own, as a rank of its own.
        """
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
        """Have rank 0 not wait for this one, whose program an error has ended.

        Its process ends later: once it has written a report.
        """
        if self._own_store is not None and self.rank is not None:
            arrival.announce_end(self._own_store, self.rank)

    def _say_goodbye(self, store: Store, *, wait: bool = True) -> None:
        assert self.rank is not None
        assert self.size is not None
        arrival.say_goodbye(store, self.rank, self.size, wait=wait)


def leave_to_rebuild(groups: Sequence[ProcessGroup], call: str) -> None:
    """Tell the other ranks of `groups` that this one begins new generations by `call`.

    What they have in flight with it would wait for it. Groups that are aborted have
    told why already.
    """
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


def _forget_groups(groups: Sequence[ProcessGroup]) -> None:
    """Have the store forget `groups` once every rank has destroyed them."""
    for group in groups:
        group.current.forget()


#: The groups of this process.
world = World()
