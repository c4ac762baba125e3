"""The groups of this process: the default one and those made from it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from . import mpi_job
from .config import BackendConfig
from .errors import DistError
from .group_life import Origin
from .late_errors import take_late_error
from .prefix_store import PrefixStore
from .process_group import ProcessGroup
from .recorder import recorder
from .store import Store
from .watchdog import watchdog

__all__ = ["DEFAULT", "NonGroupMember", "World", "listed", "world"]

_log = logging.getLogger(__name__)

#: The name of the default group.
DEFAULT = "default"

# How long rank 0, which hosts the store, waits for the others to leave it.
_GOODBYE_TIMEOUT = 5.0
# How long the end of a cell or script waits for an abort to be over.
_SETTLE_WAIT = 2.0


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


#: A group's name and ranks.
_Key = tuple[str, tuple[int, ...]]


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
        # Groups may share a name if their ranks differ: a rank knows nothing of
        # the groups that it is not in.
        self._groups: dict[_Key, ProcessGroup] = {}
        # How often a description was used for the same ranks.
        self._uses: dict[_Key, int] = {}
        self._current: ProcessGroup | None = None
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
            if self.default is not None:
                raise ValueError(
                    "init_process_group: the default group is there already "
                    f"({self.default!r}); call destroy_process_group() first"
                )
            self.rank, self.size = rank, size
            self.store, self._owns_store = store, owns_store
            if owns_store:
                atexit.register(self._leave)
            mpi_job.begin()
            self._current = self._add(DEFAULT, range(size), config, timeout, 0)
            return self._current

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
            name, ranks, self.rank, config, self.store, timeout, generation, origin
        )
        self._groups[name, tuple(ranks)] = made
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
        """Make a group of `ranks`; its name is found without talking to anybody.

        A name is the description, or the ranks, and a count where it was used
        for the same ranks before: members that make the groups they have in
        common in the same order agree, whatever other groups each is in.
        """
        assert self.rank is not None
        with self._lock:
            base = description or f"ranks {listed(ranks)}"
            if self.rank not in ranks:
                return NonGroupMember(base, ranks, self.rank)
            key = (base, tuple(ranks))
            self._uses[key] = count = self._uses.get(key, 0) + 1
            name = base if count == 1 else f"{base} ({count})"
            return self._add(name, ranks, config, timeout, 0, origin)

    def shrink(
        self, group: ProcessGroup, excluded: Sequence[int], *, abort: bool
    ) -> ProcessGroup:
        """Make a group of the ranks of `group` without its ranks `excluded`.

        With `abort`, `group` is aborted once nothing of it is needed any more.
        """
        staying = [r for place, r in enumerate(group.ranks) if place not in excluded]
        left_out = listed([group.ranks[place] for place in excluded])
        reason = f"shrink_group: its ranks {listed(staying)} go on without {left_out}"
        generation = group.generation
        # What is made out of it keeps it until then.
        using = [one for one in group.backends() if one.splits] if abort else []
        released = threading.Semaphore(max(0, len(using) - 1))

        def end() -> None:
            group.abort(reason, generation=generation)

        def release() -> None:
            if not released.acquire(blocking=False):
                end()

        made = self.new_group(
            staying,
            f"{group.name} without {left_out}",
            group.config,
            group.timeout,
            Origin(group, tuple(excluded), release if abort else None),
        )
        assert isinstance(made, ProcessGroup)
        try:
            made.open_from(group)
        except BaseException:
            if abort:
                end()
            raise
        if abort and not using:
            end()
        return made

    def get_group(self, name: str | None = None) -> ProcessGroup:
        """Return the group called `name` (default: the current one).

        Raises `ValueError` if there is none, or if several are called that.
        """
        if name is None and self._current is not None:
            # Every op asks.
            return self._current
        wanted = DEFAULT if name is None else name
        found = self._called(wanted)
        if len(found) > 1:
            raise ValueError(
                f"rank {self.rank} is in {len(found)} groups called {wanted!r}: "
                + ", ".join(f"ranks {listed(one.ranks)}" for one in found)
            )
        return found[0]

    def _called(self, name: str) -> list[ProcessGroup]:
        """The groups called `name`; there is at least one."""
        found = [one for one in self.groups() if one.name == name]
        if found:
            return found
        if not self._groups:
            raise ValueError(
                "there is no process group yet: call init_process_group() first "
                "(%dist_init does it in a notebook)"
            )
        known = ", ".join(repr(one.name) for one in self.groups())
        raise ValueError(
            f"rank {self.rank} is in no group called {name!r}; it is in {known}"
        )

    @property
    def default(self) -> ProcessGroup | None:
        """The default group, once it is made."""
        return next((one for one in self.groups() if one.name == DEFAULT), None)

    def groups(self) -> list[ProcessGroup]:
        """All groups of this rank, the default one first."""
        return list(self._groups.values())

    @contextlib.contextmanager
    def default_group(self, name: str) -> Iterator[ProcessGroup]:
        """Within the block, ``group=None`` means the group called `name`."""
        chosen = self.get_group(name)
        previous, self._current = self._current, chosen
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

    def abort(self, name: str | None, reason: str, *, by: str = "") -> list[str]:
        """Abort what is called `name`, ``None``: all; return the names aborted."""
        chosen = self.groups() if name is None else self._called(name)
        for one in chosen:
            one.abort(reason, by=by)
        return [one.name for one in chosen]

    def rebuild(
        self,
        name: str | None,
        generation: int | None = None,
        store: Store | None = None,
    ) -> list[str]:
        """Rebuild what is called `name`, ``None``: all; return the names rebuilt.

        `store` replaces the store of all groups rebuilt from now on.
        """
        with self._lock:
            if store is not None:
                self.store = store
            chosen = self.groups() if name is None else self._called(name)
            for one in chosen:
                one.rebuild(generation, self.store)
            return [one.name for one in chosen]

    def export_groups(self) -> dict[str, Any]:
        """Everything a fresh process needs to take its seat in the same groups."""
        with self._lock:
            return {
                "uses": [(*key, count) for key, count in self._uses.items()],
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
                key = (one["name"], tuple(one["ranks"]))
                if self.rank in one["ranks"] and key not in self._groups:
                    self._add(
                        one["name"],
                        one["ranks"],
                        BackendConfig(one["backend"]),
                        one["timeout"],
                        one["generation"],
                    )
                    made.append(one["name"])
            for base, ranks, count in exported["uses"]:
                key = (base, tuple(ranks))
                self._uses[key] = max(count, self._uses.get(key, 0))
            return made

    def destroy(self, group: ProcessGroup | None = None) -> None:
        """Shut down `group`; with the default one, or ``None``, all."""
        with self._lock:
            if group is not None and group.name != DEFAULT:
                group.shutdown()
                self._groups.pop((group.name, tuple(group.ranks)), None)
                recorder.changed()
                return
            chosen, self._groups = self.groups(), {}
        try:
            for one in reversed(chosen):
                one.shutdown()
        except BaseException as error:
            for one in chosen:
                one.abort(f"destroy_process_group() was ended by {error!r}")
            raise
        finally:
            self._forget()

    def _forget(self) -> None:
        """Be as before the default group was made."""
        watchdog.stop()
        store, self.store = self.store, None
        if store is not None and self._owns_store:
            atexit.unregister(self._leave)
            self._say_goodbye(store)
            store.close()
        self.rank = self.size = None
        self._uses.clear()
        self._current = None
        recorder.changed()

    def late_error(self) -> BaseException | None:
        """An error that the caller has not heard of; see `late_errors`.

        Aborts are waited for, up to 2 s: kernels end before their Works do.
        """
        deadline = time.monotonic() + _SETTLE_WAIT
        while time.monotonic() < deadline and any(
            group.aborted is not None and group.status.in_flight
            for group in self.groups()
        ):
            time.sleep(0.005)
        return take_late_error()

    def at_exit(self) -> None:
        """End a script that went to its end on garbage: say so, with status 120."""
        error = self.late_error()
        if error is None or hasattr(sys, "ps1") or hasattr(sys, "last_value"):
            return
        with contextlib.suppress(OSError, ValueError):
            said = f"rankscope: results of this script are garbage: {error}"
            print(said, file=sys.stderr, flush=True)
        sys.stdout = _Unflushed(sys.stdout)

    def _leave(self) -> None:
        """At exit without `destroy`: the others hear of it if something failed here."""
        store, error = self.store, getattr(sys, "last_value", None)
        if store is None:
            return
        if error is None or hasattr(sys, "ps1"):
            self._say_goodbye(store, wait=False)
            return
        told = f"rank {self.rank} ended with {type(error).__name__}: {error}"
        for group in self.groups():
            try:
                group.leave_will(told)
            except DistError as failed:
                _log.debug("%s: %s", group, failed)

    def _say_goodbye(self, store: Store, *, wait: bool = True) -> None:
        """Go in good order; the store's host waits a little, so as to be the last."""
        assert self.size is not None
        goodbye = PrefixStore("goodbye", store)
        try:
            store.withdraw()
            if goodbye.add("count", 1) == self.size:
                goodbye.set("all", b"1")
            if self.rank == 0 and wait:
                goodbye.wait(["all"], timeout=_GOODBYE_TIMEOUT)
        except DistError as error:
            # The host, or a rank that died before, is gone: so are we.
            _log.debug("no goodbye: %s", error)


class _Unflushed:
    """Takes the place of stdout at a script's end, so that its status tells of it.

    What an exit handler raises is ignored, and ``os._exit`` would lose what is not
    written yet. But Python ends with status 120 if it cannot flush stdout.
    """

    closed = False

    def __init__(self, stdout: Any) -> None:
        self._stdout = stdout
        hook = sys.unraisablehook
        sys.unraisablehook = lambda one: None if one.object is self else hook(one)

    def flush(self) -> None:
        """Flush stdout, and say that it cannot be flushed."""
        if self._stdout is not None:
            self._stdout.flush()
        raise OSError

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdout, name)


#: The groups of this process.
world = World()
# Early, so that it is one of the last.
atexit.register(world.at_exit)


def listed(ranks: Sequence[int]) -> str:
    """``0,2,3``, for messages."""
    return ",".join(map(str, ranks))
