"""Generation: the life of a group on this rank between two rebuilds."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..devices.cuda_device import configured_device
from ..errors import (
    ConnectionLostError,
    DistAbortedError,
    DistBackendError,
    DistError,
    DistNetworkError,
)
from ..interface.base import Backend
from ..interface.registration import Registration
from ..interface.registry import build, resolve
from ..interface.staging import StagedBackend, staging_for
from ..stores.base import Store
from ..stores.prefix import PrefixStore
from ..work.async_errors import acknowledge
from ..work.flight_recorder import Batch, GroupCounters, Record, recorder
from ..work.op_type import OpType
from ..work.state import WorkState
from ..work.threads import callback_threads
from ..work.work import Work
from .abort_reason import AbortReason, ConnectionLoss, Departure, Departures
from .deadlines import Deadlines
from .inquiry import Inquiry
from .peer_watch import PeerWatch
from .remedies import ANEW_HINT, after_abort, after_store_loss
from .spec import GroupSpec, Origin
from .watchdog import watchdog

__all__ = ["DRAIN_WAIT", "Generation"]

_log = logging.getLogger(__name__)

#: Seconds that ops in flight get to end when their group is destroyed.
DRAIN_WAIT = 10.0
#: Seconds that an abort waits for its hooks.
HOOK_WAIT = 10.0
#: Seconds that an abort waits for the store to say which reason was the first. It takes
#: a message, and no time while the backends are stopped, unless the store is silent.
_AGREE_WAIT = 0.5
#: Seconds for which the error of an op waits until an abort has stopped the backends:
#: longer than one of ours takes to copy the rest of a large message.
_STOP_WAIT = 10.0
#: Seconds between two looks at an inquiry, which an error waits for.
_INQUIRY_PERIOD = 0.02


class Generation:
    """Backends, counters, store keys and end of one generation of a group.

    A rebuild replaces the object: ops, failures and store messages of an earlier
    generation hold that generation, and cannot touch a later one.

    Locks, in the order in which one thread may take them, after `suspend_lock`, which
    is held while the generation is suspended or resumed:

    1. `issue_lock`, held while an op is given its number and handed to its backend,
       and while a backend is built: the order of the numbers is the order of the
       ops. A call of a library may hang with this lock held, so nothing that ends a
       generation waits for it.
    2. `_abort_lock`, held for a moment where `aborted` or `backends` changes.
    3. The lock of a Work. Callbacks of a Work run outside of it.

    Store threads and backends call with none of these held.
    """

    def __init__(
        self,
        spec: GroupSpec,
        number: int,
        root_store: Store,
        *,
        since: int = 0,
        timing: bool = True,
        origin: Origin | None = None,
    ) -> None:
        """Begin generation `number`; who left before generation `since` is back."""
        self.spec = spec
        self.number = number
        self.since = since
        self.timing = timing
        #: When it was made, and when it ended (``time.monotonic()``).
        self.began = time.monotonic()
        self.ended: float | None = None
        self.status = GroupCounters(
            spec.name, spec.global_rank, number, spec.ranks, spec.key.id
        )
        group_store = PrefixStore(spec.key.id, root_store)
        self.store: Store = PrefixStore(str(number), group_store)
        #: Device type → backend, of those built so far.
        self.backends: dict[str, Backend] = {}
        #: Why the generation ended; `None` while it is usable.
        self.aborted: AbortReason | None = None
        #: The lost connection whose cause is not known yet; the next op to fail, or to
        #: be issued, ends the generation.
        self.loss: ConnectionLoss | None = None
        #: The suspended backends by device type: they get no ops.
        self.suspended: dict[str, Backend] = {}
        self.suspend_lock = threading.Lock()
        self.issue_lock = threading.Lock()
        #: The op that is being handed to its backend. It takes a moment unless a call
        #: of the library is stuck.
        self.handing_over: Record | None = None
        # The one that the watchdog has seen there, and since when.
        self._seen: tuple[Record | None, float] = None, 0.0
        # Recursive, as a signal handler may abort in the midst of an abort.
        self._abort_lock = threading.RLock()
        #: In a forked child: why it has no part in the group.
        self.forked: str | None = None
        # Set once `aborted` is the reason on every rank.
        self._ended = threading.Event()
        # Set once an abort has stopped the backends, and the threads it waits for.
        self._stopped = threading.Event()
        self._aborting: set[int] = set()
        self._origin = origin
        #: The ranks that left: ops that need them fail.
        self.departures = Departures(spec)
        self._departed = self._drained = False
        inquiry = Inquiry(spec, number, self.store)
        self.deadlines = Deadlines(spec, inquiry)
        self._peers = PeerWatch(
            spec,
            self.store,
            group_store,
            self._abort,
            self._build_for_peer,
            inquiry.answer,
            self.note_departure,
        )
        self._peers.start()
        watchdog.register(self)

    # -- backends ----------------------------------------------------------

    def backend_for(self, device: str, op_type: OpType | None = None) -> Backend:
        """Return the backend of `device`, building it if this is its first use."""
        with self.issue_lock:
            self.raise_if_aborted(op_type)
            backend = self.backends.get(device)
            if backend is None:
                backend = self._build(device, op_type)
            return backend

    def _build(self, device: str, op_type: OpType | None) -> Backend:
        where = self.spec.describe()
        if op_type is not None:
            where = f"{op_type.value} in {where}"
        name = self.spec.config.device_backend_map.get(device)
        if name is None:
            raise ValueError(
                f"{where}: no backend for device type {device!r}; the group has "
                f"{self.spec.config}. Make one with new_group(backend=...) that "
                f"names {device!r}"
            )
        if op_type is not None and op_type.is_p2p and self.spec.size > 2:
            # A collective makes every rank build the backend, this op does not.
            self._peers.publish_build(device)
        try:
            registration = resolve(name)
            staged = device not in registration.devices
            if staged:
                staging_for(device, name)
            self._check_choice(device, name)
            store = PrefixStore(f"{name}-{device}", self.store)
            backend = self._create(registration, store)
        except ConnectionLostError as error:
            self._connection_lost(error)
            loss = self.loss
            if loss is not None:
                # Its cause, or the lack of one, ends the generation.
                self._ended.wait(max(0.0, loss.left))
                self._abort(loss.reason, publish=True)
            self.raise_if_aborted(op_type)
            raise
        except DistError as error:
            op = None if op_type is None else op_type.value
            made = error.prefixed(
                where, **self.spec.identity(), op=op, reason=str(error)
            )
            made.culprits = self.spec.culprits_of(error)
            raise made from error
        backend.place = self.spec.describe()
        backend.global_ranks = self.spec.ranks
        if staged:
            backend = StagedBackend(backend, device)
        backend.on_failure = self._backend_failed
        backend.timing = self.timing
        if self._origin is not None and backend.supports_split:
            try:
                self._origin.split(backend, device)
            except BaseException as error:
                backend.abort(f"{where}: {error}")
                raise
        with self._abort_lock:
            self.backends[device] = backend
            ended = self.aborted
        if ended is not None:
            # The abort ran while the backend was built, and did not stop it.
            _stop(backend, ended)
            self.raise_if_aborted(op_type)
        return backend

    def _check_choice(self, device: str, name: str) -> None:
        """Raise `DistBackendError`, on every rank, if one chose another backend."""
        me = self.spec.global_rank
        if self.spec.size == 1:
            return
        mine = f"{me} {name}".encode()
        first = self.store.compare_set(f"backend/{device}", b"", mine).decode()
        rank, _, other = first.partition(" ")
        if other != name:
            text = (
                f"the backend for device type {device!r} is {other!r} on rank {rank}, "
                f"and {name!r} on rank {me}; expected the same one on every rank"
            )
            self.abort(text, culprits=sorted({int(rank), me}))
            raise DistBackendError(text)

    def _create(self, registration: Registration, store: Store) -> Backend:
        spec = self.spec

        def create() -> Backend:
            return build(
                registration,
                store,
                spec.rank,
                spec.size,
                spec.timeout,
                group_id=spec.key.id,
                ranks=spec.ranks,
            )

        # Options of the first use, if there are any, else of the group's making.
        if registration.has_options():
            return create()
        return spec.context.copy().run(create)

    def _build_for_peer(self, device: str) -> None:
        """Build the backend that the first send or receive of another rank needs."""
        try:
            index = configured_device()
            self.backend_for(device).prepare(
                index=self.spec.device if index is None else index
            )
        except DistAbortedError:
            return
        except (DistError, ValueError) as error:
            culprits = error.culprits if isinstance(error, DistError) else ()
            self.abort(str(error), culprits=culprits)

    def set_timing(self, enabled: bool) -> None:
        """Time the Works made from now on, or do not."""
        self.timing = enabled
        for backend in list(self.backends.values()):
            backend.timing = enabled

    def refresh(self) -> None:
        """Bring the states of the Works in flight up to date; never blocks."""
        for backend in list(self.backends.values()):
            backend.refresh()

    # -- abort and end -----------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether an op is in flight, or is being handed to a backend."""
        return bool(self.status.in_flight) or self.handing_over is not None

    def raise_if_aborted(self, op_type: OpType | None) -> None:
        """Raise `DistAbortedError` naming `op_type` if the generation has ended."""
        if self.aborted is None:
            return
        self._await_stop()
        where, op = self.spec.describe(), None
        if op_type is not None:
            acknowledge(self.status)
            op = op_type.value
            where = f"{op} in {where}"
        raise self._error(where, self.spec.identity() | {"op": op})

    def aborted_error(self, op: Work | Record | Batch) -> DistAbortedError:
        """Return the error of `op`, a Work or a record, once the group was aborted."""
        self._await_stop()
        return self._error(op.describe(), op.identity())

    def _await_stop(self) -> None:
        """Wait for the end of an abort: until then ops in flight write to arrays.

        Whoever has the error of one op takes the arrays of the others for their own.
        """
        if threading.get_ident() not in self._aborting:
            self._stopped.wait(_STOP_WAIT)

    def _error(self, what: str, identity: dict[str, Any]) -> DistAbortedError:
        reason = self.aborted
        assert reason is not None
        if self.forked is not None:
            return DistAbortedError(
                f"{what}: {self.forked}", **identity, reason=self.forked
            )
        return DistAbortedError(
            f"{what}: the group was aborted: {reason}; "
            f"{reason.remedy or after_abort()}",
            **identity,
            culprits=reason.culprits,
            reason=reason.why,
        )

    def abort(
        self,
        reason: str,
        *,
        by: str = "",
        culprits: Sequence[int] = (),
        publish: bool = True,
        remedy: str = "",
        diagnosis: str = "",
    ) -> None:
        """Fail the ops in flight and stop the backends, here and on every rank."""
        by = by or f"rank {self.spec.global_rank}"
        made = AbortReason(
            reason,
            by,
            culprits=tuple(culprits),
            diagnosis=diagnosis,
            remedy=remedy,
        )
        self._abort(made, publish)

    def _backend_failed(self, reason: str | DistError) -> None:
        if isinstance(reason, ConnectionLostError):
            self._connection_lost(reason)
        elif isinstance(reason, DistError):
            lost = isinstance(reason, DistNetworkError)
            remedy = after_store_loss() if lost else ""
            culprits = self.spec.culprits_of(reason)
            self.abort(str(reason), culprits=culprits, remedy=remedy)
        else:
            self.abort(reason)

    def _abort(self, reason: AbortReason, publish: bool = False) -> None:
        with self._abort_lock:
            if self.aborted is not None:
                return
            self.ended = time.monotonic()
            self.aborted = reason
            backends = list(self.backends.values())
        self._aborting.add(threading.get_ident())
        withheld = {work: work.withheld for work in self._in_flight()}
        errors = self._fail_pending(withheld)
        try:
            if publish:
                self._peers.publish("abort", reason, self._agree)
            else:
                self._ended.set()
            if self.spec.abort_hooks:
                _call_hooks(self.spec, self._aborting)
            # The backends first: arrays are the user's again when their Work is over.
            for backend in backends:
                _stop(backend, reason)
            self._ended.wait(_AGREE_WAIT)
            if self.aborted != reason:
                errors = self._fail_pending(withheld)
        finally:
            self._ended.set()
            self._stopped.set()
            for work in self._in_flight():
                # A Work issued during the abort has no error yet.
                work.fail_by_group(errors.get(work) or self._error_of(work))
            recorder.changed()
            self._peers.close()

    def _agree(self, first: AbortReason | None) -> None:
        """Take over the reason that a rank of the group gave first, if it is known."""
        if first is not None:
            self.aborted = first
        self._ended.set()

    def _in_flight(self) -> list[Work]:
        return list(self.status.in_flight.values())

    def _fail_pending(
        self, withheld: Mapping[Work, BaseException | None]
    ) -> dict[Work, DistAbortedError]:
        """Have the ops in flight fail with the reason, and `withheld` as its cause."""
        errors: dict[Work, DistAbortedError] = {}
        for work, cause in withheld.items():
            errors[work] = error = self._error_of(work)
            error.__cause__ = cause
            work.hold_failures(error)
        overdue, reason = self.deadlines.overdue, self.aborted
        if overdue is not None and reason is not None:
            late = self.deadlines.error(overdue, reason)
            overdue.hold_failures(late, WorkState.TIMED_OUT)
        return errors

    def _error_of(self, work: Work) -> DistAbortedError:
        # A Work that is just being handed over is not tied to its record yet.
        op = (self.handing_over if work.record is None else None) or work
        return self._error(op.describe(), op.identity())

    def disown(self, why: str) -> None:
        """Refuse every op: this process is a forked child, the group its parent's.

        Called in the child right after the fork, where other threads are gone, with
        the locks that they held. Nothing is closed: the parent uses the sockets.
        """
        self.issue_lock, self._abort_lock = threading.Lock(), threading.RLock()
        self._ended, self._stopped = threading.Event(), threading.Event()
        self.forked = why
        self.aborted = AbortReason(why, f"rank {self.spec.global_rank}")
        self._ended.set()
        self._stopped.set()
        for work in self.status.in_flight.values():
            work.disown(self.aborted_error(work))
        self.status.in_flight.clear()

    def _connection_lost(self, error: ConnectionLostError) -> None:
        """Withhold the failures of ops until the cause of a lost connection is known.

        `expire` ends the generation if no cause comes. Without an op in flight the
        loss is no failure: the peer may have destroyed its group in good order.
        """
        with self._abort_lock:
            if self.aborted is not None or self.loss is not None:
                return
            self.loss = loss = ConnectionLoss(error, self.spec)
        for work in self._in_flight():
            work.hold_failures()
        self._peers.publish("loss", loss.reason, loss.agree)

    def publish_death_notice(self, text: str) -> None:
        """Set the reason that ends the group elsewhere when this process is gone."""
        self._peers.publish_death_notice(text)

    def note_departure(self, departure: Departure) -> None:
        """Take in that a rank left, in this generation, an earlier or a later one."""
        left = departure.generation
        if not self.since <= left <= self.number:
            return
        if left < self.number:
            departure = replace(departure, collectives=0)
        elif departure.by_abort:
            return
        self.departures.add(departure)
        recorder.changed()
        # Its thread ends what waits for the rank.
        watchdog.wake()

    def refuse(
        self, op_type: OpType, peer: int | None, backend: Backend | None = None
    ) -> None:
        """Raise the error of an op that cannot begin now; the issue lock is held."""
        if self.aborted is not None:
            self.raise_if_aborted(op_type)
        if self.departures.by_rank:
            number = self.status.collective_seq + 1
            buffered = backend is not None and backend.buffers_messages
            self.departures.refuse(op_type, peer, number, buffered=buffered)
        if self.suspended and backend in self.suspended.values():
            assert backend is not None
            raise DistBackendError(
                f"{op_type.value} in {self.spec.describe()}: the group is suspended, "
                f"its {backend.name} backend has freed its device memory; call "
                "resume() of the group on every rank first",
                **self.spec.identity(),
                op=op_type.value,
            )

    def leave(
        self,
        how: str,
        *,
        ends: bool = False,
        by_will: bool = False,
        for_good: bool = True,
        remedy: str,
    ) -> None:
        """Tell the other ranks that this one leaves, and `how`.

        `ends`: with whatever is in flight, since its process ends or a new generation
        begins; `by_will`: the others learn of it once the process has ended;
        `for_good`: it has no part in later generations either; `remedy` is what they
        can do.
        """
        spec = self.spec
        if spec.size == 1 or self._departed:
            return
        if self.aborted is not None and not for_good:
            return  # they know why it began another one
        self.drain(time.monotonic() + DRAIN_WAIT, on_device=ends)
        self._departed = True
        text = f"rank {spec.global_rank} left group {spec.name!r}{how}"
        if self.aborted is not None or (self.busy and not ends):
            # An abort, that of `shutdown` or an earlier one, ends this generation.
            departure = Departure(
                spec.global_rank, text, 0, remedy, self.number, by_abort=True
            )
        else:
            departure = self._departure(text, remedy)
        if by_will:
            self._peers.publish_departure_at_end(departure)
        else:
            self._peers.publish_departure(departure, for_good=for_good)

    def _departure(self, text: str, remedy: str) -> Departure:
        number = self.status.collective_seq
        self.refresh()
        for work in self._in_flight():
            record: Any = work.record
            if record is None:
                continue
            text += f"; nobody had waited for {record.describe()}"
            first = record.records[0] if isinstance(record, Batch) else record
            if not first.op_type.is_p2p:
                # Its part of that may be missing.
                number = min(number, first.collective_seq_id - 1)
            break
        rank = self.spec.global_rank
        return Departure(rank, text, number, remedy, self.number)

    def linger(self, deadline: float) -> None:
        """Wait until every rank has left, if a backend that closes fails the others."""
        if self._departed and any(one.lingers for one in self.backends.values()):
            self._peers.await_departures(max(0.0, deadline - time.monotonic()))

    def shutdown(self) -> None:
        """Free the backends in good order; abort if ops are still in flight."""
        self.drain(time.monotonic() + DRAIN_WAIT)
        if self.busy:
            lost = self.loss
            reason = lost.reason if lost else self._destroyed()
            self._abort(reason, publish=True)
            # Another thread may be in the middle of an abort.
            for work in self._in_flight():
                work._block(DRAIN_WAIT)
            return
        with self.issue_lock, self._abort_lock:
            if self.aborted is None:
                self.aborted = self._destroyed()
                self._ended.set()
                self._stopped.set()
            backends, self.backends = self.backends, {}
        self._peers.close()
        for backend in backends.values():
            backend.shutdown()
        recorder.changed()

    def forget(self, *, for_good: bool = True) -> None:
        """Have the store forget the group, which this rank has shut down for good."""
        if for_good:
            self._peers.forget()
        else:
            self._peers.forget_generation()

    def _destroyed(self) -> AbortReason:
        me, text = f"rank {self.spec.global_rank}", "destroy_process_group()"
        for work in self._in_flight():
            text += f", while {work.describe()} was in flight"
            break
        return AbortReason(text, me, remedy=ANEW_HINT)

    def drain(self, deadline: float, *, on_device: bool = False) -> None:
        """Let what is in flight end, until `deadline` (``time.monotonic()``).

        The first call decides. What the caller does not wait for, such as a send, is
        awaited by another rank. Ops on a device are so even where an error is handled,
        or where `on_device` says that the others have no time: their ``wait()`` has
        returned to the caller, who takes them for done.
        """
        if self._drained:
            return
        self._drained = True
        on_device = on_device or sys.exc_info()[1] is not None
        for work in self._in_flight():
            if work.on_device or not on_device:
                work._block(max(0.0, deadline - time.monotonic()))

    # -- deadlines ---------------------------------------------------------

    def expire(self) -> float:
        """Time out overdue ops; return the seconds to the next deadline."""
        if self._abort_if_stuck() or not self.status.in_flight:
            return float("inf")
        self.refresh()
        in_flight = self._in_flight()
        for work in in_flight:
            if isinstance(work.withheld, ConnectionLostError):
                # Its cause has to be found.
                self._connection_lost(work.withheld)
        nearest = self.deadlines.check(in_flight)
        if self.departures.by_rank:
            departure = self.departures.verdict(in_flight, lost=self.loss is not None)
            if departure is not None:
                # Each rank decides for itself: others may go on without that rank.
                self._abort(departure.reason)
                return float("inf")
            nearest = min(nearest, _INQUIRY_PERIOD)
        loss, overdue = self.loss, self.deadlines.overdue
        if loss is not None:
            wait = loss.wait(overdue is not None)
            if wait > 0:
                return min(nearest, wait)
            # The lost connection is the cause, also of what is overdue.
            self.deadlines.overdue = None
            self._abort(loss.reason, publish=True)
        elif overdue is None:
            reason = self.deadlines.mismatch()
            if reason is None:
                return nearest
            self._abort(reason, publish=True)
        elif not self.deadlines.asked():
            return _INQUIRY_PERIOD
        else:
            self._abort(self.deadlines.reason(), publish=True)
        return float("inf")

    def _abort_if_stuck(self) -> bool:
        """Abort where a backend does not take an op; return whether that is so."""
        op, (seen, since) = self.handing_over, self._seen
        if op is not seen:
            self._seen = op, time.monotonic()
        if op is None or op is not seen or time.monotonic() - since <= op.timeout:
            return False
        self.abort(
            f"{op.describe()}: the {op.backend} backend has not taken it for "
            f"{op.timeout:g} s: a call of its library is stuck"
        )
        return True


def _call_hooks(spec: GroupSpec, aborting: set[int]) -> None:
    """Call the hooks of an abort; wait for them, but not for one that hangs.

    Their thread is added to those that are `aborting`.
    """
    hooks, over = list(spec.abort_hooks.values()), threading.Event()

    def call() -> None:
        aborting.add(threading.get_ident())
        for hook in hooks:
            try:
                hook()
            except Exception:  # noqa: BLE001 - the user's
                # The abort goes on: other ranks wait for it.
                _log.exception("%s: a hook of the abort failed", spec.describe())
        over.set()

    callback_threads.submit(call)
    if not over.wait(HOOK_WAIT):
        _log.warning(
            "%s: the hooks of the abort have not returned for %g s; it goes on",
            spec.describe(),
            HOOK_WAIT,
        )


def _stop(backend: Backend, reason: AbortReason) -> None:
    try:
        backend.abort(str(reason))
    except Exception:  # noqa: BLE001 - third-party backends
        # The other backends and the Works have to be ended, too.
        _log.exception("the abort of backend %r failed", backend.name)
