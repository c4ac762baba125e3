"""The seam between the NCCL backend and what it stands on: NCCL and CUDA.

The backend speaks to these two protocols alone. `nccl_library` and
`cuda_library` are the real ones, over nccl4py, cupy and the CUDA driver; where
there is no GPU, the tests put simulations of their own in their place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import DistBackendError

__all__ = ["Cuda", "LibraryFailure", "Nccl", "Seam", "current_device", "load", "use"]

#: What the libraries hand out, opaque to us: a communicator, an event.
Handle = Any


class LibraryFailure(DistBackendError):
    """NCCL or CUDA said no; the message is the library's."""


class Nccl(Protocol):
    """The calls of NCCL that are made, all non-blocking and without the GIL.

    Pointers and streams are addresses, `count` counts elements of `dtype`, one
    of `nccl_types`; `op` is a reduction of `nccl_types` or what `premul_sum`
    returned. Every call raises `LibraryFailure` for any result but success and
    "in progress", which is told by `ready` alone.
    """

    def unique_id(self) -> bytes:
        """A fresh id; one rank makes it and gives it to the others."""

    def init(
        self, size: int, rank: int, unique_id: bytes, options: dict[str, Any]
    ) -> Handle:
        """Begin to make a communicator on the current device."""

    #: Whether the library has `shrink`.
    can_shrink: bool

    def float8_lacks(self) -> str:
        """What the library lacks for reductions of float8; empty if nothing."""

    def split(self, comm: Handle, rank: int) -> Handle:
        """Begin to make a communicator of the ranks of `comm`, with its options.

        It is there when both are `ready`; what goes wrong is told by `comm`.
        """

    def shrink(self, comm: Handle, excluded: Sequence[int], *, abort: bool) -> Handle:
        """As `split`, without the ranks `excluded`, which do not call it.

        With `abort`, what `comm` is at is ended first; may wait for that.
        """

    def ready(self, comm: Handle) -> bool:
        """Whether what was asked of it last is done (``ncclCommGetAsyncError``)."""

    def abort(self, comm: Handle) -> None:
        """End what its kernels do, and free it; may take its time."""

    def finalize(self, comm: Handle) -> None:
        """Begin to finish what is under way, before `destroy`."""

    def destroy(self, comm: Handle) -> None:
        """Free a healthy communicator."""

    def group_start(self) -> None:
        """The calls of this thread up to `group_end` are one."""

    def group_end(self) -> None:
        """Launch them."""

    def all_reduce(
        self,
        source: int,
        target: int,
        count: int,
        dtype: int,
        op: int,
        comm: Handle,
        stream: int,
    ) -> None: ...

    def broadcast(
        self,
        source: int,
        target: int,
        count: int,
        dtype: int,
        root: int,
        comm: Handle,
        stream: int,
    ) -> None: ...

    def reduce(
        self,
        source: int,
        target: int,
        count: int,
        dtype: int,
        op: int,
        root: int,
        comm: Handle,
        stream: int,
    ) -> None: ...

    def all_gather(
        self,
        source: int,
        target: int,
        count: int,
        dtype: int,
        comm: Handle,
        stream: int,
    ) -> None:
        """`count` is that of `source`."""

    def reduce_scatter(
        self,
        source: int,
        target: int,
        count: int,
        dtype: int,
        op: int,
        comm: Handle,
        stream: int,
    ) -> None:
        """`count` is that of `target`."""

    def send(
        self,
        source: int,
        count: int,
        dtype: int,
        peer: int,
        comm: Handle,
        stream: int,
    ) -> None: ...

    def recv(
        self,
        target: int,
        count: int,
        dtype: int,
        peer: int,
        comm: Handle,
        stream: int,
    ) -> None: ...

    def premul_sum(self, factor: float, dtype: int, comm: Handle) -> int:
        """Make the reduction that multiplies by `factor` and adds up."""

    def free_op(self, op: int, comm: Handle) -> None:
        """Free what `premul_sum` made; ops that were issued with it go on."""


class Cuda(Protocol):
    """The calls of CUDA that are made; none of them waits for the device."""

    def current_device(self) -> int:
        """The device of the calling thread."""

    def device(self, index: int) -> contextlib.AbstractContextManager[Any]:
        """Make `index` the calling thread's device within the block."""

    def use(self, index: int) -> None:
        """Make `index` the calling thread's device for good: a thread of our own."""

    def current_streams(self, index: int) -> tuple[int, ...]:
        """The streams that the caller's arrays are computed on, on this device."""

    def capturing(self, stream: int) -> bool:
        """Whether what `stream` is given goes into a CUDA graph."""

    def new_stream(self) -> int:
        """A stream that does not wait for the legacy stream."""

    def free_stream(self, stream: int) -> None: ...

    def new_event(self, *, timed: bool) -> Handle:
        """An event; a `timed` one costs more to record."""

    def free_event(self, event: Handle) -> None: ...

    def record(self, event: Handle, stream: int) -> None:
        """`event` is reached when `stream` has done what it was given so far."""

    def wait(self, stream: int, event: Handle) -> None:
        """What `stream` is given from now on comes after `event`."""

    def reached(self, event: Handle) -> bool:
        """Whether `event` was reached; raises what the device failed with."""

    def elapsed_ms(self, start: Handle, end: Handle) -> float:
        """Milliseconds between two timed events that were reached."""

    def capability(self, index: int) -> tuple[int, int]:
        """The compute capability of a device, ``(9, 0)``."""

    def address(self, array: Any) -> int:
        """Where the elements of `array` lie."""

    def device_of(self, array: Any) -> int:
        """The device that `array` lies on."""

    def scratch(self) -> Any:
        """An array of one float32 on the current device; it may hold anything."""


@dataclass(frozen=True)
class Seam:
    """Both sides."""

    nccl: Nccl
    cuda: Cuda


def _load_real() -> Seam:
    from .cuda_library import CudaLibrary
    from .nccl_library import NcclLibrary, unavailable_reason

    reason = unavailable_reason()
    if reason is not None:
        raise DistBackendError(f"the nccl backend cannot be used here: {reason}")

    return Seam(NcclLibrary(), CudaLibrary())


_loader: Callable[[], Seam] = _load_real
_seam: Seam | None = None


def load() -> Seam:
    """The seam of this process; raises `DistBackendError` with the remedy if none."""
    global _seam
    if _seam is None:
        _seam = _loader()
    return _seam


def current_device() -> int | None:
    """The calling thread's device, ``None`` before anything was loaded."""
    return None if _seam is None else _seam.cuda.current_device()


def use(loader: Callable[[], Seam] | None) -> None:
    """Have `load` return what ``loader()`` does, ``None``: the real thing."""
    global _loader, _seam
    _loader, _seam = loader or _load_real, None
