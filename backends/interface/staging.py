"""Staging: arrays of another device type on a backend for host memory.

``cuda:tcp`` in a config works this way: what an op reads is copied to host
memory, the op runs there, and what it wrote is copied back before its Work
ends. How to copy is known for CUDA (through cupy, pinned memory); for another
device type :func:`register_staging` defines it. The object collectives copy
the same way, if a group has no backend for host memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..devices.cuda_context import cuda_contexts
from ..devices.cuda_install import install_command
from ..errors import DistBackendError
from ..work.composite import chain
from ..work.op_type import Argument, OpType
from ..work.reduce_op import ReduceOp
from ..work.work import Work
from .base import Array, Backend
from .registry import resolve

__all__ = [
    "StagedBackend",
    "copies_of",
    "misplaced",
    "register_staging",
    "staged_devices",
    "staging_for",
]

Host = Any


@dataclass(frozen=True)
class Copies:
    """How arrays of a device type are copied: see `register_staging`."""

    to_host: Callable[[Array], Host]
    from_host: Callable[[Host, Array], None]
    to_device: Callable[[Host, int | None], Array] | None = None


_copies: dict[str, Copies] = {}


def register_staging(
    device: str,
    to_host: Callable[[Array], Host],
    from_host: Callable[[Host, Array], None],
    to_device: Callable[[Host, int | None], Array] | None = None,
) -> None:
    """Define how arrays of device type `device` are copied to host memory and back.

    The copies let a backend for host memory serve the device type: ``"metal:tcp"``.
    For CUDA they are there.

    ``torch.distributed`` has no such function.

    Parameters
    ----------
    device : str
        The device type.
    to_host : callable
        ``to_host(array)`` returns a new, C-contiguous numpy array with the same shape
        and dtype, when the copy is done.
    from_host : callable
        ``from_host(host, array)`` copies it back into `array`, and returns when the
        copy is done.
    to_device : callable, optional
        ``to_device(host, index)`` returns a new array like `host` on device `index`
        (``None``: the current one), on whose current stream later ops follow the copy.
        It is for the object collectives of groups without a backend for host memory.

    Examples
    --------
    >>> dist.register_staging("oneapi", lambda a: a.to_host(), lambda h, a: a.set(h))
    >>> dist.BackendConfig("cpu:tcp,oneapi:tcp")
    BackendConfig('cpu:tcp,oneapi:tcp')
    """
    _copies[device] = Copies(to_host, from_host, to_device)


def staged_devices() -> list[str]:
    """Return the device types that `register_staging` was called for."""
    return list(_copies)


def misplaced(device: str, backend: str, devices: Sequence[str]) -> str | None:
    """Return why a backend for `devices` cannot serve `device`; ``None`` if it can."""
    if device in devices or "cpu" in devices:
        return None
    right = " or ".join(f"{one}:{backend}" for one in devices)
    return f"{backend} works on {' and '.join(devices)} arrays only: write {right}"


def staging_for(device: str, backend: str) -> Copies:
    """Return how arrays of `device` are staged for `backend`."""
    reason = misplaced(device, backend, resolve(backend).devices)
    if reason is not None:
        raise DistBackendError(reason)
    copies = copies_of(device)
    if copies is None:
        raise DistBackendError(
            f"backend {backend!r} works on host memory, and no function that copies "
            f"arrays of device type {device!r} is registered: call register_staging()"
        )
    return copies


def copies_of(device: str) -> Copies | None:
    """Return how arrays of `device` are copied; ``None`` if that is not defined."""
    if device not in _copies and device == "cuda":
        _copies[device] = _cuda()
    return _copies.get(device)


def _cuda() -> Copies:
    try:
        import cupy
        import cupyx

        on_device = cuda_contexts().device
    except ImportError as error:
        raise DistBackendError(
            "CUDA arrays are copied to host memory and back by cupy and cuda-bindings; "
            f"{error.name} is not installed: {install_command()}"
        ) from error

    # The copies run on threads that never chose a device, too. cupy's own
    # ``with array.device`` would create a context on device 0 at its end there.

    def to_host(array: Any) -> Host:
        with on_device(array.device.id):
            host = cupyx.empty_pinned(array.shape, array.dtype)
            array.get(out=host)
        return host

    def from_host(host: Host, array: Any) -> None:
        with on_device(array.device.id):
            array.set(host)
            cupy.cuda.get_current_stream().synchronize()

    def to_device(host: Host, index: int | None) -> Array:
        # The copy is on the current stream, ahead of what is issued next.
        with contextlib.nullcontext() if index is None else on_device(index):
            return cupy.array(host)

    return Copies(to_host, from_host, to_device)


class StagedBackend(Backend):
    """`inner`, a host backend, made to serve arrays of another device type."""

    def __init__(self, inner: Backend, device: str) -> None:
        super().__init__(inner.rank, inner.size)
        self.inner = inner
        self._copies = staging_for(device, inner.name)
        # The attributes that the wrapped backend has.
        self.name = inner.name
        self.reduce_ops = inner.reduce_ops
        self.place, self.global_ranks = inner.place, inner.global_ranks
        self.lingers, self.buffers_messages = inner.lingers, inner.buffers_messages
        inner.on_failure = lambda reason: self.on_failure(reason)

    def check(self, op: OpType, dtype: Any, reduce_op: ReduceOp | None) -> Any:
        return self.inner.check(op, dtype, reduce_op)

    def check_message(self, op: OpType, peer: int | None, tag: int) -> None:
        self.inner.check_message(op, peer, tag)

    def refresh(self) -> None:
        self.inner.refresh()

    def transports(self) -> Mapping[int, tuple[str, ...]]:
        return self.inner.transports()

    def abort(self, reason: str) -> None:
        self.inner.abort(reason)

    def shutdown(self) -> None:
        self.inner.shutdown()

    def _hosts(self, value: Any, copied: bool, pairs: list[tuple[Host, Array]]) -> Any:
        """Return host arrays for `value`, an array or lists of arrays, in its shape."""
        if isinstance(value, (list, tuple)):
            return [self._hosts(each, copied, pairs) for each in value]
        host = (
            self._copies.to_host(value)
            if copied
            else np.empty(value.shape, value.dtype)
        )
        pairs.append((host, value))
        return host

    def _stage(self, op: OpType, method: str, args: Sequence[Any]) -> Work:
        """Call `method` of the inner backend on host memory."""
        staged = list(args)
        written: list[tuple[Host, Array]] = []
        for place, argument in enumerate(op.spec.arguments or ()):
            value = args[place]
            if value is None:
                continue
            # The root is the first argument behind the array.
            at_root = argument in _ROOTED and args[place + 1] == self.rank
            reads = argument in _READ or (argument is Argument.FROM_ROOT and at_root)
            writes = argument in _WRITTEN or (
                argument in _ROOTED and at_root is (argument is Argument.TO_ROOT)
            )
            pairs: list[tuple[Host, Array]] = []
            staged[place] = self._hosts(value, reads, pairs)
            if writes:
                written += pairs
        work: Work = getattr(self.inner, method)(*staged)
        if not written:
            return work

        def copy_back() -> None:
            for host, array in written:
                self._copies.from_host(host, array)

        return chain(work, op, copy_back)


_ROOTED = (Argument.FROM_ROOT, Argument.TO_ROOT)
_READ = (Argument.READ, Argument.READ_LIST, Argument.UPDATED, Argument.TO_ROOT)
_WRITTEN = (Argument.WRITTEN, Argument.WRITTEN_LIST, Argument.UPDATED)


def _staged(op: OpType, name: str) -> Callable[..., Work]:
    def method(self: StagedBackend, *args: Any) -> Work:
        return self._stage(op, name, args)

    method.__name__ = name
    method.__qualname__ = f"StagedBackend.{name}"
    return method


def _add_methods() -> None:
    for op in OpType:
        if op.spec.arguments is not None:
            setattr(StagedBackend, op.value, _staged(op, op.value))
        if op.spec.fused:
            # Its arguments are lists of what the op itself takes.
            name = f"{op.value}_coalesced"
            setattr(StagedBackend, name, _staged(op, name))


_add_methods()
