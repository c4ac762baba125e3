"""The gloo backend: the collectives of gloo, in a side process per rank and group.

What the Python bindings of gloo lack goes over the messages of the host engine
(`TCPBackend`): sends and receives (the binding serves one at a time, without an end but
the process's), bitwise reductions, dtypes that gloo does not have, forms whose arrays
may differ in size between ranks, and MIN and MAX of floats, whose NaN gloo may drop.
So does reduce_scatter: gloo's has no tag, and ends the process where ranks disagree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..errors import DistBackendError, DistError
from ..interface.base import Array, Backend
from ..messaging.algorithms import Flat, Ufunc
from ..messaging.backend import ufunc_of
from ..stores.base import Store
from ..stores.prefix import PrefixStore
from ..tcp.backend import TCPBackend
from ..work.op_type import OpType
from ..work.reduce_op import ReduceOp
from ..work.work import Work
from .library import chosen, has_options, unavailable
from .side_process import MEMORY_BYTES, SideProcess

__all__ = ["GlooBackend", "Reduction"]

# The dtypes of gloo, by numpy's names. Its float16 is left out: it is slow, and rounds
# after each rank.
_INTEGERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
_REDUCTIONS = {
    **dict.fromkeys(_INTEGERS, ("SUM", "PRODUCT", "MIN", "MAX")),
    # gloo's MIN and MAX of floats ignore some NaN, which numpy's give back.
    **dict.fromkeys(("float32", "float64"), ("SUM", "PRODUCT")),
}

# A second array begins at a multiple of this.
_ALIGNMENT = 64


class Reduction(NamedTuple):
    """A reduction, as numpy has it and, in its own words, gloo."""

    ufunc: Ufunc
    dtype: str
    name: str


class GlooBackend(Backend):
    """gloo for one group on this rank; see `Backend` for the contract."""

    name = "gloo"
    interface_version = 1
    reduce_ops = TCPBackend.reduce_ops
    private_tags = TCPBackend.private_tags
    buffers_messages = TCPBackend.buffers_messages
    # The side process of another rank fails where a call finds a connection closed.
    lingers = True

    def __init__(self, store: Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._messages = TCPBackend(PrefixStore("messages", store), rank, size)
        self._messages.name = self.name  # for its errors
        self._messages.on_failure = self._failed
        # The last collective over messages, which a task of gloo must not overtake.
        self._last: Work | None = None
        self._connecting = False
        self._aborted = False
        # A group of one has no peer, and gloo refuses to make it.
        self._side: SideProcess | None = None
        if size > 1:
            self._side = SideProcess(
                chosen(),
                PrefixStore("gloo", store),
                rank,
                size,
                self._messages._name,
                self._failed,
            )

    def _failed(self, cause: str | DistError) -> None:
        if not self._aborted:
            self.on_failure(cause)

    def prepare(self, arrays: Sequence[Array] = (), index: int | None = None) -> None:
        if self._connecting or self._aborted:
            return
        self._connecting = True
        self._messages.place = self.place
        self._messages.global_ranks = self.global_ranks
        self._messages.prepare()
        if self._side is not None:
            self._side.start()

    # -- the two ways --------------------------------------------------------

    def _over_messages(self, op_type: OpType, *args: Any) -> Work:
        """Issue a collective on the host engine: now, or after the tasks of gloo."""
        self.prepare()
        side, issue = self._side, partial(getattr(self._messages, op_type.value), *args)
        if side is None or side.idle:
            self._last = work = issue()
            return work
        work = Work(op_type)
        return side.submit(work, lambda: _await(issue(), work))

    def _over_gloo(self, op_type: OpType, run: Callable[[SideProcess], None]) -> Work:
        """Run a collective of gloo after those that were issued before."""
        self.prepare()
        side, last, self._last = self._side, self._last, None
        assert side is not None
        work = Work(op_type)

        def task() -> None:
            if last is not None:
                with contextlib.suppress(DistError):  # its own, not this op's
                    last.wait()
            if not side.library.waits:
                _await(self._messages.barrier(), work)
            run(side)

        return side.submit(work, task)

    def _by_gloo(self, op: Reduction) -> bool:
        """Return whether gloo computes what numpy would."""
        return self._side is not None and op.name in _REDUCTIONS.get(op.dtype, ())

    def check(
        self, op: OpType, dtype: Any, reduce_op: ReduceOp | None
    ) -> Reduction | None:
        """Return the reduction in the words of both; refuse what numpy lacks."""
        ufunc = ufunc_of(self, op, dtype, reduce_op)
        if ufunc is None or reduce_op is None:
            return None
        return Reduction(ufunc, dtype.name, reduce_op.name)

    # -- collectives -----------------------------------------------------------

    def all_reduce(self, tensor: Array, op: Reduction) -> Work:
        kind = OpType.ALL_REDUCE
        if not self._by_gloo(op):
            return self._over_messages(kind, tensor, op.ufunc)
        flat = tensor.reshape(-1)

        def run(side: SideProcess) -> None:
            for piece in _pieces(flat, 1):
                side.load(piece)
                side.call("all_reduce", piece.size, op.dtype, op.name)
                side.store(piece)

        return self._over_gloo(kind, run)

    def reduce(self, tensor: Array, dst: int, op: Reduction) -> Work:
        kind = OpType.REDUCE
        if not self._by_gloo(op):
            return self._over_messages(kind, tensor, dst, op.ufunc)
        flat = tensor.reshape(-1)

        def run(side: SideProcess) -> None:
            for piece in _pieces(flat, 2):
                side.load(piece)
                output = _aligned(piece.nbytes)
                side.call("reduce", piece.size, op.dtype, op.name, dst, output)
                if dst == self.rank:
                    side.store(piece, output)

        return self._over_gloo(kind, run)

    def broadcast(self, tensor: Array, src: int) -> Work:
        kind = OpType.BROADCAST
        if self._side is None:
            return self._over_messages(kind, tensor, src)
        flat, moved = tensor.reshape(-1), tensor.dtype.name

        def run(side: SideProcess) -> None:
            for piece in _pieces(flat.view(np.uint8), 1):
                if src == self.rank:
                    side.load(piece)
                side.call("broadcast", piece.size, root=src, moved=moved)
                if src != self.rank:
                    side.store(piece)

        return self._over_gloo(kind, run)

    def all_gather(self, tensor_list: Sequence[Array], tensor: Array) -> Work:
        kind = OpType.ALL_GATHER
        if self._side is None or any(one.size != tensor.size for one in tensor_list):
            return self._over_messages(kind, tensor_list, tensor)
        shares, moved = self.size + 1, tensor.dtype.name
        outputs = [one.reshape(-1).view(np.uint8) for one in tensor_list]
        flat = tensor.reshape(-1).view(np.uint8)

        def run(side: SideProcess) -> None:
            targets = [_pieces(output, shares) for output in outputs]
            for piece, *parts in zip(_pieces(flat, shares), *targets, strict=True):
                side.load(piece)
                start = _aligned(piece.size)
                side.call("all_gather", piece.size, output=start, moved=moved)
                for rank, part in enumerate(parts):
                    side.store(part, start + rank * piece.size)

        return self._over_gloo(kind, run)

    def barrier(self) -> Work:
        if self._side is None:
            return self._over_messages(OpType.BARRIER)
        return self._over_gloo(OpType.BARRIER, lambda side: side.call("barrier"))

    def gather(
        self, tensor: Array, gather_list: Sequence[Array] | None, dst: int
    ) -> Work:
        return self._over_messages(OpType.GATHER, tensor, gather_list, dst)

    def scatter(
        self, tensor: Array, scatter_list: Sequence[Array] | None, src: int
    ) -> Work:
        return self._over_messages(OpType.SCATTER, tensor, scatter_list, src)

    def reduce_scatter(
        self, output: Array, input_list: Sequence[Array], op: Reduction
    ) -> Work:
        return self._over_messages(OpType.REDUCE_SCATTER, output, input_list, op.ufunc)

    def all_to_all(
        self, output_list: Sequence[Array], input_list: Sequence[Array]
    ) -> Work:
        return self._over_messages(OpType.ALL_TO_ALL, output_list, input_list)

    # -- messages ----------------------------------------------------------

    def check_message(self, op: OpType, peer: int | None, tag: int) -> None:
        self._messages.place = self.place
        self._messages.check_message(op, peer, tag)

    def send(self, tensor: Array, dst: int, tag: int) -> Work:
        self.prepare()
        return self._messages.send(tensor, dst, tag)

    def recv(self, tensor: Array, src: int | None, tag: int) -> Work:
        self.prepare()
        return self._messages.recv(tensor, src, tag)

    # -- state and end of life -----------------------------------------------

    def refresh(self) -> None:
        self._messages.refresh()

    def transports(self) -> dict[int, tuple[str, ...]]:
        if self._side is None or not self._side.connected:
            return {}
        peers = (peer for peer in range(self.size) if peer != self.rank)
        name = {"tcp": "tcp", "uv": "libuv"}[self._side.library.transport]
        return dict.fromkeys(peers, (name,))

    def abort(self, reason: str) -> None:
        self._aborted = True
        self._messages.abort(reason)
        if self._side is not None:
            self._side.kill()

    def shutdown(self) -> None:
        if self._side is not None:
            self._side.close()
        self._messages.shutdown()


def _await(part: Work, whole: Work) -> None:
    """Wait for `part` on the thread of the side process; raise its error.

    No group knows `part`: the end of `whole`, as by an abort, ends it.
    """

    def end(whole: Work) -> None:
        part.mark_failed(DistBackendError(f"{whole.op_type.value} has been ended"))

    whole._when_over(end)
    part.wait()


def _pieces(array: Flat, shares: int) -> Iterator[Flat]:
    """Yield pieces of which the shared memory holds `shares`, and the alignment."""
    step = (MEMORY_BYTES - _ALIGNMENT) // shares // array.itemsize
    for start in range(0, array.size, step):
        yield array[start : start + step]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _create(store: Store, rank: int, size: int, timeout: float) -> Backend:
    return GlooBackend(store, rank, size)


Backend.register_backend(
    "gloo", _create, devices="cpu", unavailable=unavailable, has_options=has_options
)
