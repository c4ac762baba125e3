"""The MPI backend: collectives over mpi4py's non-blocking messages.

MPI has collectives of its own, also non-blocking ones (``Iallreduce``). They
are not used, for three reasons. Open MPI's are slower than the schedules here
(2 ranks, ``Iallreduce`` against this: 1.7 times at 64 KiB, 7 times at 64 MiB).
One that is pending cannot be cancelled: after an abort it would go on writing
to the caller's arrays. And what happens when ranks call different ones is
undefined, up to a crash, while mismatched messages wait until the group's
timeout and can be diagnosed.
"""

from __future__ import annotations

from ..interface.base import Backend
from ..messaging.backend import MessagingBackend
from ..messaging.progress import progress
from ..messaging.signature import BITS
from ..stores.base import Store
from . import job
from .communicator import GroupRendezvous
from .rendezvous import mpi_rendezvous

__all__ = ["MPIBackend"]

# MPI must not be called once it is finalized.
job.at_exit(progress.stop)


class MPIBackend(MessagingBackend):
    """One group over MPI, on this rank."""

    name = "mpi"
    interface_version = 1

    def __init__(self, store: Store, rank: int, size: int) -> None:
        connector = GroupRendezvous(store, rank, size, self._name)
        super().__init__(rank, size, connector, bits=BITS)

    def abort(self, reason: str) -> None:
        job.note_abort()
        super().abort(reason)


def _create(store: Store, rank: int, size: int, timeout: float) -> MPIBackend:
    if size > 1:
        job.check_launched(size)
    return MPIBackend(store, rank, size)


Backend.register_backend(
    "mpi",
    _create,
    devices="cpu",
    unavailable=job.unavailable_reason,
    launcher="mpi",
    rendezvous=mpi_rendezvous,
    on_init=job.begin,
)
