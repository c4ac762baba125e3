"""World: the registry of this process's groups."""

from __future__ import annotations

import contextlib
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
from ..stores.base import Store
from ..work.async_errors import take_async_error
from ..work.flight_recorder import recorder
from .abort_reason import AbortReason, FoundCause
from .config import BackendConfig
from .job import DEFAULT, Job
from .key import GroupKey
from .launched import LaunchedStore, later_round
from .process_group import ProcessGroup
from .remedies import after_death, in_torch
from .spec import NON_GROUP_MEMBER, NonGroupMember, Origin
from .summary import GroupSource, GroupStatus, WatchedGroup

__all__ = ["DEFAULT", "World", "world"]

G = TypeVar("G", bound="ProcessGroup | WatchedGroup")

# Seconds that the end of a cell or script waits for the end of an abort.
_SETTLE_WAIT = 2.0


class World(Job):
    """All groups of this process.

    The methods with ids or names are for the agent of an engine: they return at once,
    and any thread may call them while the main thread is blocked.
    """

    def __init__(self) -> None:
        super().__init__()
        #: The first generation of the groups that are made: see `begin_round`.
        self.round = 0
        #: The store, rank and world size of a launcher that made no default group, for
        #: an `init_process_group` that names none.
        self.offered: tuple[Store, int, int] | None = None
        #: When the main thread called `init_process_group` (``time.monotonic()``),
        #: while it meets the other ranks there.
        self.joining_since: float | None = None
        #: The libraries whose groups are watched on this rank.
        self.sources: list[GroupSource] = []
        # The ranks that were dead when the running cell was sent, and since when this
        # one knows it (``time.monotonic()``).
        self._dead: dict[int, float] = {}

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
            self._join(store, rank, size, owns_store)
            later = later_round(store)
            self.round = 0 if later is None else later.number
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
            key = named = GroupKey(base, tuple(ranks))
            count = self._uses.get(key, 0)
            name = base
            # A description may look like a name with its count: 'tp (2)'.
            while named in self._uses:
                count += 1
                name = f"{base} ({count})"
                named = GroupKey(name, key.ranks)
            self._uses[named] = 1
            self._uses[key] = max(count, 1)
            return self._add(name, ranks, config, timeout, self.round, origin)

    def shrink(
        self, group: ProcessGroup, excluded: Sequence[int], *, abort: bool
    ) -> ProcessGroup:
        """Make a group of the ranks of `group` without its ranks `excluded`."""
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
        end = partial(parent.abort, reason)

        def release() -> None:
            if not released.acquire(blocking=False):
                end()

        made = self.new_group(
            staying,
            f"{group.group_desc} without {','.join(map(str, left_out))}",
            group.config,
            group.timeout,
            Origin(group.built_backend, tuple(excluded), release if abort else None),
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
        """Return the group with the name or id `name` (default: the current one)."""
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

    def all_groups(self) -> list[ProcessGroup | WatchedGroup]:
        """Return our own groups and those of other libraries."""
        return [*self.groups(), *self.watched_groups()]

    def summary(self) -> tuple[GroupStatus, ...]:
        """Return the status of this rank in each of its groups."""
        return tuple(one.summary() for one in self.all_groups())

    def advice(self) -> tuple[str, ...]:
        """Return what a person should change so that all is shown, in sentences."""
        return tuple(sentence for source in self.sources for sentence in source.advice)

    def note_causes(self, found: Mapping[str, tuple[str, Sequence[int]]]) -> None:
        """Keep why ops hang for the errors of those that time out."""
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
        diagnosis: str = "",
    ) -> list[str]:
        """Abort groups, all at once; return their names.

        `reason`, `by`, `culprits` and `diagnosis` are those of an `AbortReason`.
        `groups` are ids (`GroupKey.id`), or names that one group has; ``None``: all.
        Where ranks that are `dead` are the reason, what goes on without them is left
        alone: groups that were made without them once their death was known here, and
        other libraries' that `WatchedGroup.goes_on_without` them. What a person aborts
        ends in every group: one group may wait because another one does.
        """
        chosen = known = self.all_groups()
        if groups is not None:
            chosen = [one for name in groups if (one := self._search(name, known))]
        if dead:
            chosen = [one for one in chosen if not self._outlives(one, dead)]
        # At once: a backend waits up to a second for its library to end a group.
        about: dict[str, Any] = {
            "by": by,
            "culprits": tuple(culprits),
            "diagnosis": diagnosis,
        }
        remedy = after_death() if dead else ""
        watched = AbortReason(reason, **about, remedy=in_torch(dead=bool(dead)))
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
        """Begin a new generation of groups; return their names."""
        with self._lock:
            # A notebook restarts dead ranks first.
            self._dead.clear()
            if store is not None:
                self.store = store
                self._ended.clear()
            known = self.all_groups()
            chosen = known if group is None else [self._find(group, known)]
            for one in chosen:
                one.rebuild(generation, store or self.store)
            return [one.key.name for one in chosen]

    def begin_round(self, store: LaunchedStore) -> None:
        """Have all own groups, and those made later, go on in the keys of `store`."""
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
        """Make this rank's groups from another rank's `export_groups`; return names."""
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

    def async_error(self) -> BaseException | None:
        """Return an unreported error of an op, if any; see `work.async_errors`."""
        deadline = time.monotonic() + _SETTLE_WAIT
        while time.monotonic() < deadline and any(
            group.aborted is not None and group.status.in_flight
            for group in self.groups()
        ):
            time.sleep(0.005)
        return take_async_error()


#: The groups of this process.
world = World()
