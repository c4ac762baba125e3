"""The groups of this process: the default one and those made from it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from .config import BackendConfig
from .errors import DistError
from .prefix_store import PrefixStore
from .process_group import ProcessGroup
from .recorder import recorder
from .store import Store
from .watchdog import watchdog

__all__ = ["DEFAULT", "NonGroupMember", "World", "listed", "world"]

#: The name of the default group.
DEFAULT = "default"

# How long rank 0, which hosts the store, waits for the others to leave it.
_GOODBYE_TIMEOUT = 5.0


class NonGroupMember:
    """What `new_group` returns on a rank that is not in the new group."""

    def __init__(self, name: str, ranks: Sequence[int], rank: int) -> None:
        self.name = name
        self.ranks = list(ranks)
        self.global_rank = rank

    def refuse(self, op: str) -> NoReturn:
        """Raise the error of every op on a group this rank is not in."""
        raise ValueError(
            f"{op}: rank {self.global_rank} is not in group {self.name!r} (ranks "
            f"{listed(self.ranks)}); call it on those ranks only"
        )

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return (
            f"<NonGroupMember: rank {self.global_rank} is not in {self.name!r} "
            f"(ranks {listed(self.ranks)})>"
        )


class World:
    """All groups of this process, by name.

    The methods that take names serve the engine's agent: they return at once
    and may be called from any thread while the main thread is blocked.
    """

    def __init__(self) -> None:
        self.rank: int | None = None
        self.size: int | None = None
        self.store: Store | None = None
        self._owns_store = False
        self._groups: dict[str, ProcessGroup] = {}
        self._names: dict[str, int] = {}
        self._current: str = DEFAULT
        self._lock = threading.RLock()

    # -- making and finding groups -----------------------------------------

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
            if DEFAULT in self._groups:
                raise ValueError(
                    "init_process_group: the default group is there already "
                    f"({self._groups[DEFAULT]!r}); call destroy_process_group() first"
                )
            self.rank, self.size = rank, size
            self.store, self._owns_store = store, owns_store
            return self._add(DEFAULT, range(size), config, timeout, 0)

    def _add(
        self,
        name: str,
        ranks: Sequence[int],
        config: BackendConfig,
        timeout: float,
        generation: int,
    ) -> ProcessGroup:
        assert self.rank is not None
        assert self.store is not None
        made = ProcessGroup(
            name, ranks, self.rank, config, self.store, timeout, generation
        )
        self._groups[name] = made
        recorder.changed()
        return made

    def new_group(
        self,
        ranks: Sequence[int],
        description: str | None,
        config: BackendConfig,
        timeout: float,
    ) -> ProcessGroup | NonGroupMember:
        """Make a group of `ranks`; its name is found without talking to anybody.

        A name is the description, or the ranks, and a count where it was used
        before: members that make their groups in the same order agree.
        """
        assert self.rank is not None
        with self._lock:
            base = description or f"ranks {listed(ranks)}"
            count = self._names.get(base, 0)
            if self.rank in ranks:
                self._names[base] = count + 1
            name = base if count == 0 else f"{base} ({count + 1})"
            if self.rank not in ranks:
                return NonGroupMember(base, ranks, self.rank)
            return self._add(name, ranks, config, timeout, 0)

    def get_group(self, name: str | None = None) -> ProcessGroup:
        """Return the group called `name` (default: the current one)."""
        wanted = self._current if name is None else name
        found = self._groups.get(wanted)
        if found is None:
            if not self._groups:
                raise ValueError(
                    "there is no process group yet: call init_process_group() "
                    "first (%dist_init does it in a notebook)"
                )
            known = ", ".join(map(repr, self._groups))
            raise ValueError(
                f"rank {self.rank} is in no group called {wanted!r}; it is in {known}"
            )
        return found

    def groups(self) -> list[ProcessGroup]:
        """All groups of this rank, the default one first."""
        return list(self._groups.values())

    @contextlib.contextmanager
    def default_group(self, name: str) -> Iterator[ProcessGroup]:
        """Within the block, ``group=None`` means the group called `name`."""
        chosen = self.get_group(name)
        previous, self._current = self._current, name
        try:
            yield chosen
        finally:
            self._current = previous

    # -- what the agent uses -----------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Where this rank is in each of its groups, as plain data."""
        return {
            "rank": self.rank,
            "world_size": self.size,
            "groups": [one.summary() for one in self.groups()],
        }

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback()`` at every transition; see `FlightRecorder.on_change`."""
        return recorder.on_change(callback)

    def abort(
        self, name: str | None, reason: str, *, rank: int | None = None
    ) -> list[str]:
        """Abort the group called `name`, ``None``: all; return the names aborted."""
        chosen = self.groups() if name is None else [self.get_group(name)]
        for one in chosen:
            one.abort(reason, rank=rank)
        return [one.name for one in chosen]

    def rebuild(
        self,
        name: str | None,
        generation: int | None = None,
        store: Store | None = None,
    ) -> list[str]:
        """Rebuild the group called `name`, ``None``: all; return the names rebuilt.

        `store` replaces the store of all groups rebuilt from now on.
        """
        with self._lock:
            if store is not None:
                self.store = store
            chosen = self.groups() if name is None else [self.get_group(name)]
            for one in chosen:
                one.rebuild(generation, self.store)
            return [one.name for one in chosen]

    def export_groups(self) -> dict[str, Any]:
        """Everything a fresh process needs to take its seat in the same groups."""
        with self._lock:
            return {
                "names": dict(self._names),
                "groups": [
                    {
                        "name": one.name,
                        "ranks": one.ranks,
                        "backend": str(one.config),
                        "timeout": one.timeout,
                        "generation": one.generation,
                    }
                    for one in self.groups()
                ],
            }

    def import_groups(self, exported: dict[str, Any]) -> list[str]:
        """Make the groups of another rank's `export_groups` that this rank is in."""
        with self._lock:
            made = []
            for one in exported["groups"]:
                if self.rank in one["ranks"] and one["name"] not in self._groups:
                    self._add(
                        one["name"],
                        one["ranks"],
                        BackendConfig(one["backend"]),
                        one["timeout"],
                        one["generation"],
                    )
                    made.append(one["name"])
            for base, count in exported["names"].items():
                self._names[base] = max(count, self._names.get(base, 0))
            return made

    def destroy(self, name: str | None = None) -> None:
        """Shut down the group called `name`; with the default one, or ``None``, all."""
        with self._lock:
            if name is not None and name != DEFAULT:
                self.get_group(name).shutdown()
                del self._groups[name]
                recorder.changed()
                return
            chosen, self._groups = self.groups(), {}
        for one in reversed(chosen):
            one.shutdown()
        watchdog.stop()
        store, self.store = self.store, None
        if store is not None and self._owns_store:
            self._say_goodbye(store)
            store.close()
        self.rank = self.size = None
        self._names.clear()
        self._current = DEFAULT
        recorder.changed()

    def _say_goodbye(self, store: Store) -> None:
        """Wait for the others, a little: the store's host must not leave first."""
        assert self.size is not None
        goodbye = PrefixStore("goodbye", store)
        try:
            if goodbye.add("count", 1) == self.size:
                goodbye.set("all", b"1")
            if self.rank == 0:
                goodbye.wait(["all"], timeout=_GOODBYE_TIMEOUT)
        except DistError:
            # The host, or a rank that died before, is gone: so are we.
            return


#: The groups of this process.
world = World()


def listed(ranks: Sequence[int]) -> str:
    """``0,2,3``, for messages."""
    return ",".join(map(str, ranks))
