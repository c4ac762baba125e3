"""`Nccl` implemented with nccl4py: loaded once, or the reason why it cannot be.

The calls are those of ``nccl.bindings``: the functions accept addresses, as NCCL's
do, in the order of nccl.h, and release the GIL. Only this file uses names of nccl4py.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..devices import cuda_device
from ..devices.cuda_driver import CudaLibrary
from ..devices.cuda_install import DRIVER_FILES, cuda_of_cupy, for_cuda, install_command
from ..errors import ConnectionLostError, DistBackendError, LibraryFailure
from ..install import pip_install, with_extra
from .interface import MEMORY_STATS, GpuApi

__all__ = ["NcclLibrary", "load", "unavailable_reason"]

#: The first NCCL version with ``ncclCommInitRankScalable``, by which nccl4py creates
#: communicators.
OLDEST = (2, 23)
#: The first NCCL versions with ``ncclCommShrink``, with ``ncclCommRevoke``, with
#: ``ncclCommSuspend`` and with the float8 dtypes.
_SHRINKS, _REVOKES, _SUSPENDS, _FLOAT8 = (2, 27), (2, 28, 7), (2, 29, 7), (2, 24)

# ncclResult_t of errors for which a peer that died, or aborted, may be the cause.
_SYSTEM_ERROR, _REMOTE_ERROR = 2, 6

# The package that installs NCCL alone; the field is the CUDA version.
_LIBRARY = "nvidia-nccl-cu{}"

# cudaError_t of driver_types.h.
_INSUFFICIENT_DRIVER, _NO_DEVICE = 35, 100

F = TypeVar("F", bound=Callable[..., Any])


def _failure(result: int, text: str) -> DistBackendError:
    """Return the error for `result` of NCCL; `text` is NCCL's."""
    said = f"NCCL reports: {text}"
    if result == _REMOTE_ERROR:
        return ConnectionLostError(said)
    if result == _SYSTEM_ERROR:
        # A failed call of a socket, or of anything else on this host.
        return ConnectionLostError(said, reason=said)
    return LibraryFailure(said)


def _converts_errors(call: F) -> F:
    """Return `call` with each error of NCCL converted by `_failure`."""

    @functools.wraps(call)
    def method(self: NcclLibrary, *arguments: Any, **named: Any) -> Any:
        try:
            return call(self, *arguments, **named)
        except self.error as error:
            raise _failure(error.status, str(error)) from error

    return method  # type: ignore[return-value]


class NcclLibrary:
    """`Nccl` implemented with nccl4py; the protocol documents the methods."""

    def __init__(self) -> None:
        from nccl import core
        from nccl.bindings import nccl as bindings

        self._core, self._calls = core, bindings
        self.error: Any = bindings.NCCLError
        self._in_progress = int(bindings.Result.InProgress)
        library = core.get_version().libnccl
        assert library is not None
        self._version = library.version
        # NCCL keeps the pointers to names in a config, in communicators that are split
        # off as well: a config lives as long as the process.
        self._configs: dict[frozenset[tuple[str, Any]], Any] = {}
        self.can_shrink = self._version.release >= _SHRINKS
        self.can_revoke = self._version.release >= _REVOKES
        # These bindings accept addresses, so a wrapper would only convert errors and
        # cost time in each op: `_call` does that.
        for name in (
            *("broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce"),
            *("send", "recv", "group_start", "group_end"),
        ):
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

    @_converts_errors
    def unique_id(self) -> bytes:
        return bytes(self._core.get_unique_id().as_bytes)

    @_converts_errors
    def init(
        self, size: int, rank: int, unique_id: bytes, options: dict[str, Any]
    ) -> Any:
        key = frozenset(options.items())
        if (config := self._configs.get(key)) is None:
            config = self._calls.Config()
            for name, value in options.items():
                setattr(config, name, value)
            self._configs[key] = config
        made = self._calls.comm_init_rank_scalable(
            size, rank, 1, bytearray(unique_id), config.ptr
        )
        return self._calls.Comm(int(made))

    # `split` and `shrink` return a cell: a non-blocking call returns before the new
    # communicator exists, and NCCL writes its handle into the cell later.

    @_converts_errors
    def split(self, comm: Any, rank: int) -> Any:
        return self._calls.comm_split(comm, 0, rank, 0)

    @_converts_errors
    def shrink(self, comm: Any, excluded: Sequence[int], *, abort: bool) -> Any:
        ranks = list(excluded)
        return self._calls.comm_shrink(comm, ranks, len(ranks), 0, int(abort))

    def float8_lacks(self) -> str:
        if self._version.release[:2] >= _FLOAT8:
            return ""
        return f"NCCL {self._version} is here, {'.'.join(map(str, _FLOAT8))} is needed"

    def suspend_lacks(self) -> str:
        if self._version.release >= _SUSPENDS:
            return ""
        return (
            f"NCCL {self._version} is here, {'.'.join(map(str, _SUSPENDS))} is needed: "
            f"{pip_install('--upgrade', for_cuda(_LIBRARY))}"
        )

    @_converts_errors
    def suspend(self, comm: Any) -> None:
        self._calls.comm_suspend(comm, int(self._core.CommSuspendFlag.MEM))

    @_converts_errors
    def resume(self, comm: Any) -> None:
        self._calls.comm_resume(comm)

    @_converts_errors
    def memory_stats(self, comm: Any) -> dict[str, int]:
        stat = self._calls.CommMemStat
        stats = (
            stat.GpuMemSuspend,
            stat.GpuMemSuspended,
            stat.GpuMemPersist,
            stat.GpuMemTotal,
        )
        return {
            name: int(self._calls.comm_mem_stats(comm, int(one)))
            for name, one in zip(MEMORY_STATS, stats, strict=True)
        }

    @_converts_errors
    def ready(self, comm: Any) -> bool:
        if not comm:
            return False
        result = int(self._calls.comm_get_async_error(comm))
        if result == self._in_progress:
            return False
        if result:
            said = self._core.get_error_string(result)
            raise _failure(result, f"{said}; {self._last_error(comm)}")
        return True

    def _last_error(self, comm: Any) -> str:
        said = self._calls.get_last_error(comm)
        return said.strip() or "NCCL_DEBUG=WARN says more"

    @_converts_errors
    def revoke(self, comm: Any) -> None:
        self._calls.comm_revoke(comm, 0)

    @_converts_errors
    def abort(self, comm: Any) -> None:
        if comm:
            self._calls.comm_abort(comm)

    @_converts_errors
    def finalize(self, comm: Any) -> None:
        self._calls.comm_finalize(comm)

    @_converts_errors
    def destroy(self, comm: Any) -> None:
        self._calls.comm_destroy(comm)

    @_converts_errors
    def premul_sum(self, factor: float, dtype: int, comm: Any) -> int:
        scalar = np.array([factor], self._core.NcclDataType(dtype).numpy_dtype)
        host = int(self._calls.ScalarResidence.HostImmediate)
        # With HostImmediate, NCCL reads the scalar before the call returns.
        return int(
            self._calls.red_op_create_pre_mul_sum(scalar.ctypes.data, dtype, host, comm)
        )

    @_converts_errors
    def free_op(self, op: int, comm: Any) -> None:
        self._calls.red_op_destroy(op, comm)


def _call(library: NcclLibrary, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` with each error of NCCL converted by `_failure`."""
    failure = library.error

    def run(*arguments: Any) -> None:
        try:
            call(*arguments)
        except failure as error:
            raise _failure(error.status, str(error)) from error

    return run


def unavailable_reason() -> str | None:
    """Return why this process cannot use NCCL, and the remedy; else ``None``."""
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
            "its driver; use tcp, the default, for host arrays"
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
    """Return the reason and the remedy for a driver older than the CUDA runtime."""
    supports, remedy = ", or its libcuda.so.1 is missing", "update the driver"
    if version:
        supports = f", it is for CUDA {version // 1000}.{version % 1000 // 10}"
    if cuda_of_cupy() != 12 and (not version or version >= 12000):
        remedy += f", or use CUDA 12: {pip_install(with_extra('cuda12'))}"
    return f"the NVIDIA driver here is too old{supports} ({error}): {remedy}"


def _no_library() -> str | None:
    try:
        from nccl import core
    except (ImportError, OSError, RuntimeError) as error:
        return f"nccl4py cannot be loaded ({error}): {install_command()}"
    library = core.get_version().libnccl
    if library is None:
        return (
            f"libnccl.so.2 is not there: {install_command()}, or that "
            f"alone: {pip_install(for_cuda(_LIBRARY))}"
        )
    if library.version.release[:2] < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        return (
            f"NCCL {library.version} is too old, {wanted} is needed: "
            f"{pip_install('--upgrade', for_cuda(_LIBRARY))}"
        )
    return None


def _load() -> GpuApi:
    reason = unavailable_reason()
    if reason is not None:
        raise DistBackendError(f"the nccl backend cannot be used here: {reason}")
    return GpuApi(NcclLibrary(), CudaLibrary())


_api: GpuApi | None = None


def load() -> GpuApi:
    """Return NCCL and CUDA, loaded at the first call."""
    global _api
    if _api is None:
        _api = _load()
        cuda_device.use_driver(_api.cuda)
    return _api
