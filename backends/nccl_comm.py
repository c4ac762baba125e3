"""NCCLComm: one communicator, from the id that its ranks share to its end.

Communicators are non-blocking: making one, and every call on it, returns at
once and is asked about later. That is what makes an abort possible at any
time: a blocking ``ncclCommInitRank`` gives no handle before every rank is
there, and nothing can end it.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .errors import DistBackendError, DistError, DistTimeoutError
from .nccl_seam import Seam
from .store import Store
from .uninterrupted import Uninterrupted

if TYPE_CHECKING:
    from .nccl_descent import Descent

__all__ = ["CommState", "NCCLComm", "abort_together", "nonblocking", "start_thread"]

_log = logging.getLogger(__name__)

#: Seconds that an abort, and an orderly end, may take before we stop waiting.
ABORT_WAIT = 0.8
CLOSE_WAIT = 5.0
#: Seconds for which an abort waits for the mutex of a communicator, whose holder
#: may be stuck in the very call that the abort is to end.
MUTEX_WAIT = 0.2
#: Seconds for which a store is asked who is missing.
STORE_WAIT = 1.0

#: As ``TORCH_NCCL_USE_COMM_NONBLOCKING``, which counts where this is not set.
SWITCH = "RANKSCOPE_NCCL_USE_COMM_NONBLOCKING"


#: What switches are turned on and off with, in torch as well.
_ON, _OFF = ("1", "true", "yes", "y", "on", ""), ("0", "false", "no", "n", "off")


def nonblocking() -> bool:
    """Whether communicators are non-blocking: yes, unless the environment says no."""
    name = SWITCH if SWITCH in os.environ else "TORCH_NCCL_USE_COMM_NONBLOCKING"
    value = os.environ.get(name, "1").strip().lower()
    if value not in (*_ON, *_OFF):
        raise DistBackendError(f"{name}={value}: expected 1 (the default) or 0")
    return value in _ON


class CommState(enum.Enum):
    """Where a communicator is; the values are what the board shows."""

    INIT = "init"
    RUNNING = "running"
    ABORTED = "aborted"
    CLOSED = "closed"


class NCCLComm:
    """A communicator of one group on one device of this rank.

    `mutex`, that of its device's lane, is held around every NCCL call on it.
    `timeout` bounds the making of it, `store` is where its ranks meet, and `name`
    is for messages. `descent` is what it may be made out of; all its ranks have
    one, or none has.
    """

    def __init__(
        self,
        seam: Seam,
        device: int,
        mutex: threading.Lock,
        name: str,
        store: Store,
        rank: int,
        size: int,
        timeout: float,
        options: dict[str, Any],
        descent: Descent | None = None,
    ) -> None:
        self.device, self.name = device, name
        self.rank, self.size = rank, size
        self.state = CommState.INIT
        self.mutex = mutex
        self.nonblocking = nonblocking()
        #: Whether NCCL is at its abort, and whether that takes too long.
        self.aborting = self.stuck = False
        self._seam, self._store = seam, store
        self._timeout, self.options, self._descent = timeout, options, descent
        self._deadline = time.monotonic() + timeout
        self._handle: Any = None
        self._error: DistError | None = None
        self._too_late = False
        #: Called with what its making failed with, by the thread that made it.
        self.on_error: Callable[[Exception], None] = lambda error: None
        #: Set when it was freed.
        self.gone = threading.Event()
        self._builder = threading.Thread(
            target=self._build, name=f"rankscope-nccl-init-{name}", daemon=True
        )

    # -- making it -----------------------------------------------------------

    def open(self) -> None:
        """Begin to make it; `poll` says when it is there."""
        self._builder.start()

    def _build(self) -> None:
        try:
            self._seam.cuda.use(self.device)
            handle = self._descend()
            if handle is None:
                handle = self._begin()
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
        # It was aborted before there was anything to abort.
        self._free(handle)

    def _descend(self) -> Any | None:
        """Make it out of another one, if it has one and all ranks can."""
        if self._descent is None:
            return None
        return self._descent.derive(
            self._seam,
            self._store,
            self.rank,
            self.size,
            self.options,
            self._deadline + CLOSE_WAIT,
        )

    def _begin(self) -> Any:
        """Begin to make it from a fresh id."""
        unique_id = self._meet()
        options = {**self.options, "blocking": not self.nonblocking}
        return self._seam.nccl.init(self.size, self.rank, unique_id, options)

    def _meet(self) -> bytes:
        """The id that rank 0 makes and the others take from the store."""
        self._store.set(f"came/{self.rank}", b"1")
        if self.rank == 0:
            made = self._seam.nccl.unique_id()
            self._store.set("id", made)
            return made
        # `poll` knows better what to say once the time is up.
        return self._store.get("id", timeout=self._timeout + CLOSE_WAIT)

    def poll(self) -> bool:
        """Whether it is there and done with what it was asked last.

        The mutex is held. Raises what it failed with, `DistTimeoutError` if it
        is not there in time, `DistBackendError` if it was aborted.
        """
        if self._error is not None:
            raise self._error
        if self.state in (CommState.ABORTED, CommState.CLOSED):
            raise DistBackendError(f"{self.name} was {self.state.value}")
        if self._handle is not None and self._seam.nccl.ready(self._handle):
            self.state = CommState.RUNNING
            return True
        late = self.state is CommState.INIT and time.monotonic() > self._deadline
        if late and not self._too_late:
            # Not here: the store may be as slow as the ranks are.
            self._too_late = True
            threading.Thread(
                target=self._give_up,
                name=f"rankscope-nccl-late-{self.name}",
                daemon=True,
            ).start()
        return False

    def _give_up(self) -> None:
        said = [f"which ranks have not come is not known after {STORE_WAIT:g} s"]
        _bounded(f"ask-{self.name}", lambda: said.append(self._missing()), STORE_WAIT)
        error = DistTimeoutError(
            f"{self.name} was not there {self._timeout:g} s after it was begun: "
            f"{said[-1]}"
        )
        self._error = self._error or error
        self.on_error(self._error)

    def _missing(self) -> str:
        """Which ranks have not come, or what else may be the matter."""
        try:
            missing = [
                str(rank)
                for rank in range(self.size)
                if not self._store.check([f"came/{rank}"])
            ]
        except DistError as error:
            return f"which ranks have not come is not known ({error})"
        if not missing:
            return (
                "every rank has come, so they cannot reach each other: "
                "NCCL_DEBUG=INFO says which interface NCCL uses, "
                "NCCL_SOCKET_IFNAME chooses one"
            )
        return (
            f"rank{'s'[: len(missing) > 1]} {', '.join(missing)} of the group "
            "never came"
        )

    @property
    def handle(self) -> Any:
        """NCCL's handle, for calls under the mutex."""
        return self._handle

    @contextlib.contextmanager
    def locked(self, seconds: float) -> Iterator[bool]:
        """Hold the mutex within the block, unless it cannot be had in `seconds`."""
        held = self.mutex.acquire(timeout=seconds)
        try:
            yield held
        finally:
            if held:
                self.mutex.release()

    # -- its end -----------------------------------------------------------------

    def retire(self) -> Callable[[], None]:
        """Make it unusable from now on; return what aborts it and may block.

        Whoever is in a call may hold the mutex for ever: an abort goes on
        without it then.
        """
        self._store.close()
        with self.locked(MUTEX_WAIT):
            over = self.state in (CommState.ABORTED, CommState.CLOSED)
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
                self._free(handle)
                self.aborting = self.stuck = False
            self.gone.set()
            if self._descent is not None:
                self._descent.give_up()

        return abort

    def _free(self, handle: Any) -> None:
        """Abort it; on a thread of ours."""
        try:
            self._seam.cuda.use(self.device)
            self._seam.nccl.abort(handle)
        except DistError as error:
            _log.warning("%s: its abort says: %s", self.name, error)

    def settle(self) -> None:
        """Wait while an end of it would be that of what it is made out of, too."""
        if self._descent is not None and self._descent.making:
            self._builder.join(CLOSE_WAIT)

    def close(self) -> None:
        """Free it in good order: nothing is in flight. Bounded by `CLOSE_WAIT`."""
        handle = None
        with Uninterrupted(), self.locked(CLOSE_WAIT) as held:
            if held:
                with contextlib.suppress(DistError):
                    self.poll()
            running = held and self.state is CommState.RUNNING
            if running:
                handle, self._handle = self._handle, None
                self.state = CommState.CLOSED
        if not running:
            abort_together([self])
            return
        if not _bounded("close", lambda: self._destroy(handle), CLOSE_WAIT):
            _log.warning(
                "%s: NCCL has not come back from its end after %g s; its memory on the "
                "GPU stays taken until it does",
                self.name,
                CLOSE_WAIT,
            )
        self.gone.set()

    def _destroy(self, handle: Any) -> None:
        nccl, deadline = self._seam.nccl, time.monotonic() + CLOSE_WAIT
        try:
            self._seam.cuda.use(self.device)
            nccl.finalize(handle)
            while not nccl.ready(handle):
                if time.monotonic() > deadline:
                    raise DistTimeoutError(f"not finalized after {CLOSE_WAIT:g} s")
                time.sleep(0.001)
        except DistError as error:
            # destroy() would block on whatever finalize() waits for.
            _log.debug("%s: its end says: %s", self.name, error)
            self._free(handle)
            return
        try:
            nccl.destroy(handle)
        except DistError as error:
            _log.warning("%s: its end says: %s", self.name, error)

    def describe(self) -> str:
        """Its state, for the board."""
        return "abort does not return" if self.stuck else self.state.value


def abort_together(
    comms: Sequence[NCCLComm], then: Callable[[], None] = lambda: None
) -> bool:
    """Abort `comms`, all of one device, at once; say whether all came back in time.

    An abort can block behind the kernel of another communicator, which ends
    only when that one is aborted as well: hence a thread for each. `then` is
    called when the last has come back, however late that is.
    """
    aborts = [(comm, comm.retire()) for comm in comms]

    def run() -> None:
        threads = [
            start_thread(f"rankscope-abort-{one.name}", abort) for one, abort in aborts
        ]
        for thread in threads:
            if thread is not None:
                thread.join()
        then()

    if _bounded("abort", run, ABORT_WAIT):
        return True
    for comm in comms:
        if comm.aborting:
            comm.stuck = True
            _log.warning(
                "%s: NCCL has not come back from its abort after %g s; its memory on "
                "the GPU stays taken until it does. A restart of this rank "
                "(%%dist_restart) ends it for sure",
                comm.name,
                ABORT_WAIT,
            )
    return False


def _bounded(name: str, task: Callable[[], None], seconds: float) -> bool:
    """Run `task` on a thread; say whether it was done in `seconds`."""
    thread = start_thread(f"rankscope-nccl-{name}", task)
    if thread is None:
        return True
    thread.join(seconds)
    return not thread.is_alive()


def start_thread(name: str, task: Callable[[], None]) -> threading.Thread | None:
    """Start a thread for `task`; ``None`` if none can be, and it was run here."""
    thread = threading.Thread(target=task, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # Python 3.12 has none at its end.
        task()
        return None
    return thread
