"""Staging: arrays of another device on a backend that knows host memory only.

``cuda:gloo`` in a config works this way: what an op reads is copied to host
memory, the op runs there, and what it wrote is copied back before its Work
ends. How to copy is known for CUDA (through cupy, pinned memory); for another
device type it is told by :func:`register_staging`. The object collectives copy
the same way, where a group has no backend for host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .backend import Array, Backend, resolve
from .composite import chain
from .errors import DistBackendError
from .nccl_library import install_command
from .reduce_op import ReduceOp
from .work import OpType, Work

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
    """What `register_staging` was told of a device type."""

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
    """Say how arrays of device type `device` get to host memory and back.

    ``to_host(array)`` returns a new, C-contiguous numpy array with the same
    shape and dtype; ``from_host(host, array)`` copies it back into `array`.
    Both have returned only when the copy is done. ``to_device(host, index)``
    returns a new array like `host` on device `index` (``None``: the current
    one); what is done with it next comes after the copy. It is for the object
    collectives of groups without a backend for host memory.
    """
    _copies[device] = Copies(to_host, from_host, to_device)


def staged_devices() -> list[str]:
    """The device types that `register_staging` was called for."""
    return list(_copies)


def misplaced(device: str, backend: str, devices: Sequence[str]) -> str | None:
    """Why a backend for `devices` cannot serve `device`, not even by staging."""
    if device in devices or "cpu" in devices:
        return None
    right = " or ".join(f"{one}:{backend}" for one in devices)
    return f"{backend} works on {' and '.join(devices)} arrays only: write {right}"


def staging_for(device: str, backend: str) -> Copies:
    """How to stage arrays of `device` for `backend`; `DistBackendError` if none can."""
    reason = misplaced(device, backend, resolve(backend).devices)
    if reason is not None:
        raise DistBackendError(reason)
    copies = copies_of(device)
    if copies is None:
        raise DistBackendError(
            f"backend {backend!r} works on host memory, and nobody has said how to "
            f"copy arrays of device type {device!r} there: register_staging() does"
        )
    return copies


def copies_of(device: str) -> Copies | None:
    """How arrays of `device` are copied; `None` if nobody has said.

    `DistBackendError` for ``'cuda'`` where cupy is not installed.
    """
    if device not in _copies and device == "cuda":
        _copies[device] = _cuda()
    return _copies.get(device)


def _cuda() -> Copies:
    try:
        import cupy
        import cupyx
    except ImportError as error:
        raise DistBackendError(
            "CUDA arrays are copied to host memory and back by cupy, which is not "
            f"installed: {install_command()}"
        ) from error

    def to_host(array: Any) -> Host:
        host = cupyx.empty_pinned(array.shape, array.dtype)
        with array.device:
            array.get(out=host)
        return host

    def from_host(host: Host, array: Any) -> None:
        with array.device:
            array.set(host)
            cupy.cuda.get_current_stream().synchronize()

    def to_device(host: Host, index: int | None) -> Array:
        # The copy is on the current stream: what is issued next comes after it.
        with cupy.cuda.Device(index):
            return cupy.array(host)

    return Copies(to_host, from_host, to_device)


class StagedBackend(Backend):
    """`inner`, a host backend, made to serve arrays of another device type."""

    def __init__(self, inner: Backend, device: str) -> None:
        super().__init__(inner.rank, inner.size)
        self.inner = inner
        self._copies = staging_for(device, inner.name)
        # What a class says of itself, this says of what it wraps.
        self.name = inner.name
        self.reduce_ops = inner.reduce_ops
        inner.on_failure = lambda reason: self.on_failure(reason)

    def check(self, op: OpType, dtype: Any, reduce_op: ReduceOp | None) -> None:
        self.inner.check(op, dtype, reduce_op)

    def refresh(self) -> None:
        self.inner.refresh()

    def abort(self, reason: str) -> None:
        self.inner.abort(reason)

    def shutdown(self) -> None:
        self.inner.shutdown()

    # Host copies of what is read, blanks for what is only written.

    def _in(self, array: Array) -> Host:
        return self._copies.to_host(array)

    def _ins(self, arrays: Sequence[Array]) -> list[Host]:
        return [self._in(array) for array in arrays]

    @staticmethod
    def _blank(array: Array) -> Host:
        return np.empty(array.shape, array.dtype)

    def _back(
        self, kind: OpType, work: Work, hosts: Sequence[Host], arrays: Sequence[Array]
    ) -> Work:
        """A Work that copies `hosts` back to `arrays` when `work` is done."""

        def copy() -> None:
            for host, array in zip(hosts, arrays, strict=True):
                self._copies.from_host(host, array)

        return chain(work, kind, copy)

    def all_reduce(self, tensor: Array, op: ReduceOp) -> Work:
        host = self._in(tensor)
        work = self.inner.all_reduce(host, op)
        return self._back(OpType.ALL_REDUCE, work, [host], [tensor])

    def broadcast(self, tensor: Array, src: int) -> Work:
        host = self._in(tensor)
        work = self.inner.broadcast(host, src)
        written = self.rank != src
        return self._back(OpType.BROADCAST, work, [host] * written, [tensor] * written)

    def reduce(self, tensor: Array, dst: int, op: ReduceOp) -> Work:
        host = self._in(tensor)
        work = self.inner.reduce(host, dst, op)
        written = self.rank == dst
        return self._back(OpType.REDUCE, work, [host] * written, [tensor] * written)

    def all_gather(self, tensor_list: Sequence[Array], tensor: Array) -> Work:
        hosts = [self._blank(array) for array in tensor_list]
        work = self.inner.all_gather(hosts, self._in(tensor))
        return self._back(OpType.ALL_GATHER, work, hosts, tensor_list)

    def all_gather_into_tensor(self, output: Array, tensor: Array) -> Work:
        host = self._blank(output)
        work = self.inner.all_gather_into_tensor(host, self._in(tensor))
        return self._back(OpType.ALL_GATHER_INTO_TENSOR, work, [host], [output])

    def gather(
        self, tensor: Array, gather_list: Sequence[Array] | None, dst: int
    ) -> Work:
        outputs = list(gather_list or ())
        hosts = [self._blank(array) for array in outputs]
        work = self.inner.gather(self._in(tensor), hosts or None, dst)
        return self._back(OpType.GATHER, work, hosts, outputs)

    def scatter(
        self, tensor: Array, scatter_list: Sequence[Array] | None, src: int
    ) -> Work:
        host = self._blank(tensor)
        inputs = None if scatter_list is None else self._ins(scatter_list)
        work = self.inner.scatter(host, inputs, src)
        return self._back(OpType.SCATTER, work, [host], [tensor])

    def reduce_scatter(
        self, output: Array, input_list: Sequence[Array], op: ReduceOp
    ) -> Work:
        host = self._blank(output)
        work = self.inner.reduce_scatter(host, self._ins(input_list), op)
        return self._back(OpType.REDUCE_SCATTER, work, [host], [output])

    def reduce_scatter_tensor(self, output: Array, tensor: Array, op: ReduceOp) -> Work:
        host = self._blank(output)
        work = self.inner.reduce_scatter_tensor(host, self._in(tensor), op)
        return self._back(OpType.REDUCE_SCATTER_TENSOR, work, [host], [output])

    def all_to_all(
        self, output_list: Sequence[Array], input_list: Sequence[Array]
    ) -> Work:
        hosts = [self._blank(array) for array in output_list]
        work = self.inner.all_to_all(hosts, self._ins(input_list))
        return self._back(OpType.ALL_TO_ALL, work, hosts, output_list)

    def all_to_all_single(
        self,
        output: Array,
        tensor: Array,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
    ) -> Work:
        host = self._blank(output)
        work = self.inner.all_to_all_single(
            host, self._in(tensor), output_split_sizes, input_split_sizes
        )
        return self._back(OpType.ALL_TO_ALL_SINGLE, work, [host], [output])

    def barrier(self) -> Work:
        return self.inner.barrier()

    def send(self, tensor: Array, dst: int, tag: int) -> Work:
        return self.inner.send(self._in(tensor), dst, tag)

    def recv(self, tensor: Array, src: int | None, tag: int) -> Work:
        host = self._blank(tensor)
        work = self.inner.recv(host, src, tag)
        return self._back(OpType.RECV, work, [host], [tensor])

    # A fused op makes its own flat copy: of the host copies.

    def all_reduce_coalesced(self, tensors: Sequence[Array], op: ReduceOp) -> Work:
        hosts = self._ins(tensors)
        work = self.inner.all_reduce_coalesced(hosts, op)
        return self._back(OpType.ALL_REDUCE, work, hosts, tensors)

    def all_gather_into_tensor_coalesced(
        self, outputs: Sequence[Array], tensors: Sequence[Array]
    ) -> Work:
        hosts = [self._blank(array) for array in outputs]
        work = self.inner.all_gather_into_tensor_coalesced(hosts, self._ins(tensors))
        return self._back(OpType.ALL_GATHER_INTO_TENSOR, work, hosts, outputs)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Array], tensors: Sequence[Array], op: ReduceOp
    ) -> Work:
        hosts = [self._blank(array) for array in outputs]
        work = self.inner.reduce_scatter_tensor_coalesced(hosts, self._ins(tensors), op)
        return self._back(OpType.REDUCE_SCATTER_TENSOR, work, hosts, outputs)
