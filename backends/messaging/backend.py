"""MessagingBackend: the collectives over the messages of a transport."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import DistError
from ..interface.base import Array, Backend
from ..rank_sets import name_ranks
from ..work.composite import completed_work
from ..work.op_type import OpType
from ..work.reduce_op import ReduceOp
from ..work.work import Work
from . import algorithms, choice
from .algorithms import RECV, SEND, Flat, Schedule, Ufunc
from .queue import MessageQueue, MessageWork
from .signature import FIRST, KINDS, Members, Signer
from .transport import ANY_SOURCE, Connector

__all__ = ["MessagingBackend", "ufunc_of"]

# The tags of users' messages lie below, one for each kind of collective above:
# a rank in another collective than its peer waits, and mixes nothing up. MPI
# guarantees tags up to 32767. The dispatcher's own messages are above both.
_USER_TAGS = FIRST
_PRIVATE_TAGS = 32500
_TAGS = {kind: FIRST + place for place, kind in enumerate(KINDS)}

# The reductions are numpy's and not the library's: they are as fast, exist for every
# dtype of numpy (float16, bool, complex), and treat NaN alike on every rank.
#
# numpy adds float16 and bfloat16 in float32 and rounds: of two ranks the sum is rounded
# once, of 2**k ranks k times in a small array. To keep float32 from step to step would
# send twice the bytes, and convert each array there and back: 512 Ki elements of
# float16 take 1.2 ms and 2.9 ms (numpy 2.5, one core), where adding them takes 4.8 ms
# and two ranks add half of them each, four ranks three quarters.
_SUMS: dict[ReduceOp, Ufunc] = {ReduceOp.SUM: np.add, ReduceOp.PRODUCT: np.multiply}
_ORDERED: dict[ReduceOp, Ufunc] = {
    **_SUMS,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}
_ALL: dict[ReduceOp, Ufunc] = {
    **_ORDERED,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
# By the dtype's kind: signed and unsigned integers, bool, float, bfloat16 (V), complex.
_UFUNCS = {**dict.fromkeys("iub", _ALL), **dict.fromkeys("fV", _ORDERED), "c": _SUMS}
_NONE: dict[ReduceOp, Ufunc] = {}


def ufunc_of(
    backend: Backend, op: OpType, dtype: Any, reduce_op: ReduceOp | None
) -> Ufunc | None:
    """Return what reduces; raise as `Backend.check` where `dtype` does not have it."""
    if reduce_op is None:
        return None
    ufunc = _UFUNCS.get(dtype.kind, _NONE).get(reduce_op)
    if ufunc is not None:
        return ufunc
    Backend.check(backend, op, dtype, reduce_op)
    raise TypeError(
        f"{op.value} in {backend.place}: "
        f"ReduceOp.{reduce_op.name} is not defined for arrays of "
        f"{dtype.name}; convert them (astype) or choose another reduction"
    )


class MessagingBackend(Backend):
    """One group over a library of tagged messages, on this rank.

    From the first op on a thread makes the transport, which needs all ranks of the
    group; ops issued before wait for it. A group of one needs none. The transport
    carries signatures of `bits` bits, by which ranks that do not call collectives alike
    get an error; 0: none.
    """

    reduce_ops = frozenset(_ALL)
    private_tags = range(_PRIVATE_TAGS, _PRIVATE_TAGS + 256)

    def __init__(
        self, rank: int, size: int, connector: Connector, *, bits: int = 0
    ) -> None:
        super().__init__(rank, size)
        self._queue = MessageQueue(self._failed, self._members)
        self._connector = connector
        self._signer = Signer(bits) if bits else None
        self._all_reduces = choice.fitting(choice.ALL_REDUCE, size)
        self._broadcasts = choice.fitting(choice.BROADCAST, size)
        self._reduce_scatters = choice.fitting(choice.REDUCE_SCATTER, size)
        self._builder: threading.Thread | None = None
        # Recursive, as a signal handler may abort in the midst of `_connect`.
        self._lock = threading.RLock()
        self._aborted = False
        # Memory for what other ranks send to be reduced here; collectives run
        # one at a time, so one block serves them all.
        self._scratch_memory = self._scratch_array = np.empty(0, np.uint8)

    def _name(self, ranks: Iterable[int]) -> str:
        """Return what messages call these ranks of the group: by global rank."""
        return name_ranks(self.global_ranks[rank] for rank in ranks)

    def _members(self) -> Members:
        return Members(self.global_ranks[self.rank], self.global_ranks)

    # -- the transport -----------------------------------------------------

    def _connect(self) -> None:
        """Start to make the transport, unless that has started."""
        with self._lock:
            if self._builder is not None or self._aborted:
                return
            self._builder = threading.Thread(
                target=self._build, name=f"rankscope-{self.name}-build", daemon=True
            )
            if self.size > 1:
                self._builder.start()
        if self.size == 1:
            self._queue.open(None)

    def prepare(self, arrays: Sequence[Array] = (), index: int | None = None) -> None:
        self._connect()

    def _build(self) -> None:
        try:
            transport = self._connector.connect()
        except DistError as error:
            self._failed(error)
        except Exception as error:  # noqa: BLE001 - a fault of ours: the ops must end
            self._failed(f"{self.name} could not connect the group: {error}")
        else:
            if transport is not None:
                self._queue.open(transport)

    def _failed(self, reason: str | DistError) -> None:
        if not self._aborted:
            self.on_failure(reason)

    def _submit(
        self,
        kind: OpType,
        schedule: Schedule,
        dtype: Any = None,
        op: Ufunc | None = None,
        root: int = 0,
    ) -> MessageWork:
        tag = _TAGS[kind]
        if self._signer is not None:
            tag |= self._signer.sign(dtype, op, root)
        return self._start(kind, schedule, tag, False)

    def _start(
        self, kind: OpType, schedule: Schedule, tag: int, message: bool
    ) -> MessageWork:
        if self._builder is None:
            self._connect()
        work = MessageWork(self._queue, kind, schedule, tag)
        self._queue.submit(work, message)
        return work

    def _scratch(self, size: int, dtype: Any) -> Flat:
        array = self._scratch_array
        if array.size == size and array.dtype is dtype:
            return array
        nbytes = size * dtype.itemsize
        if self._scratch_memory.size < nbytes:
            self._scratch_memory = np.empty(nbytes, np.uint8)
        self._scratch_array = self._scratch_memory[:nbytes].view(dtype)
        return self._scratch_array

    def _choose(
        self, rows: Sequence[tuple[int, choice.Algorithm]], data: Flat
    ) -> choice.Algorithm:
        """Return the algorithm of the first of `rows` that takes `data`."""
        # Where an array is cut into parts, every rank has one.
        if data.size < self.size:
            return rows[0][1]
        nbytes = data.nbytes
        for limit, algorithm in rows:
            if nbytes <= limit:
                return algorithm
        return rows[-1][1]

    # -- checks --------------------------------------------------------------

    def check(self, op: OpType, dtype: Any, reduce_op: ReduceOp | None) -> Ufunc | None:
        return ufunc_of(self, op, dtype, reduce_op)

    # -- collectives -----------------------------------------------------------

    def all_reduce(self, tensor: Array, op: Ufunc) -> Work:
        if self.size == 1:
            return completed_work(OpType.ALL_REDUCE)
        flat = tensor if tensor.ndim == 1 else tensor.reshape(-1)
        algorithm = self._choose(self._all_reduces, flat)
        schedule = algorithm(self.rank, self.size, flat, op, self._scratch)
        tag = _TAGS[OpType.ALL_REDUCE]
        if self._signer is not None:
            tag |= self._signer.sign(flat.dtype, op)
        return self._start(OpType.ALL_REDUCE, schedule, tag, False)

    def broadcast(self, tensor: Array, src: int) -> Work:
        flat = tensor.reshape(-1)
        algorithm = self._choose(self._broadcasts, flat)
        schedule = algorithm(self.rank, self.size, flat, src)
        return self._submit(OpType.BROADCAST, schedule, flat.dtype, root=src)

    def reduce(self, tensor: Array, dst: int, op: Ufunc) -> Work:
        flat = tensor.reshape(-1)
        schedule = algorithms.reduce(self.rank, self.size, flat, dst, op, self._scratch)
        return self._submit(OpType.REDUCE, schedule, flat.dtype, op, dst)

    def all_gather(self, tensor_list: Sequence[Array], tensor: Array) -> Work:
        outputs = _flat(tensor_list)
        schedule = algorithms.all_gather(
            self.rank, self.size, outputs, tensor.reshape(-1)
        )
        return self._submit(OpType.ALL_GATHER, schedule, tensor.dtype)

    def gather(
        self, tensor: Array, gather_list: Sequence[Array] | None, dst: int
    ) -> Work:
        outputs = _flat(gather_list) if self.rank == dst and gather_list else None
        schedule = algorithms.gather(
            self.rank, self.size, outputs, tensor.reshape(-1), dst
        )
        return self._submit(OpType.GATHER, schedule, tensor.dtype, root=dst)

    def scatter(
        self, tensor: Array, scatter_list: Sequence[Array] | None, src: int
    ) -> Work:
        inputs = _flat(scatter_list) if self.rank == src and scatter_list else None
        schedule = algorithms.scatter(
            self.rank, self.size, tensor.reshape(-1), inputs, src
        )
        return self._submit(OpType.SCATTER, schedule, tensor.dtype, root=src)

    def reduce_scatter(
        self, output: Array, input_list: Sequence[Array], op: Ufunc
    ) -> Work:
        inputs = _flat(input_list)
        largest = max(inputs, key=lambda part: part.nbytes)
        algorithm = self._choose(self._reduce_scatters, largest)
        flat = output.reshape(-1)
        schedule = algorithm(self.rank, self.size, flat, inputs, op, self._scratch)
        return self._submit(OpType.REDUCE_SCATTER, schedule, output.dtype, op)

    def all_to_all(
        self, output_list: Sequence[Array], input_list: Sequence[Array]
    ) -> Work:
        outputs, inputs = _flat(output_list), _flat(input_list)
        schedule = algorithms.all_to_all(self.rank, self.size, outputs, inputs)
        return self._submit(OpType.ALL_TO_ALL, schedule, output_list[0].dtype)

    def barrier(self) -> Work:
        schedule = algorithms.barrier(self.rank, self.size)
        return self._submit(OpType.BARRIER, schedule)

    # -- messages ----------------------------------------------------------------

    def check_message(self, op: OpType, peer: int | None, tag: int) -> None:
        if not 0 <= tag < _USER_TAGS:
            raise ValueError(
                f"{op.value} in {self.place}: tag={tag}; the {self.name} backend has "
                f"tags 0 to {_USER_TAGS - 1}"
            )

    def send(self, tensor: Array, dst: int, tag: int) -> Work:
        """Send at once, without waiting for earlier collectives."""
        flat = tensor.reshape(-1)
        schedule: Schedule = iter([[(SEND, dst, flat)]])
        return self._start(OpType.SEND, schedule, tag, True)

    def recv(self, tensor: Array, src: int | None, tag: int) -> Work:
        """Receive at once, without waiting for earlier collectives."""
        flat = tensor.reshape(-1)
        source = ANY_SOURCE if src is None else src
        schedule: Schedule = iter([[(RECV, source, flat)]])
        return self._start(OpType.RECV, schedule, tag, True)

    # -- end of life ---------------------------------------------------------------

    def refresh(self) -> None:
        self._queue.advance()

    def abort(self, reason: str) -> None:
        """Abandon the ops in flight; the transport is never used again."""
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            building = self._builder is not None and not self._queue.opened.is_set()
        self._queue.abandon()
        if building:
            self._connector.cancel()

    def shutdown(self) -> None:
        if self._queue.opened.is_set() and not self._aborted:
            self._queue.close()
            return
        self.abort("the group was destroyed")


def _flat(arrays: Sequence[Array]) -> list[Flat]:
    return [array.reshape(-1) for array in arrays]
