"""NCCL through nccl4py, and why it cannot be used where it cannot.

The calls are those of ``nccl.bindings``: they take addresses, as NCCL does,
and release the GIL. All names of nccl4py that are used are in this file.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from .nccl_seam import LibraryFailure

__all__ = ["NcclLibrary", "unavailable_reason"]

#: nccl4py makes communicators by ``ncclCommInitRankScalable``, which came then.
OLDEST = (2, 23)
#: ncclCommShrink came then.
_SHRINKS = (2, 27)

_EXTRA = "pip install 'rankscope[cuda13]' (CUDA 12: 'rankscope[cuda12]')"

F = TypeVar("F", bound=Callable[..., Any])


def _told(call: F) -> F:
    """`call`, but what NCCL raises is a `LibraryFailure`."""

    @functools.wraps(call)
    def method(self: NcclLibrary, *arguments: Any, **named: Any) -> Any:
        try:
            return call(self, *arguments, **named)
        except self.error as error:
            raise LibraryFailure(f"NCCL reports: {error}") from error

    return method  # type: ignore[return-value]


class NcclLibrary:
    """The real `nccl_seam.Nccl`."""

    def __init__(self) -> None:
        from nccl import core
        from nccl.bindings import nccl as bindings

        self._core, self._calls = core, bindings
        self.error: type[Exception] = bindings.NCCLError
        self._in_progress = int(bindings.Result.InProgress)
        library = core.get_version().libnccl
        assert library is not None
        self.can_shrink = library.version.release[:2] >= _SHRINKS
        # What takes addresses already is used as it is, without a layer.
        for name in ("broadcast", "reduce", "all_gather", "reduce_scatter"):
            setattr(self, name, _call(self, getattr(bindings, name)))
        for name in ("all_reduce", "send", "recv", "group_start", "group_end"):
            setattr(self, name, _call(self, getattr(bindings, name)))

    broadcast: Any
    reduce: Any
    all_gather: Any
    reduce_scatter: Any
    all_reduce: Any
    send: Any
    recv: Any
    group_start: Any
    group_end: Any

    @_told
    def unique_id(self) -> bytes:
        return bytes(self._core.get_unique_id().as_bytes)

    @_told
    def init(
        self, size: int, rank: int, unique_id: bytes, options: dict[str, Any]
    ) -> Any:
        config = self._core.NCCLConfig(**options)
        made = self._core.UniqueId.from_bytes(unique_id)
        communicator = self._core.Communicator.init(size, rank, made, config)
        return self._calls.Comm(communicator.ptr)

    # NCCL writes the new handle into what these return when it is there.

    @_told
    def split(self, comm: Any, rank: int) -> Any:
        return self._calls.comm_split(comm, 0, rank, 0)

    @_told
    def shrink(self, comm: Any, excluded: Sequence[int], *, abort: bool) -> Any:
        ranks = list(excluded)
        return self._calls.comm_shrink(comm, ranks, len(ranks), 0, int(abort))

    @_told
    def ready(self, comm: Any) -> bool:
        if not comm:
            return False
        result = int(self._calls.comm_get_async_error(comm))
        if result == self._in_progress:
            return False
        if result:
            said = self._core.get_error_string(result)
            raise LibraryFailure(f"NCCL reports: {said}; {self._last_error(comm)}")
        return True

    def _last_error(self, comm: Any) -> str:
        said = self._calls.get_last_error(comm)
        return said.strip() or "NCCL_DEBUG=WARN says more"

    @_told
    def abort(self, comm: Any) -> None:
        if comm:
            self._calls.comm_abort(comm)

    @_told
    def finalize(self, comm: Any) -> None:
        self._calls.comm_finalize(comm)

    @_told
    def destroy(self, comm: Any) -> None:
        self._calls.comm_destroy(comm)

    @_told
    def premul_sum(self, factor: float, dtype: int, comm: Any) -> int:
        scalar = np.array([factor], self._core.NcclDataType(dtype).numpy_dtype)
        host = int(self._calls.ScalarResidence.HostImmediate)
        # NCCL reads the scalar within the call.
        return int(
            self._calls.red_op_create_pre_mul_sum(scalar.ctypes.data, dtype, host, comm)
        )

    @_told
    def free_op(self, op: int, comm: Any) -> None:
        self._calls.red_op_destroy(op, comm)


def _call(library: NcclLibrary, call: Callable[..., Any]) -> Callable[..., Any]:
    failure = library.error

    def run(*arguments: Any) -> None:
        try:
            call(*arguments)
        except failure as error:
            raise LibraryFailure(f"NCCL reports: {error}") from error

    return run


def unavailable_reason() -> str | None:
    """Why NCCL cannot be used here, with the remedy; ``None`` if it can."""
    return (
        _not_installed("cupy", "cupy")
        or _not_installed("nccl", "nccl4py")
        or _not_installed("cuda.bindings", "cuda-bindings")
        or _no_device()
        or _no_library()
    )


def _not_installed(module: str, package: str) -> str | None:
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if found:
        return None
    return f"NCCL needs {package}, which is not installed: {_EXTRA}"


def _no_device() -> str | None:
    import cupy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return (
            f"there is no usable NVIDIA driver here ({error}): NCCL needs a GPU and "
            "its driver; use gloo or mpi for host arrays"
        )
    if not count:
        return (
            "there is no NVIDIA GPU that this process may use: is "
            "CUDA_VISIBLE_DEVICES empty?"
        )
    return None


def _no_library() -> str | None:
    try:
        from nccl import core
    except (ImportError, OSError, RuntimeError) as error:
        return f"nccl4py cannot be loaded ({error}): {_EXTRA}"
    library = core.get_version().libnccl
    if library is None:
        return f"libnccl.so.2 is not there: {_EXTRA}, or pip install nvidia-nccl-cu13"
    if library.version.release[:2] < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        return (
            f"NCCL {library.version} is too old, {wanted} is needed: "
            "pip install --upgrade nvidia-nccl-cu13 (CUDA 12: nvidia-nccl-cu12)"
        )
    return None
