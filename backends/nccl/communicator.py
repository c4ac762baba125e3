"""NCCLComm: one communicator, from the shared unique id to the abort or destruction.

Communicators are non-blocking: the creation of a communicator, and every call on a
communicator, returns at once and is polled afterwards. Non-blocking calls make an
abort possible at any time: a blocking ``ncclCommInitRank`` returns no handle before
every rank has joined, and without a handle nothing can end the call.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from ..errors import DistBackendError, DistError, DistTimeoutError
from ..rank_sets import name_ranks
from ..stores.base import Store
from ..thread_start import run_bounded, start_or_run, start_thread
from ..work.sigint import defer_sigint
from .interface import GpuApi, Handle
from .options import SWITCH, nonblocking

__all__ = [
    "CLOSE_WAIT",
    "MUTEX_WAIT",
    "REVOKE_WAIT",
    "CommState",
    "NCCLComm",
    "abort_together",
]

_log = logging.getLogger(__name__)

#: Seconds that an abort, and an orderly end, may take before the caller goes on.
ABORT_WAIT = 0.8
CLOSE_WAIT = 5.0
#: Seconds after which an abort counts as stuck, for each communicator of the device
#: that is being aborted: ncclCommAbort takes up to 1 s, and the driver does parts of
#: several aborts one after the other.
ABORT_EACH = 2.0
#: Seconds for which an abort waits for the mutex of a communicator, whose holder
#: may be stuck in the very call that the abort is to end.
MUTEX_WAIT = 0.2
#: Seconds that the kernels of a communicator get to end after ncclCommRevoke; then
#: the communicator is aborted as if there were no ncclCommRevoke.
REVOKE_WAIT = 0.5
#: Seconds for which the store is asked which ranks are missing.
STORE_WAIT = 1.0
# Seconds between two polls of a communicator that ends its kernels.
_NAP = 1e-3


class CommState(enum.Enum):
    """The state of a communicator; the board shows the values."""

    INIT = "init"
    RUNNING = "running"
    ABORTED = "aborted"
    CLOSED = "closed"


class Derivation(Protocol):
    """The derivation of a communicator from a parent, as `CommSplit` does it."""

    @property
    def deriving(self) -> bool: ...
    def derive(
        self,
        api: GpuApi,
        store: Store,
        rank: int,
        size: int,
        options: dict[str, Any],
        deadline: float,
    ) -> Handle | None: ...
    def cancel(self, reason: str) -> None: ...


class NCCLComm:
    """A communicator of one group on one device of this rank.

    `mutex` is the lock of the device's queue, held for every NCCL call on the
    communicator. `derivation` is tried before a fresh unique id; either all ranks have
    one, or none.
    """

    def __init__(
        self,
        api: GpuApi,
        device: int,
        mutex: threading.Lock,
        name: str,
        store: Store,
        rank: int,
        size: int,
        timeout: float,
        options: dict[str, Any],
        derivation: Derivation | None = None,
    ) -> None:
        self.device, self.name = device, name
        self.rank, self.size = rank, size
        self.state = CommState.INIT
        self.mutex = mutex
        self.nonblocking = nonblocking()
        #: `aborting`: an ncclCommAbort is in progress; `stuck`: for longer than it may
        #: take, see `ABORT_EACH`.
        self.aborting = self.stuck = False
        self._api, self._store = api, store
        self._timeout, self.options, self._derivation = timeout, options, derivation
        self._deadline = time.monotonic() + timeout
        self._handle: Any = None
        self._error: DistError | None = None
        self._too_late = False
        #: Called with the error of the creation, on the creating thread or, after a
        #: timeout, on the thread that names the missing ranks.
        self.on_error: Callable[[Exception], None] = lambda error: None
        # None after the communicator was freed.
        self._when_freed: list[Callable[[], None]] | None = []
        self._freed_lock = threading.Lock()
        self._builder = threading.Thread(
            target=self._build, name=f"rankscope-nccl-init-{name}", daemon=True
        )

    # -- creation --------------------------------------------------------------

    def open(self) -> None:
        """Begin to create the communicator; `poll` returns whether it is ready."""
        self._builder.start()

    def _build(self) -> None:
        try:
            self._api.cuda.use(self.device)
            handle = None
            if self._derivation is not None:
                # It returns no handle if a rank cannot derive.
                deadline = self._deadline + CLOSE_WAIT
                handle = self._derivation.derive(
                    self._api, self._store, self.rank, self.size, self.options, deadline
                )
            if handle is None:
                options = {**self.options, "blocking": not self.nonblocking}
                unique_id = self._share_id()
                handle = self._api.nccl.init(self.size, self.rank, unique_id, options)
        except DistError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - nccl4py's own have no common base
            self._error = DistBackendError(f"{self.name}: {error}")
            self._error.__cause__ = error
        if self._error is not None:
            self.on_error(self._error)
            return
        with self.mutex:
            if self.state is CommState.INIT:
                self._handle = handle
                return
        # `retire` ran before the handle existed, so the handle is aborted here.
        self._free(handle)

    def _share_id(self) -> bytes:
        self._store.set(f"came/{self.rank}", b"1")
        if self.rank == 0:
            made = self._api.nccl.unique_id()
            self._store.set("id", made)
            return made
        # Longer than the timeout, so that `poll` raises first: the error of `poll`
        # names the missing ranks.
        return self._store.get("id", timeout=self._timeout + CLOSE_WAIT)

    def poll(self) -> bool:
        """Return whether the communicator is ready and its last call has finished.

        The caller holds the mutex. Raises the error of the creation,
        `DistTimeoutError` if the creation exceeds the timeout, the errors that `Nccl`
        documents, and `DistBackendError` if the communicator was aborted or closed.
        """
        if self._error is not None:
            raise self._error
        if self.ended:
            raise DistBackendError(f"{self.name} was {self.state.value}")
        if self._handle is not None and self._api.nccl.ready(self._handle):
            self.state = CommState.RUNNING
            return True
        late = self.state is CommState.INIT and time.monotonic() > self._deadline
        if late and not self._too_late:
            # On a thread of its own: the requests to the store may block, and the
            # caller holds the mutex.
            self._too_late = True
            start_thread(f"nccl-late-{self.name}", self._report_timeout)
        return False

    def _report_timeout(self) -> None:
        """Set the timeout's error, which names the missing ranks, and report it."""
        said = [f"which ranks have not joined is not known after {STORE_WAIT:g} s"]
        run_bounded(
            f"nccl-ask-{self.name}", lambda: said.append(self._missing()), STORE_WAIT
        )
        error = DistTimeoutError(
            f"{self.name} was not ready after {self._timeout:g} s: {said[-1]}"
        )
        self._error = self._error or error
        self.on_error(self._error)

    def _missing(self) -> str:
        """Return text that names the ranks that have not joined, or another cause."""
        try:
            missing = [
                rank
                for rank in range(self.size)
                if not self._store.check([f"came/{rank}"])
            ]
        except DistError as error:
            return f"which ranks have not joined is not known ({error})"
        if not missing:
            return (
                "every rank has joined, so they cannot reach each other: "
                "NCCL_DEBUG=INFO says which interface NCCL uses, "
                "NCCL_SOCKET_IFNAME chooses one"
            )
        return f"{name_ranks(missing)} of the group never joined"

    @property
    def ended(self) -> bool:
        return self.state in (CommState.ABORTED, CommState.CLOSED)

    @property
    def handle(self) -> Handle:
        """The handle of NCCL; the caller holds the mutex for calls on the handle."""
        return self._handle

    @contextlib.contextmanager
    def locked(self, seconds: float) -> Iterator[bool]:
        """Acquire the mutex for the block within `seconds`; yield whether held."""
        held = self.mutex.acquire(timeout=seconds)
        try:
            yield held
        finally:
            if held:
                self.mutex.release()

    # -- its end -----------------------------------------------------------------

    def revoke(self) -> bool:
        """End the kernels in flight, and free nothing; return whether they have ended.

        For a thread of the backend. Takes `REVOKE_WAIT` seconds and what the calls
        of NCCL take. Whatever is returned, the communicator can only be retired.
        """
        nccl = self._api.nccl
        if not nccl.can_revoke or not self.nonblocking:
            # On a blocking communicator the call would not return before the end.
            return False
        deadline = time.monotonic() + REVOKE_WAIT
        try:
            self._api.cuda.use(self.device)
            with self.locked(MUTEX_WAIT) as held:
                if not held or self.state is not CommState.RUNNING:
                    return False
                nccl.revoke(self._handle)
            while time.monotonic() < deadline:
                with self.locked(MUTEX_WAIT) as held:
                    if self._handle is None:
                        return False
                    if held and nccl.ready(self._handle):
                        return True
                time.sleep(_NAP)
        except DistError as error:
            _log.debug("%s: error of its revocation: %s", self.name, error)
        return False

    def retire(self, reason: str) -> Callable[[], None]:
        """Make the communicator unusable for `reason`; return a call that aborts it.

        The returned call may block. If a thread that is stuck in a call holds the
        mutex for longer than `MUTEX_WAIT`, the abort proceeds without the mutex.
        """
        self._store.close()
        with self.locked(MUTEX_WAIT):
            over = self.ended
            being_made = self.state is CommState.INIT and self._handle is None
            handle, self._handle = self._handle, None
            if not over:
                self.state = CommState.ABORTED
        being_made = being_made and self._builder.is_alive() and self._error is None
        if being_made and not over and not self.nonblocking:
            _log.warning(
                "%s: a blocking communicator that is still being made cannot be "
                "aborted: only a restart of this rank (%%dist_restart) ends it. "
                "%s=1 avoids this",
                self.name,
                SWITCH,
            )

        def abort() -> None:
            if handle is not None:
                self.aborting = True
                _aborting.add(self)
                try:
                    self._free(handle)
                finally:
                    _aborting.discard(self)
                    self.aborting = self.stuck = False
            self._mark_freed()
            if self._derivation is not None:
                self._derivation.cancel(reason)

        return abort

    def _free(self, handle: Any) -> None:
        """Abort `handle`, which frees it; the thread is one of the backend."""
        try:
            self._api.cuda.use(self.device)
            self._api.nccl.abort(handle)
        except DistError as error:
            _log.warning("%s: error of its abort: %s", self.name, error)

    def when_freed(self, task: Callable[[], None]) -> None:
        """Run `task`, on a thread of its own, after the communicator was freed."""
        with self._freed_lock:
            if self._when_freed is not None:
                self._when_freed.append(task)
                return
        start_or_run(f"nccl-freed-{self.name}", task)

    def _mark_freed(self) -> None:
        """Run the tasks of `when_freed`, and later ones at once."""
        with self._freed_lock:
            tasks, self._when_freed = self._when_freed or [], None
        for task in tasks:
            start_or_run(f"nccl-freed-{self.name}", task)

    def await_derivation(self) -> None:
        """Wait while an abort would also abort the parent; at most `CLOSE_WAIT`."""
        if self._derivation is not None and self._derivation.deriving:
            self._builder.join(CLOSE_WAIT)

    def close(self) -> None:
        """Finalize and destroy the communicator, which has nothing in flight."""
        handle = None
        with defer_sigint(), self.locked(CLOSE_WAIT) as held:
            if held:
                with contextlib.suppress(DistError):
                    self.poll()
            running = held and self.state is CommState.RUNNING
            if running:
                handle, self._handle = self._handle, None
                self.state = CommState.CLOSED
        if not running:
            abort_together([self], "the communicator was closed before it was ready")
            return
        if not run_bounded("nccl-close", lambda: self._destroy(handle), CLOSE_WAIT):
            _log.warning(
                "%s: NCCL has not returned from its end after %g s; its memory on the "
                "GPU stays taken until it returns",
                self.name,
                CLOSE_WAIT,
            )
        self._mark_freed()

    def _destroy(self, handle: Any) -> None:
        nccl, deadline = self._api.nccl, time.monotonic() + CLOSE_WAIT
        try:
            self._api.cuda.use(self.device)
            nccl.finalize(handle)
            while not nccl.ready(handle):
                if time.monotonic() > deadline:
                    raise DistTimeoutError(f"not finalized after {CLOSE_WAIT:g} s")
                time.sleep(0.001)
        except DistError as error:
            # ncclCommDestroy would block on the work that ncclCommFinalize waits for.
            _log.debug("%s: error of its end: %s", self.name, error)
            self._free(handle)
            return
        try:
            nccl.destroy(handle)
        except DistError as error:
            _log.warning("%s: error of its end: %s", self.name, error)

    def describe(self) -> str:
        """Return the state of the communicator as text, for the board."""
        if self.stuck:
            return "abort does not return"
        return "aborting" if self.aborting else self.state.value


# The communicators that are in ncclCommAbort.
_aborting: set[NCCLComm] = set()


def abort_together(
    comms: Sequence[NCCLComm], reason: str, then: Callable[[], None] = lambda: None
) -> bool:
    """Abort `comms`, all of one device, concurrently, for `reason`.

    Returns whether all aborts ended within `ABORT_WAIT`. An abort can block behind
    the kernel of another communicator, and that kernel ends only when the other
    communicator is aborted as well: each abort therefore has a thread of its own.
    `then` is called when the last abort has returned, even after `ABORT_WAIT`.
    """
    aborts = [(comm, comm.retire(reason)) for comm in comms]

    def run() -> None:
        threads = [start_or_run(f"abort-{one.name}", abort) for one, abort in aborts]
        for thread in threads:
            if thread is not None:
                thread.join()
        then()

    began = time.monotonic()
    thread = start_or_run("nccl-abort", run)
    if thread is None:
        return True
    thread.join(ABORT_WAIT)
    if not thread.is_alive():
        return True
    start_or_run("nccl-abort-overdue", lambda: _warn_if_stuck(thread, comms, began))
    return False


def _abort_budget(device: int) -> float:
    """Return the seconds that an abort may take beside the other ones of `device`."""
    together = sum(comm.device == device for comm in list(_aborting))
    return ABORT_EACH * max(1, together)


def _warn_if_stuck(
    thread: threading.Thread, comms: Sequence[NCCLComm], began: float
) -> None:
    """Warn of the aborts that `thread` does if they exceed their budget."""
    budget = 0.0
    while thread.is_alive():
        # The largest one: aborts that have ended took their part of the time.
        budget = max(budget, *(_abort_budget(comm.device) for comm in comms))
        left = began + budget - time.monotonic()
        if left > 0:
            thread.join(min(left, 0.1))
            continue
        for comm in comms:
            if comm.aborting:
                comm.stuck = True
                _log.warning(
                    "%s: NCCL has not returned from its abort after %.1f s; its memory "
                    "on the GPU stays taken until it returns. A restart of this rank "
                    "(%%dist_restart) always ends it",
                    comm.name,
                    budget,
                )
        return
