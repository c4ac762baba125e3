"""MPITransport: the messages of a group over its MPI communicator."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from ..errors import DistBackendError, DistError
from ..messaging.algorithms import Flat
from ..messaging.connecting import Namer
from ..messaging.transport import ANY_SOURCE, TRUNCATED, Received
from ..rank_sets import name_ranks
from . import job

__all__ = ["MPITransport"]

_log = logging.getLogger(__name__)

# Of aborted groups: requests that MPI has not completed or cancelled yet, and the
# memory that they may still read or write. One thread at a time may test them.
_abandoned: list[tuple[Any, Flat]] = []
_sweeping = threading.Lock()

# Naps of a waiter grow with the time for which nothing has come, between these.
_NAP, _NAP_MAX = 2e-5, 4e-3


class MPITransport:
    """Messages over the communicator of a group; see `Transport`.

    MPI reports no arrival of a message: it has to be asked, and waiters take naps.
    """

    #: MPI counts with 32 bits.
    max_message = 1 << 30
    spin = 0.002

    def __init__(self, mpi: Any, comm: Any, name: Namer = name_ranks) -> None:
        self._mpi, self._comm, self._name = mpi, comm, name
        self._byte, self._any = mpi.BYTE, mpi.ANY_SOURCE
        self._status = mpi.Status()

    def send(self, array: Flat, peer: int, tag: int) -> Any:
        """Start to send `array`."""
        return self._comm.Isend([array, self._byte], peer, tag)

    def receive(self, array: Flat, source: int, tag: int) -> Any:
        """Start to receive into `array`."""
        if source == ANY_SOURCE:
            source = self._any
        return self._comm.Irecv([array, self._byte], source, tag)

    def test(self, request: Any, looks: int = 1) -> bool:
        """Return whether `request` is over; raises its error."""
        test, status = request.Test, self._status
        for _ in range(looks):  # noqa: SIM110 - any() would cost more than a look
            if test(status):
                return True
        return False

    def fits(self, request: Any, nbytes: int, tag: int) -> bool:
        """Return whether so many bytes were received, if that is known."""
        status = self._status
        # Of a request that was over before, MPI makes an empty status.
        return status.Get_count(self._byte) == nbytes or status.Get_source() < 0

    def received(self, request: Any) -> Received:
        """Return the source and the bytes of the receive that was tested last."""
        status = self._status
        return Received(status.Get_source(), status.Get_count(self._byte))

    def too_long(self, error: BaseException) -> None:
        """Return ``None``: MPI does not say which message it was."""

    def explain(self, error: BaseException) -> str | DistError | None:
        """Return the reason; that of a death has the dead ranks as culprits."""
        mpi = self._mpi
        if not isinstance(error, mpi.Exception):
            return None
        kind = error.Get_error_class()
        if kind == mpi.ERR_TRUNCATE:
            return TRUNCATED
        if kind == getattr(mpi, "ERR_PROC_FAILED", None):
            dead = self._dead_ranks()
            who = self._name(dead) if dead else "a rank"
            return DistBackendError(f"the process of {who} died", culprits=dead)
        return f"MPI reports {error.Get_error_string()}"

    def _dead_ranks(self) -> list[int]:
        """Return the dead ranks of the group, as far as MPI knows by now."""
        failed, members = self._comm.Get_failed(), self._comm.Get_group()
        return list(failed.Translate_ranks(None, members))

    def abandon(self, requests: Sequence[tuple[Any, Flat, bool]]) -> None:
        """Cancel the receives in flight.

        A request that MPI does not complete at once (a message half received, a
        send that was never received) is kept, with its memory, until it does.
        """
        try:
            for request, _, is_receive in requests:
                if request and is_receive:
                    request.Cancel()
        finally:
            # Not before: another thread may test them now, which frees those that are
            # over, and they cannot be cancelled then.
            _abandoned.extend((request, array) for request, array, _ in requests)
        # The others are swept by the next abort.
        if _sweeping.acquire(blocking=False):
            try:
                for entry in [one for one in _abandoned if _is_over(one[0])]:
                    _abandoned.remove(entry)
            finally:
                _sweeping.release()

    def arm(self) -> bool:
        """Allow a nap."""
        return True

    def sleep(self, timeout: float, idle: float) -> None:
        """Take a nap, which is longer the longer nothing has come."""
        time.sleep(min(max(idle / 16, _NAP), _NAP_MAX, timeout))

    def wake(self) -> None:
        """Do nothing: naps are short."""

    def fileno(self) -> None:
        """Return ``None``: there is no descriptor to wait on."""

    def close(self) -> None:
        """Free the communicator."""
        try:
            self._comm.Free()
        except self._mpi.Exception as error:
            # A member died in the meantime; its memory is all that is lost.
            _log.debug("a communicator could not be freed: %s", error)


def _is_over(request: Any) -> bool:
    try:
        return not request or bool(request.Test())
    except job.mpi_error():
        # Its peer died: the request ended with that error.
        return True
