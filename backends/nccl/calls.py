"""The calls of NCCL that an op is made of, built from the op's arrays.

A part without an element has no call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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

    def reduce(self, tensor: Array, dst: int, op: Reduction) -> Call:
        """``ncclReduce``, in place on rank `dst`."""
        at = self._address(tensor)
        return self._reducing("reduce", tensor, op, at, at, dst)

    def reduce_scatter(
        self, output: Array, input_list: Sequence[Array], op: Reduction
    ) -> list[Call]:
        """One ``ncclReduce`` for each part: part `r` is reduced to rank `r`."""
        target = self._address(output)
        return [
            self._reducing("reduce", part, op, self._address(part), target, root)
            for root, part in enumerate(input_list)
            if part.size
        ]

    def reduce_scatter_tensor(
        self, output: Array, tensor: Array, op: Reduction
    ) -> Call:
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
        function = partial(getattr(nccl, name), source, target, count, dtype)
        if factor is None:
            return partial(function, op.op, *root)

        def call(comm: Any, stream: int) -> None:
            number = nccl.premul_sum(factor, dtype, comm)
            function(number, *root, comm, stream)
            nccl.free_op(number, comm)

        return call

    # -- moves -----------------------------------------------------------------------

    def broadcast(self, tensor: Array, src: int) -> Call:
        """``ncclBroadcast``, in place."""
        return self._broadcast(self._address(tensor), tensor, src)

    def all_gather(self, tensor_list: Sequence[Array], tensor: Array) -> list[Call]:
        """One ``ncclBroadcast`` from each rank.

        ``ncclAllGather`` would need one contiguous output, and a copy from it.
        """
        source = self._address(tensor)
        return [
            self._broadcast(source, output, root)
            for root, output in enumerate(tensor_list)
            if output.size
        ]

    def _broadcast(self, source: int, target: Array, root: int) -> Call:
        """``ncclBroadcast`` from the address `source` on `root`."""
        at = self._address(target)
        return partial(self._nccl.broadcast, source, at, *_elements(target), root)

    def all_gather_into_tensor(self, output: Array, tensor: Array) -> Call:
        source, target = self._address(tensor), self._address(output)
        return partial(self._nccl.all_gather, source, target, *_elements(tensor))

    def gather(self, tensor: Array, outputs: Sequence[Array], dst: int) -> list[Call]:
        sends = [self.send(tensor, dst)] if tensor.size else []
        return sends + self._recvs(outputs)

    def scatter(self, tensor: Array, inputs: Sequence[Array], src: int) -> list[Call]:
        recvs = [self.recv(tensor, src)] if tensor.size else []
        return self._sends(inputs) + recvs

    def all_to_all(
        self, outputs: Sequence[Array], inputs: Sequence[Array]
    ) -> list[Call]:
        return self._sends(inputs) + self._recvs(outputs)

    def _sends(self, parts: Sequence[Array]) -> list[Call]:
        return [self.send(part, peer) for peer, part in enumerate(parts) if part.size]

    def _recvs(self, parts: Sequence[Array]) -> list[Call]:
        return [self.recv(part, peer) for peer, part in enumerate(parts) if part.size]

    def send(self, tensor: Array, peer: int) -> Call:
        return partial(self._nccl.send, self._address(tensor), *_elements(tensor), peer)

    def recv(self, tensor: Array, peer: int) -> Call:
        return partial(self._nccl.recv, self._address(tensor), *_elements(tensor), peer)


def _elements(tensor: Array) -> tuple[int, int]:
    """Return how many elements of which dtype a move of `tensor` has."""
    kind = transfer_dtype(tensor.dtype)
    return tensor.size * kind.per_element, kind.dtype


def no_call(comm: Any, stream: int) -> None:
    """Do nothing: an op that has nothing to move on this rank."""
