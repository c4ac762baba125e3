"""The calls that issue an op to NCCL, built from its arrays."""

from __future__ import annotations

from typing import Any

from ..interface.base import Array
from .dtypes import Reduction, transfer_dtype
from .interface import GpuApi
from .work import Call

__all__ = ["Calls", "no_call"]


class Calls:
    """Builds calls: addresses, counts and dtypes are read when the op is issued."""

    def __init__(self, api: GpuApi) -> None:
        self._nccl, self._address = api.nccl, api.cuda.address

    # -- reductions ----------------------------------------------------------------

    def all_reduce(self, tensor: Array, op: Reduction) -> Call:
        """``ncclAllReduce``, in place."""
        at = self._address(tensor)
        return self._reducing("all_reduce", tensor, op, at, at)

    def reduce(self, source: Array, target: int, root: int, op: Reduction) -> Call:
        """``ncclReduce`` to the address `target` on `root`."""
        at = self._address(source)
        return self._reducing("reduce", source, op, at, target, root)

    def reduce_scatter(self, output: Array, tensor: Array, op: Reduction) -> Call:
        """``ncclReduceScatter``."""
        source, target = self._address(tensor), self._address(output)
        return self._reducing("reduce_scatter", output, op, source, target)

    def _reducing(
        self,
        name: str,
        counted: Array,
        op: Reduction,
        source: int,
        target: int,
        *root: int,
    ) -> Call:
        """Call NCCL's `name` with the size and dtype of `counted`."""
        nccl, factor = self._nccl, op.factor
        count, dtype = counted.size * op.dtype.per_element, op.dtype.dtype
        function = getattr(nccl, name)

        def call(comm: Any, stream: int) -> None:
            number = op.op
            if factor is not None:
                number = nccl.premul_sum(factor, dtype, comm)
            function(source, target, count, dtype, number, *root, comm, stream)
            if factor is not None:
                nccl.free_op(number, comm)

        return call

    # -- moves -----------------------------------------------------------------------

    def broadcast(self, source: int, target: Array, root: int) -> Call:
        """``ncclBroadcast`` from the address `source` on `root`."""
        at, (count, dtype) = self._address(target), _elements(target)
        nccl = self._nccl

        def call(comm: Any, stream: int) -> None:
            nccl.broadcast(source, at, count, dtype, root, comm, stream)

        return call

    def all_gather(self, output: Array, tensor: Array) -> Call:
        """``ncclAllGather``."""
        source, target = self._address(tensor), self._address(output)
        nccl, (count, dtype) = self._nccl, _elements(tensor)

        def call(comm: Any, stream: int) -> None:
            nccl.all_gather(source, target, count, dtype, comm, stream)

        return call

    def send(self, tensor: Array, peer: int) -> Call:
        """``ncclSend``."""
        at, (count, dtype) = self._address(tensor), _elements(tensor)
        nccl = self._nccl

        def call(comm: Any, stream: int) -> None:
            nccl.send(at, count, dtype, peer, comm, stream)

        return call

    def recv(self, tensor: Array, peer: int) -> Call:
        """``ncclRecv``."""
        at, (count, dtype) = self._address(tensor), _elements(tensor)
        nccl = self._nccl

        def call(comm: Any, stream: int) -> None:
            nccl.recv(at, count, dtype, peer, comm, stream)

        return call


def _elements(tensor: Array) -> tuple[int, int]:
    """Return how many elements of which dtype a move of `tensor` has."""
    kind = transfer_dtype(tensor.dtype)
    return tensor.size * kind.per_element, kind.dtype


def no_call(comm: Any, stream: int) -> None:
    """Do nothing: an op that has nothing to move on this rank."""
