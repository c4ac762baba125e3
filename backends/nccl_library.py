"""NCCL through nccl4py, and why it cannot be used where it cannot.

The calls are those of ``nccl.bindings``: they take addresses, as NCCL does,
and release the GIL. All names of nccl4py that are used are in this file.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from .nccl_seam import LibraryFailure

__all__ = ["DRIVER_FILES", "NcclLibrary", "install_command", "unavailable_reason"]

#: nccl4py makes communicators by ``ncclCommInitRankScalable``, which came then.
OLDEST = (2, 23)
#: ncclCommShrink came then, and float8.
_SHRINKS, _FLOAT8 = (2, 27), (2, 24)

# What brings all that is needed, and NCCL alone.
_EXTRA, _LIBRARY = "'rankscope[cuda{}]'", "nvidia-nccl-cu{}"

# cudaError_t of driver_types.h.
_INSUFFICIENT_DRIVER, _NO_DEVICE = 35, 100
#: What a loaded NVIDIA driver shows; the other one is that of WSL.
DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")

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
        self._version = library.version
        self.can_shrink = self._version.release[:2] >= _SHRINKS
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

    def float8_lacks(self) -> str:
        if self._version.release[:2] >= _FLOAT8:
            return ""
        return f"NCCL {self._version} is here, {'.'.join(map(str, _FLOAT8))} is needed"

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


def _cuda_of_cupy() -> int | None:
    """The CUDA that the installed cupy is for, 12 or 13; `None` without a wheel."""
    for cuda in (13, 12):
        try:
            metadata.distribution(f"cupy-cuda{cuda}x")
        except metadata.PackageNotFoundError:
            continue
        return cuda
    return None


def install_command() -> str:
    """What brings all that arrays on CUDA devices need."""
    return f"pip install {_for_cuda(_EXTRA)}"


def _for_cuda(package: str) -> str:
    """`package`, with the CUDA in its name that is there already, else with both."""
    cuda = _cuda_of_cupy()
    if cuda is None:
        return f"{package.format(13)} (CUDA 12: {package.format(12)})"
    return package.format(cuda)


def _not_installed(module: str, package: str) -> str | None:
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if found:
        return None
    return f"NCCL needs {package}, which is not installed: {install_command()}"


def _no_device() -> str | None:
    import cupy

    runtime = cupy.cuda.runtime
    try:
        runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        if error.status == _NO_DEVICE:
            return _no_visible_device()
        there = any(Path(file).exists() for file in DRIVER_FILES)
        if error.status == _INSUFFICIENT_DRIVER and there:
            return _old_driver(error, runtime.driverGetVersion())
        return (
            f"there is no usable NVIDIA driver here ({error}): NCCL needs a GPU and "
            "its driver; use gloo or mpi for host arrays"
        )
    return None


def _no_visible_device() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    remedy = "does nvidia-smi -L list one?"
    if visible is not None:
        remedy = (
            f"CUDA_VISIBLE_DEVICES is {visible!r}: unset it, or name GPUs that "
            "nvidia-smi -L lists"
        )
    return f"there is no NVIDIA GPU that this process may use; {remedy}"


def _old_driver(error: Exception, version: int) -> str:
    """`version` is as CUDA counts: 12040 is 12.4, 0 is unknown."""
    knows, remedy = ", or its libcuda.so.1 is missing", "update the driver"
    if version:
        knows = f", it is for CUDA {version // 1000}.{version % 1000 // 10}"
    if _cuda_of_cupy() != 12 and (not version or version >= 12000):
        remedy += ", or use CUDA 12: pip install 'rankscope[cuda12]'"
    return f"the NVIDIA driver here is too old{knows} ({error}): {remedy}"


def _no_library() -> str | None:
    try:
        from nccl import core
    except (ImportError, OSError, RuntimeError) as error:
        return f"nccl4py cannot be loaded ({error}): {install_command()}"
    library = core.get_version().libnccl
    if library is None:
        return (
            f"libnccl.so.2 is not there: {install_command()}, or that "
            f"alone: pip install {_for_cuda(_LIBRARY)}"
        )
    if library.version.release[:2] < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        return (
            f"NCCL {library.version} is too old, {wanted} is needed: "
            f"pip install --upgrade {_for_cuda(_LIBRARY)}"
        )
    return None
