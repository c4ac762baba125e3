"""The UCC backend: UCC's own collectives, where a library of it is installed.

Before a collective the ranks compare what they are about to do (`agreement`), because
UCC itself ends with success and wrong data where they differ. UCC cancels nothing
either: an abort abandons the group's context as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..interface.base import Array, Backend
from ..messaging.algorithms import Flat
from ..messaging.backend import MessagingBackend
from ..messaging.queue import MessageQueue
from ..messaging.work import MessageWork
from ..stores.base import Store
from ..work.op_type import OpType
from ..work.reduce_op import ReduceOp
from ..work.work import Work
from . import calls
from .agreement import Agreement, Call, describe
from .connector import UCCConnector
from .library import load, unavailable_reason
from .transport import Collective, UCCTransport

__all__ = ["UCCBackend"]

#: The environment variable that switches the comparison off: ``0``.
CHECK = "RANKSCOPE_UCC_CHECK"


class _CollectiveQueue(MessageQueue):
    """A queue whose schedules have collectives of UCC beside messages."""

    def _post(self, work: MessageWork, stage: list[Any]) -> None:
        if not isinstance(stage[0], Collective):
            super()._post(work, stage)
            return
        transport = self._transport
        assert isinstance(transport, UCCTransport)
        self._posted += 1
        work.requests.extend((transport.start(one), -1, _NOTHING) for one in stage)


_NOTHING = np.empty(0, np.uint8)


class UCCBackend(MessagingBackend):
    """One group over UCC, on this rank.

    A group of one rank needs no UCC: the algorithms of `MessagingBackend` send nothing
    there.
    """

    name = "ucc"
    interface_version = 1
    reduce_ops = calls.REDUCE_OPS

    def __init__(self, store: Store, rank: int, size: int) -> None:
        compares = os.environ.get(CHECK, "1") != "0"
        connector = UCCConnector(compares, store, rank, size, self._name)
        super().__init__(rank, size, connector)
        self._queue = _CollectiveQueue(self._failed, self._members)
        self._agreement = Agreement(rank, size, self._name) if compares else None

    # -- checks --------------------------------------------------------------

    def check(self, op: OpType, dtype: Any, reduce_op: ReduceOp | None) -> Any:
        """Return what UCC calls the reduction; refuse what it does not have."""
        if reduce_op is None:
            return None
        found = calls.find(dtype, reduce_op)
        if found is not None:
            return found
        Backend.check(self, op, dtype, reduce_op)
        raise TypeError(
            f"{op.value}: the ucc backend has no ReduceOp.{reduce_op.name} of arrays "
            f"of {dtype.name}; convert them (astype), choose another reduction, or "
            "another backend: mpi and ucx reduce every number of numpy"
        )

    def check_message(self, op: OpType, peer: int | None, tag: int) -> None:
        """Raise `ValueError` for a tag, or a source, that the backend does not have."""
        if peer is None:
            raise ValueError(
                f"{op.value} in {self.place}: UCC receives from no rank but a named "
                "one; give src="
            )
        super().check_message(op, peer, tag)

    # -- collectives -----------------------------------------------------------

    def _run(
        self,
        call: Call,
        collective: Collective | None,
        sent: Sequence[int] = (),
        received: Sequence[int] = (),
    ) -> Iterator[list[Any]]:
        """Compare `call` with those of the other ranks, and then do it.

        `sent` and `received`, elements by rank, are compared where ranks may differ.
        """
        agreement = self._agreement
        if agreement is not None:
            balance = agreement.balance(sent, received) if sent or received else 0
            yield [agreement.exchange(call, balance)]
            if not agreement.holds(call):
                detail = ""
                if sent or received:
                    detail = f", to the ranks {[*sent]}, from them {[*received]}"
                yield [agreement.exchange_texts(call, detail)]
                raise agreement.verdict()
        if collective is not None:
            yield [collective]

    def all_reduce(self, tensor: Array, op: Any) -> Work:
        """Reduce in place, as UCC's ``allreduce``."""
        if self.size == 1:
            return super().all_reduce(tensor, op)
        flat = tensor.reshape(-1)
        call = describe("all_reduce", tensor.dtype, (flat.size,), None, op.name)
        schedule = self._run(call, calls.all_reduce(flat, op))
        return self._submit(OpType.ALL_REDUCE, schedule, tensor)

    def broadcast(self, tensor: Array, src: int) -> Work:
        """Copy `tensor` of rank `src` to every rank."""
        if self.size == 1:
            return super().broadcast(tensor, src)
        flat = tensor.reshape(-1)
        call = describe("broadcast", tensor.dtype, (flat.size,), src)
        return self._submit(
            OpType.BROADCAST, self._run(call, calls.broadcast(flat, src)), tensor
        )

    def reduce(self, tensor: Array, dst: int, op: Any) -> Work:
        """Reduce into `tensor` of rank `dst`."""
        if self.size == 1:
            return super().reduce(tensor, dst, op)
        flat = tensor.reshape(-1)
        call = describe("reduce", tensor.dtype, (flat.size,), dst, op.name)
        collective = calls.reduce(flat, dst, self.rank == dst, op)
        return self._submit(OpType.REDUCE, self._run(call, collective), tensor)

    def all_gather(self, tensor_list: Sequence[Array], tensor: Array) -> Work:
        """Send `tensor` to every rank; receive into the arrays of the list."""
        if self.size == 1:
            return super().all_gather(tensor_list, tensor)
        outputs = [array.reshape(-1) for array in tensor_list]
        call = describe("all_gather", tensor.dtype, _sizes(outputs))
        collective = calls.all_gather(outputs, tensor.reshape(-1))
        return self._submit(OpType.ALL_GATHER, self._run(call, collective), tensor_list)

    def all_gather_into_tensor(self, output: Array, tensor: Array) -> Work:
        """Gather parts of one size into one array."""
        if self.size == 1:
            return super().all_gather_into_tensor(output, tensor)
        flat = tensor.reshape(-1)
        call = describe("all_gather_into_tensor", tensor.dtype, (flat.size,))
        collective = calls.all_gather_into_tensor(output.reshape(-1), flat)
        return self._submit(
            OpType.ALL_GATHER_INTO_TENSOR, self._run(call, collective), output
        )

    def gather(
        self, tensor: Array, gather_list: Sequence[Array] | None, dst: int
    ) -> Work:
        """Send `tensor` to `dst`, which receives into the arrays of its list."""
        if self.size == 1:
            return super().gather(tensor, gather_list, dst)
        outputs = None
        if self.rank == dst and gather_list:
            outputs = [array.reshape(-1) for array in gather_list]
        flat = tensor.reshape(-1)
        schedule = self._run(
            describe("gather", tensor.dtype, (), dst),
            calls.gather(outputs, flat, dst),
            sent=[flat.size * (peer == dst) for peer in range(self.size)],
            received=_sizes(outputs or ()),
        )
        return self._submit(OpType.GATHER, schedule, gather_list)

    def scatter(
        self, tensor: Array, scatter_list: Sequence[Array] | None, src: int
    ) -> Work:
        """Send the arrays of the list of `src`, one to each rank."""
        if self.size == 1:
            return super().scatter(tensor, scatter_list, src)
        inputs = None
        if self.rank == src and scatter_list:
            inputs = [array.reshape(-1) for array in scatter_list]
        flat = tensor.reshape(-1)
        schedule = self._run(
            describe("scatter", tensor.dtype, (), src),
            calls.scatter(flat, inputs, src),
            sent=_sizes(inputs or ()),
            received=[flat.size * (peer == src) for peer in range(self.size)],
        )
        return self._submit(OpType.SCATTER, schedule, tensor)

    def reduce_scatter(
        self, output: Array, input_list: Sequence[Array], op: Any
    ) -> Work:
        """Reduce each part and leave it on its rank; parts may differ in size."""
        if self.size == 1:
            return super().reduce_scatter(output, input_list, op)
        inputs = [array.reshape(-1) for array in input_list]
        counts = _sizes(inputs)
        call = describe("reduce_scatter", output.dtype, counts, None, op.name)
        collective = calls.reduce_scatter(
            output.reshape(-1), _in_one_piece(inputs), counts, op
        )
        return self._submit(OpType.REDUCE_SCATTER, self._run(call, collective), output)

    def all_to_all(
        self, output_list: Sequence[Array], input_list: Sequence[Array]
    ) -> Work:
        """Send a part to each rank and receive one; parts may differ in size."""
        if self.size == 1:
            return super().all_to_all(output_list, input_list)
        outputs = [array.reshape(-1) for array in output_list]
        inputs = [array.reshape(-1) for array in input_list]
        schedule = self._run(
            describe("all_to_all", inputs[0].dtype),
            calls.all_to_all(outputs, inputs),
            sent=_sizes(inputs),
            received=_sizes(outputs),
        )
        return self._submit(OpType.ALL_TO_ALL, schedule, output_list)

    def barrier(self) -> Work:
        """End when every rank has entered: the comparison is a barrier by itself."""
        if self.size == 1:
            return super().barrier()
        collective = calls.barrier() if self._agreement is None else None
        return self._submit(OpType.BARRIER, self._run(describe("barrier"), collective))


def _sizes(arrays: Sequence[Flat]) -> tuple[int, ...]:
    return tuple(array.size for array in arrays)


def _in_one_piece(parts: Sequence[Flat]) -> Flat:
    """Return an array of the elements of `parts`: a copy, unless they lie in a row."""
    end = parts[0].ctypes.data
    base = parts[0].base
    for part in parts:
        if part.ctypes.data != end or part.base is not base or base is None:
            return np.concatenate(parts)
        end += part.nbytes
    total = sum(part.size for part in parts)
    return np.lib.stride_tricks.as_strided(parts[0], (total,), writeable=False)


def _create(store: Store, rank: int, size: int, timeout: float) -> UCCBackend:
    load()  # its error is that of the group's first use, and not of a thread
    return UCCBackend(store, rank, size)


Backend.register_backend("ucc", _create, devices="cpu", unavailable=unavailable_reason)
