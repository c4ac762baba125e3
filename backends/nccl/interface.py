"""The interface between the NCCL backend and its libraries: NCCL and CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..devices.cuda_driver import Cuda

__all__ = ["MEMORY_STATS", "GpuApi", "Handle", "Nccl"]

#: What the libraries return, opaque to the backend: a communicator, an event.
Handle = Any

#: The names of what `Nccl.memory_stats` returns, as in c10d. In bytes of device memory:
#: what `suspend` frees, what it does not free, and both; "suspended" is 1 or 0.
MEMORY_STATS = ("suspend", "suspended", "persist", "total")


class Nccl(Protocol):
    """The calls of NCCL that are made, all non-blocking and without the GIL.

    Pointers and streams are addresses, `count` counts elements of `dtype`, an
    ncclDataType_t; `op` is an ncclRedOp_t or what `premul_sum` returned. Every
    call raises `LibraryFailure` for any result but ncclSuccess and ncclInProgress,
    which `ready` alone reports, and `ConnectionLostError` for a result of which the
    end of a peer may be the cause.
    """

    def unique_id(self) -> bytes:
        """Return a fresh id; one rank makes it and shares it with the others."""

    def init(
        self, size: int, rank: int, unique_id: bytes, options: dict[str, Any]
    ) -> Handle:
        """Begin to create a communicator on the current device."""

    #: Whether the library has `shrink`.
    can_shrink: bool

    #: Whether the library has `revoke`.
    can_revoke: bool

    def float8_lacks(self) -> str:
        """Return what the library lacks for reductions of float8; empty: nothing."""

    def split(self, comm: Handle, rank: int) -> Handle:
        """Begin to create a communicator of the ranks of `comm`, with its options.

        It is ready when both are `ready`; `comm` reports what goes wrong.
        """

    def shrink(self, comm: Handle, excluded: Sequence[int], *, abort: bool) -> Handle:
        """As `split`, without the ranks `excluded`, which do not call it.

        With `abort`, the ops in flight on `comm` are aborted first; may wait for it.
        """

    def suspend_lacks(self) -> str:
        """Return what the library lacks for the next three; empty: nothing."""

    def suspend(self, comm: Handle) -> None:
        """Begin to free the device memory of `comm`, which is idle.

        Over, on every rank, when `comm` is `ready`. No op may follow before `resume`.
        """

    def resume(self, comm: Handle) -> None:
        """Begin to allocate what `suspend` freed; over when `comm` is `ready`."""

    def memory_stats(self, comm: Handle) -> dict[str, int]:
        """Return the `MEMORY_STATS` of `comm`, which may be suspended."""

    def ready(self, comm: Handle) -> bool:
        """Return whether the last call on `comm` is over (ncclCommGetAsyncError)."""

    def revoke(self, comm: Handle) -> None:
        """Begin to end the kernels of `comm`, which can only be aborted afterwards.

        They have ended when `comm` is `ready`.
        """

    def abort(self, comm: Handle) -> None:
        """End the kernels of `comm` and free it; may block until they have ended."""

    def finalize(self, comm: Handle) -> None:
        """Begin to finish the ops in flight on `comm`, before `destroy`."""

    def destroy(self, comm: Handle) -> None:
        """Free `comm`, which has not failed."""

    def group_start(self) -> None:
        """Collect this thread's calls up to `group_end` into one."""

    def group_end(self) -> None:
        """Launch the calls since `group_start` as one."""

    # The calls of an op, with NCCL's arguments in NCCL's order.

    @property
    def all_reduce(self) -> Callable[[int, int, int, int, int, Handle, int], None]:
        """(sendbuff, recvbuff, count, datatype, op, comm, stream)"""

    @property
    def broadcast(self) -> Callable[[int, int, int, int, int, Handle, int], None]:
        """(sendbuff, recvbuff, count, datatype, root, comm, stream)"""

    @property
    def reduce(self) -> Callable[[int, int, int, int, int, int, Handle, int], None]:
        """(sendbuff, recvbuff, count, datatype, op, root, comm, stream)"""

    @property
    def all_gather(self) -> Callable[[int, int, int, int, Handle, int], None]:
        """(sendbuff, recvbuff, sendcount, datatype, comm, stream)"""

    @property
    def reduce_scatter(self) -> Callable[[int, int, int, int, int, Handle, int], None]:
        """(sendbuff, recvbuff, recvcount, datatype, op, comm, stream)"""

    @property
    def send(self) -> Callable[[int, int, int, int, Handle, int], None]:
        """(sendbuff, count, datatype, peer, comm, stream)"""

    @property
    def recv(self) -> Callable[[int, int, int, int, Handle, int], None]:
        """(recvbuff, count, datatype, peer, comm, stream)"""

    def premul_sum(self, factor: float, dtype: int, comm: Handle) -> int:
        """Create the reduction that multiplies by `factor` and adds up."""

    def free_op(self, op: int, comm: Handle) -> None:
        """Free what `premul_sum` created; ops that were issued with it go on."""


@dataclass(frozen=True)
class GpuApi:
    """NCCL and CUDA, as the backend calls them."""

    nccl: Nccl
    cuda: Cuda
