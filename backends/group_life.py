"""The life of a group on this rank: its backends, generations, abort and end."""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from .backend import Backend, Registration, resolve
from .capture import Captured
from .config import BackendConfig
from .errors import DistAbortedError, DistError, DistTimeoutError
from .late_errors import caller_knows
from .nccl_options import options
from .own_device import likely_device, own_device
from .prefix_store import PrefixStore
from .recorder import GroupStatus, Record, recorder
from .staging import StagedBackend, staging_for
from .store import Store
from .watchdog import watchdog
from .work import OpType, Work, WorkState

__all__ = ["REBUILD_HINT", "AbortReason", "GroupLife", "Origin"]

_log = logging.getLogger(__name__)

#: Seconds that ops on a device get to end when their group is destroyed.
DRAIN_WAIT = 10.0

REBUILD_HINT = "make it usable again with rebuild_process_group() or %dist_rebuild"


@dataclass(frozen=True)
class AbortReason:
    """Who ended a group, when and why; the first writer wins."""

    text: str
    by: str
    at: float

    def __str__(self) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(self.at))
        return f"{self.text} (at {when}, by {self.by})"


@dataclass(frozen=True)
class Origin:
    """The group that another one is made from, which leaves out `excluded` ranks.

    `release`: see `Backend.descend`.
    """

    group: GroupLife
    excluded: tuple[int, ...] = ()
    release: Callable[[], None] | None = None

    def descend(self, backend: Backend, device: str) -> None:
        """Let the new group's backend use what the old one's has."""
        parent = self.group._backends.get(device)
        backend.descend(parent, self.excluded, self.release)


class GroupLife:
    """What a `ProcessGroup` is apart from its ops.

    `ranks` are global ranks, `rank` is this process's place among them,
    `timeout` is in seconds. `generation` counts the rebuilds. `origin` is the
    group that it is made from, if that is known to all of its ranks.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        global_rank: int,
        config: BackendConfig,
        store: Store,
        timeout: float,
        generation: int = 0,
        origin: Origin | None = None,
    ) -> None:
        self.name = name
        self.ranks = list(ranks)
        self.global_rank = global_rank
        self.rank = self.ranks.index(global_rank)
        self.config = config
        self.timeout = timeout
        self.timing = True
        self._root_store = store
        # Held while an op is given its number and handed over, so that the
        # order of the numbers is the order of the ops.
        self._issue_lock = threading.Lock()
        # The op that is being handed over, which takes a moment unless a call of
        # the library is stuck.
        self._handed: tuple[Record, float] | None = None
        self._abort_lock = threading.Lock()
        # For backends that are made later, perhaps on a thread of ours.
        self._context = contextvars.copy_context()
        self._device = likely_device() if "cuda" in config.device_backend_map else None
        self._begin(generation, origin)
        watchdog.register(self)

    def _begin(self, generation: int, origin: Origin | None = None) -> None:
        self.generation = generation
        # Of the first generation only: those of a later one may be other processes.
        self._origin = origin
        self.status = GroupStatus(self.name, self.global_rank, generation, self.ranks)
        self.aborted: AbortReason | None = None
        self._backends: dict[str, Backend] = {}
        # The batch that each thread inside a coalescing block is filling.
        self._captures: dict[int, list[Captured]] = {}
        # Two disjoint groups may share a name: their ranks tell them apart.
        members = hashlib.sha1(repr(self.ranks).encode()).hexdigest()[:8]
        self._store = PrefixStore(
            f"{self.name}/{members}/{generation}", self._root_store
        )
        self._unwatch: Callable[[], None] | None = None
        self._watch_peers()

    def enable_timing(self, enabled: bool) -> None:
        """Say whether the Works made from now on are timed."""
        self.timing = enabled
        for backend in list(self._backends.values()):
            backend.timing = enabled

    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    @property
    def store(self) -> Store:
        """The store of this generation of the group."""
        return self._store

    # -- backends ----------------------------------------------------------

    def _backend_for(self, device: str, op_type: OpType) -> Backend:
        """Return the backend of `device`, building it if this is its first use."""
        with self._issue_lock:
            self.raise_if_aborted(op_type)
            backend = self._backends.get(device)
            if backend is not None:
                return backend
            where = self.describe()
            if op_type is not OpType.UNKNOWN:
                where = f"{op_type.value} in {where}"
            name = self.config.device_backend_map.get(device)
            if name is None:
                raise ValueError(
                    f"{where}: no backend for device type {device!r}; the group has "
                    f"{self.config}. Make one with new_group(backend=...) that "
                    f"names {device!r}"
                )
            store = PrefixStore(f"{name}-{device}", self._store)
            if op_type.is_p2p and self.size() > 2:
                # A collective brings all ranks here, this does not.
                self._store.set(f"build/{device}", b"1")
            try:
                registration = resolve(name)
                staged = device not in registration.devices
                if staged:
                    staging_for(device, name)
                backend = self._build(registration, store)
            except DistError as error:
                raise type(error)(f"{where}: {error}") from error
            if staged:
                backend = StagedBackend(backend, device)
            backend.place = self.describe()
            backend.on_failure = partial(self._backend_failed, self.generation)
            backend.timing = self.timing
            if self._origin is not None and backend.splits:
                try:
                    self._origin.descend(backend, device)
                except BaseException as error:
                    backend.abort(f"{where}: {error}")
                    raise
            self._backends[device] = backend
            return backend

    def _build(self, registration: Registration, store: Store) -> Backend:
        def build() -> Backend:
            return registration.build(store, self.rank, self.size(), self.timeout)

        # Options are those of the first use, else those of the group's making.
        return build() if options() else self._context.copy().run(build)

    def backends(self) -> list[Backend]:
        """Those that were built so far."""
        return list(self._backends.values())

    def connect(self, index: int) -> None:
        """Begin, before any op, what ops on CUDA device `index` will need."""
        self._backend_for("cuda", OpType.UNKNOWN).prepare(index=index)

    def open_from(self, group: GroupLife) -> None:
        """Begin what can be made out of `group`, its origin, at once."""
        for device, backend in list(group._backends.items()):
            if backend.splits and device in self.config.device_backend_map:
                self._backend_for(device, OpType.UNKNOWN)

    def first_device(self) -> str:
        """The device type that ops without an array go to."""
        return next(iter(self.config.device_backend_map))

    # -- abort, rebuild, end -----------------------------------------------

    def raise_if_aborted(self, op: OpType) -> None:
        """Raise `DistAbortedError` naming `op` if the group was aborted."""
        if self.aborted is not None:
            # UNKNOWN is nobody's op: see `_peer_builds`.
            if op is not OpType.UNKNOWN:
                caller_knows(self.status)
            raise self._aborted_error(f"{op.value} in {self.describe()}")

    def _aborted_error(self, what: str) -> DistAbortedError:
        return _aborted_error(what, self.aborted)

    def abort(
        self, reason: str, *, by: str = "", generation: int | None = None
    ) -> None:
        """Fail what is in flight and stop the backends, here and on every rank.

        Every Work in flight ends as ABORTED with `reason`; ops issued later
        raise it. Returns at once, whatever the backends hang in; the other
        ranks are told through the store. Calling it again does nothing. `by` is who
        wants it (default: this rank); with `generation`, no other is aborted.
        """
        told = self._reason(reason or "abort_process_group()", by)
        self._abort(told, generation=generation)

    def _reason(self, text: str, by: str = "") -> AbortReason:
        return AbortReason(text, by or f"rank {self.global_rank}", time.time())

    def _abort(
        self,
        reason: AbortReason,
        publish: bool = True,
        generation: int | None = None,
        timed_out: tuple[Work, DistTimeoutError] | None = None,
    ) -> None:
        """Abort; of `generation` only, if given; `timed_out` gets its own error."""
        with self._abort_lock:
            if self.aborted is not None or generation not in (None, self.generation):
                return
            self.aborted = reason
            backends = list(self._backends.values())
            unwatch, self._unwatch = self._unwatch, None
            # From the first failed Work on, its waiter may rebuild the group:
            # what is told and swept below belongs to this generation.
            store, status = self._store, self.status
        for work in list(status.in_flight.values()):
            work.condemn(_aborted_error(work.describe(), reason))
        if timed_out is not None:
            timed_out[0].condemn(timed_out[1], WorkState.TIMED_OUT)
        try:
            if publish and self.size() > 1:
                # The store's host may be the rank that is gone: never wait for it.
                # Python 3.12 starts no thread at its end.
                with contextlib.suppress(RuntimeError):
                    threading.Thread(
                        target=self._publish_abort,
                        args=(store, reason),
                        name=f"rankscope-abort-{self.name}",
                        daemon=True,
                    ).start()
            # The backends first: arrays are the user's again when their Work is over.
            for backend in backends:
                _stop(backend, reason)
        finally:
            for work in list(status.in_flight.values()):
                # What comes after `condemn` got no error of its own.
                error = _aborted_error(work.describe(), reason)
                work.mark_failed(error, WorkState.ABORTED)
            recorder.changed()
            if unwatch is not None:
                unwatch()

    def _publish_abort(self, store: Store, reason: AbortReason) -> None:
        try:
            store.compare_set("abort", b"", json.dumps(asdict(reason)))
        except DistError as error:
            _log.warning("%s: could not tell the other ranks: %s", self, error)

    def _watch_peers(self) -> None:
        """From now on, abort when another rank does, and build what it needs."""
        if self.size() == 1:
            return
        generation = self.generation

        def peer_aborted(value: bytes) -> None:
            reason = AbortReason(**{"at": time.time(), **json.loads(value)})
            self._abort(reason, publish=False, generation=generation)

        def store_lost(message: str) -> None:
            reason = AbortReason(message, "the store", time.time())
            self._abort(reason, publish=False, generation=generation)

        cancels = [self._store.watch("abort", peer_aborted)]
        # Rank 0 serves it, where the store tells of deaths at all.
        if 0 in self.ranks:
            cancels.append(self._store.watch_loss(store_lost))
        where = f"process {os.getpid()} on {socket.gethostname()}"
        self.leave_will(
            f"rank {self.global_rank} ({where}) is gone: it was killed, crashed or "
            "left without destroy_process_group(), or its network failed"
        )
        for device in self.config.device_backend_map:
            build = partial(self._peer_builds, device, generation)
            cancels.append(self._store.watch(f"build/{device}", build))

        def unwatch() -> None:
            for cancel in cancels:
                cancel()

        self._unwatch = unwatch

    def leave_will(self, text: str) -> None:
        """Say what ends the group on the other ranks when this process is gone."""
        will = json.dumps({"text": text, "by": "the store"})
        self._store.last_will("abort", will)

    def _peer_builds(self, device: str, generation: int, value: bytes) -> None:
        """Another rank begins with a send or receive: its backend needs us all."""

        def build() -> None:
            try:
                if self.generation == generation:
                    index = own_device()
                    self._backend_for(device, OpType.UNKNOWN).prepare(
                        index=self._device if index is None else index
                    )
            except DistAbortedError:
                return
            except (DistError, ValueError) as error:
                reason = self._reason(str(error))
                self._abort(reason, generation=generation)

        # Not on the store's thread: building talks to the store.
        threading.Thread(
            target=build, name=f"rankscope-build-{self.name}", daemon=True
        ).start()

    def _backend_failed(self, generation: int, reason: str) -> None:
        self._abort(self._reason(reason), generation=generation)

    def rebuild(
        self, generation: int | None = None, store: Store | None = None
    ) -> None:
        """Begin a new generation: same name and ranks, fresh backends, seq from 0.

        Local and immediate; every rank of the group has to do it, with the
        same `generation` (default: the next one). Works of the old generation
        stay as they ended. `store` replaces the group's store.
        """
        self._abort(
            self._reason("the group was rebuilt"),
            publish=False,
        )
        with self._issue_lock, self._abort_lock:
            if store is not None:
                self._root_store = store
            self._begin(self.generation + 1 if generation is None else generation)
        recorder.changed()

    @property
    def busy(self) -> bool:
        """Whether anything is in flight, or about to be."""
        return bool(self.status.in_flight) or self._handed is not None

    def shutdown(self) -> None:
        """Free the backends in good order; abort if work is still in flight.

        What a device is still at gets `DRAIN_WAIT` seconds: its caller saw
        ``wait()`` return, and takes it for done.
        """
        self._drain()
        if self.busy:
            self._abort(self._reason("destroy_process_group()"))
            return
        with self._issue_lock, self._abort_lock:
            if self.aborted is None:
                self.aborted = self._reason("destroy_process_group()")
            backends, self._backends = self._backends, {}
            unwatch, self._unwatch = self._unwatch, None
        if unwatch is not None:
            unwatch()
        for backend in backends.values():
            backend.shutdown()
        recorder.changed()

    def _drain(self) -> None:
        deadline = time.monotonic() + DRAIN_WAIT
        for work in list(self.status.in_flight.values()):
            if not work.on_device:
                continue
            work._block(max(0.0, deadline - time.monotonic()))

    # -- deadlines ---------------------------------------------------------

    def expire(self) -> float:
        """Time out what is overdue; return seconds to the next deadline."""
        status, generation, handed = self.status, self.generation, self._handed
        if handed is not None:
            op, since = handed
            if time.monotonic() - since > op.timeout:
                text = (
                    f"{op.describe()}: the {op.backend} backend has not taken it for "
                    f"{op.timeout:g} s: a call of its library is stuck"
                )
                self._abort(self._reason(text), generation=generation)
                return float("inf")
        if not status.in_flight:
            return float("inf")
        for backend in list(self._backends.values()):
            backend.refresh()
        now = time.time_ns()
        nearest = float("inf")
        for place, work in enumerate(list(status.in_flight.values())):
            record = work.record
            # It ends by itself, with a verdict that every rank shall hear.
            if record is None or work.op_type is OpType.MONITORED_BARRIER:
                continue
            begun = work.begun_ns(oldest=not place)
            if not begun:
                continue
            left = record.timeout - (now - begun) / 1e9
            if left > 0:
                nearest = min(nearest, left)
                continue
            whose = "the group's" if record.timeout == self.timeout else "its own"
            error = DistTimeoutError(
                f"{work.describe()} was not done {record.timeout:g} s after it began "
                f"({whose} timeout): not every rank entered it, or one is "
                f"stuck. The group was aborted; {REBUILD_HINT}"
            )
            if not work.is_completed():
                text = f"{record.describe()} timed out after {record.timeout:g} s"
                self._abort(
                    self._reason(text),
                    generation=generation,
                    timed_out=(work, error),
                )
                return float("inf")
        return nearest

    # -- what is shown -----------------------------------------------------

    def describe(self) -> str:
        """``group 'default' on rank 2``, for messages."""
        return f"group {self.name!r} on rank {self.global_rank}"

    def summary(self) -> dict[str, Any]:
        """Where this rank is in the group, as plain data for the status channel."""
        for backend in list(self._backends.values()):
            backend.refresh()
        status = self.status
        oldest = next(iter(list(status.in_flight.values())), None)
        reason = self.aborted
        return {
            "name": self.name,
            "ranks": self.ranks,
            "backend": str(self.config),
            "generation": self.generation,
            "state": "ready" if reason is None else "aborted",
            "reason": None if reason is None else str(reason),
            "timeout": self.timeout,
            "devices": {
                device: _with_state(name, self._backends.get(device))
                for device, name in self.config.device_backend_map.items()
            },
            "enqueued": status.enqueued.brief() if status.enqueued else None,
            "started": status.started.brief() if status.started else None,
            "completed": _completed(status.completed),
            "issued": status.collective_seq,
            "in_flight": len(status.in_flight),
            "oldest": _in_flight(oldest),
        }

    def __repr__(self) -> str:
        state = "" if self.aborted is None else f", aborted: {self.aborted}"
        return (
            f"<ProcessGroup {self.name!r}: rank {self.global_rank} of "
            f"{self.ranks}, {self.config}{state}>"
        )


def _aborted_error(what: str, reason: AbortReason | None) -> DistAbortedError:
    return DistAbortedError(f"{what}: the group was aborted: {reason}; {REBUILD_HINT}")


def _stop(backend: Backend, reason: AbortReason) -> None:
    try:
        backend.abort(str(reason))
    except Exception:  # noqa: BLE001 - a backend may be anybody's
        # The others, and the Works, have to be ended all the same.
        _log.exception("the abort of backend %r", backend.name)


def _with_state(name: str, backend: Backend | None) -> str:
    state = "not built" if backend is None else backend.state()
    return f"{name} ({state})" if state else name


def _in_flight(work: Work | None) -> dict[str, Any] | None:
    if work is None or work.record is None:
        return None
    record = work.record
    begun = work.started_ns or work.scheduled_ns
    return {
        **record.brief(),
        "state": work.state.value,
        "elapsed": (time.time_ns() - begun) / 1e9,
        "timeout": record.timeout,
        **record.traffic(),
        "peer": record.peer,
    }


def _completed(record: Record | None) -> dict[str, Any] | None:
    if record is None:
        return None
    return {**record.brief(), **record.traffic(), "duration": record.duration}
