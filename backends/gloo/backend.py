"""The gloo backend: CPU arrays, through gloo's library in a side process.

The bindings of the libraries hold the GIL: a collective that waits for a late
peer would freeze every thread of the rank, and nothing could end it. So gloo
runs in a process of its own per rank and group, on shared memory, and `abort`
kills that process, whatever call it hangs in. Arrays from `rankscope.empty` are
used in place; others are copied in and out, large ones by chunks while the op
runs.

Results are the same, bit for bit, on every rank: either one rank computes a
part and the others receive it, or all compute it in the same order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..devices.shared_memory import empty, heap
from ..errors import DistError
from ..interface.base import Backend
from ..stores.base import Store
from ..work.composite import chain
from ..work.futures import completed_work
from ..work.op_type import OpType
from ..work.reduce_op import ReduceOp
from ..work.work import Work
from .dtypes import WIDE_DTYPES, Reduction, arithmetic
from .eager import EagerOperation
from .library import has_options, unavailable, usable_library
from .operations import (
    ChunkedOperation,
    InPlaceOperation,
    Operation,
    PlacedOperation,
    ReceiveOperation,
    address_of,
)
from .regions import Move, Region, copy, piece, rows, transfer, whole
from .side.wire import Command, Kind, chunk_bytes
from .side_process import SideProcess
from .work import GlooWork

__all__ = ["GlooBackend"]

_CODES = {op_type: number for number, op_type in enumerate(OpType)}
# gloo's name of a transport → the name that is shown.
_TRANSPORTS = {"tcp": "tcp", "uv": "libuv"}
# A tag and its slot's prefix share 64 bits.
_TAGS = 1 << 48


class GlooBackend(Backend):
    """gloo for one group on this rank; see `Backend` for the contract."""

    name = "gloo"
    interface_version = 1
    reduce_ops = Backend.reduce_ops | {ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR}
    # The side process of another rank ends where a call finds a connection closed.
    lingers = True
    buffers_messages = False
    private_tags = range(_TAGS, _TAGS + 256)

    def __init__(self, store: Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._chunk_bytes = chunk_bytes(size)
        # A group of one has no peer, and gloo refuses to make it.
        self._side: SideProcess | None = None
        if size > 1:
            library = usable_library()
            self._side = SideProcess(library, store, rank, size, self._failed)

    def _failed(self, cause: str | DistError) -> None:
        self.on_failure(cause)

    def check(
        self, op: OpType, dtype: np.dtype, reduce_op: ReduceOp | None
    ) -> Reduction | None:
        """Return how gloo computes `reduce_op`; `TypeError` where it would be wrong."""
        super().check(op, dtype, reduce_op)
        if reduce_op is None or dtype is None:
            return None
        return arithmetic(np.dtype(dtype), reduce_op)

    def refresh(self) -> None:
        """Mark the Works as started whose ops the side process has started."""
        if self._side is not None:
            self._side.refresh()

    def transports(self) -> dict[int, tuple[str, ...]]:
        """Return gloo's transport to every other rank, once they are connected."""
        if self._side is None or not self._side.connected:
            return {}
        peers = (peer for peer in range(self.size) if peer != self.rank)
        return dict.fromkeys(peers, (_TRANSPORTS[self._side.transport],))

    def scratch(self, size: int, dtype: np.dtype) -> np.ndarray:
        """Return a flat array in shared memory: a fused op needs no further copy."""
        return empty(size, dtype)

    # -- reductions --------------------------------------------------------

    # gloo's float16 is slow, rounds after each rank, and skips assignments to memory
    # that held certain bits, and gloo has no bfloat16. So both are reduced as float32,
    # and rounded once. It has no integers of 16 bits either: those of 32 bits have the
    # same lower bits.

    def all_reduce(self, tensor: np.ndarray, op: Reduction) -> Work:
        """Reduce `tensor` over all ranks, in place, on every rank."""
        wide = self._widened(tensor, op)
        if self._side is not None:
            buffers = self._side.eager_buffers
            size_class = buffers.size_class(wide.nbytes)
            if size_class is not None:
                work = GlooWork(OpType.ALL_REDUCE, wide, self._side.reader)
                self._side.submit(EagerOperation(work, buffers, size_class, wide, op))
                return _narrowed(work, wide, tensor)
        command = _reduce_command(Kind.ALL_REDUCE, wide, op)
        return _narrowed(self._in_place(OpType.ALL_REDUCE, wide, command), wide, tensor)

    def reduce(self, tensor: np.ndarray, dst: int, op: Reduction) -> Work:
        """Reduce into `tensor` of `dst`; the other ranks' arrays stay as they are."""
        wide, is_root = self._widened(tensor, op), dst == self.rank
        command = _reduce_command(Kind.REDUCE, wide, op, dst)
        work = self._in_place(OpType.REDUCE, wide, command, store=is_root)
        return _narrowed(work, wide, tensor, store=is_root)

    def _widened(
        self, tensor: np.ndarray, op: Reduction, *, load: bool = True
    ) -> np.ndarray:
        wide_dtype = WIDE_DTYPES.get(op.dtype)
        if wide_dtype is None or self._side is None:
            return tensor
        wide = self.scratch(tensor.size, wide_dtype)
        if load:
            wide[:] = tensor.reshape(-1)
        return wide

    def broadcast(self, tensor: np.ndarray, src: int) -> Work:
        """Copy `tensor` of `src` into that of every rank."""
        sends = src == self.rank
        command = Command(Kind.BROADCAST, peer=src, length=tensor.nbytes)
        return self._in_place(
            OpType.BROADCAST, tensor, command, load=sends, store=not sends
        )

    def _in_place(
        self,
        op_type: OpType,
        tensor: np.ndarray,
        command: Command,
        *,
        load: bool = True,
        store: bool = True,
    ) -> Work:
        if self._side is None:
            return completed_work(op_type, tensor)
        work = GlooWork(op_type, tensor, self._side.reader)
        operation: Operation
        if (
            tensor.nbytes > self._chunk_bytes
            and heap.find(address_of(tensor), tensor.nbytes) is None
        ):
            operation = ChunkedOperation(
                work, tensor, command, load=load, store=store, chunk=self._chunk_bytes
            )
        else:
            operation = InPlaceOperation(work, tensor, command, load=load, store=store)
        self._side.submit(operation)
        return work

    def reduce_scatter(
        self, output: np.ndarray, input_list: Sequence[np.ndarray], op: Reduction
    ) -> Work:
        """`output` becomes the reduction of all ranks' ``input_list[rank]``."""
        regions = [whole(self._widened(each, op)) for each in input_list]
        return self._reduce_scatter(OpType.REDUCE_SCATTER, output, regions, op)

    def reduce_scatter_tensor(
        self, output: np.ndarray, tensor: np.ndarray, op: Reduction
    ) -> Work:
        """As `reduce_scatter`, `tensor` being the flat concatenation of the parts."""
        given = self._widened(tensor, op)
        regions = [
            Region(given, rank * output.size, output.size) for rank in range(self.size)
        ]
        return self._reduce_scatter(OpType.REDUCE_SCATTER_TENSOR, output, regions, op)

    def _reduce_scatter(
        self,
        op_type: OpType,
        output: np.ndarray,
        regions: Sequence[Region],
        op: Reduction,
    ) -> Work:
        if self._side is None:
            copy(regions[0], whole(output))
            return completed_work(op_type, output)
        target = self._widened(output, op, load=False)

        def build(operation: PlacedOperation) -> bytes:
            segment, offset = operation.place(target, load=False, store=True)
            return Command(
                Kind.REDUCE_SCATTER,
                dtype=op.dtype,
                reduction=op.op,
                sequence=operation.sequence,
                number=operation.number,
                target=segment,
                target_offset=offset,
            ).pack([piece(operation, region, op.factor) for region in regions])

        arrays = [region.array for region in regions]
        work = self._submit(op_type, target, build, arrays, [target])
        return _narrowed(work, target, output)

    # -- moves -------------------------------------------------------------

    def all_gather(self, tensor_list: Sequence[np.ndarray], tensor: np.ndarray) -> Work:
        """``tensor_list[r]`` becomes `tensor` of rank r (sizes may differ by rank)."""
        source = whole(tensor)
        moves = [
            Move(rank, source, whole(each)) for rank, each in enumerate(tensor_list)
        ]
        return self._exchange(OpType.ALL_GATHER, tensor_list, moves)

    def all_gather_into_tensor(self, output: np.ndarray, tensor: np.ndarray) -> Work:
        """`output`, flat, becomes the concatenation of all ranks' `tensor`."""
        source = whole(tensor)
        moves = [
            Move(rank, source, Region(output, rank * tensor.size, tensor.size))
            for rank in range(self.size)
        ]
        return self._exchange(OpType.ALL_GATHER_INTO_TENSOR, output, moves)

    def gather(
        self, tensor: np.ndarray, gather_list: Sequence[np.ndarray] | None, dst: int
    ) -> Work:
        """On `dst`, ``gather_list[r]`` becomes `tensor` of rank r."""
        source = whole(tensor)
        moves = [Move(dst, source, None)]
        if self.rank == dst:
            assert gather_list is not None
            moves = [
                Move(rank, source if rank == dst else None, whole(each))
                for rank, each in enumerate(gather_list)
            ]
        return self._exchange(OpType.GATHER, gather_list, moves, root=dst)

    def scatter(
        self, tensor: np.ndarray, scatter_list: Sequence[np.ndarray] | None, src: int
    ) -> Work:
        """`tensor` becomes ``scatter_list[rank]`` of rank `src`."""
        target = whole(tensor)
        moves = [Move(src, None, target)]
        if self.rank == src:
            assert scatter_list is not None
            moves = [
                Move(rank, whole(each), target if rank == src else None)
                for rank, each in enumerate(scatter_list)
            ]
        return self._exchange(OpType.SCATTER, tensor, moves, root=src)

    def all_to_all(
        self, output_list: Sequence[np.ndarray], input_list: Sequence[np.ndarray]
    ) -> Work:
        """``output_list[r]`` becomes ``input_list[rank]`` of rank r; sizes vary."""
        moves = [
            Move(rank, whole(source), whole(target))
            for rank, (source, target) in enumerate(
                zip(input_list, output_list, strict=True)
            )
        ]
        return self._exchange(OpType.ALL_TO_ALL, output_list, moves)

    def all_to_all_single(
        self,
        output: np.ndarray,
        tensor: np.ndarray,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
    ) -> Work:
        """As `all_to_all` on one array each, split along dimension 0."""
        sources = rows(tensor, input_split_sizes)
        targets = rows(output, output_split_sizes)
        moves = [
            Move(rank, source, target)
            for rank, (source, target) in enumerate(zip(sources, targets, strict=True))
        ]
        return self._exchange(OpType.ALL_TO_ALL_SINGLE, output, moves)

    def _exchange(
        self, op_type: OpType, result: object, moves: Sequence[Move], root: int = 0
    ) -> Work:
        """Send each move's source to its peer and receive its target from there."""
        if self._side is None:
            for _, source, target in moves:
                if source is not None and target is not None:
                    copy(source, target)
            return completed_work(op_type, result)

        def build(operation: PlacedOperation) -> bytes:
            return Command(
                Kind.EXCHANGE,
                peer=root,
                sequence=operation.sequence,
                number=operation.number,
                extra=_CODES[op_type],
            ).pack([transfer(operation, move) for move in moves])

        sources = [source.array for _, source, _ in moves if source is not None]
        targets = [target.array for _, _, target in moves if target is not None]
        return self._submit(op_type, result, build, sources, targets)

    def barrier(self) -> Work:
        """End when every rank has entered."""
        if self._side is None:
            return completed_work(OpType.BARRIER, None)
        buffers = self._side.eager_buffers
        size_class = buffers.size_class(0)
        if size_class is None:
            token = np.zeros(1, np.uint8)
            reduction = arithmetic(token.dtype, ReduceOp.MAX)
            command = _reduce_command(Kind.ALL_REDUCE, token, reduction)
            return self._in_place(OpType.BARRIER, token, command)
        work = GlooWork(OpType.BARRIER, None, self._side.reader)
        self._side.submit(EagerOperation(work, buffers, size_class))
        return work

    # -- messages ----------------------------------------------------------

    def send(self, tensor: np.ndarray, dst: int, tag: int) -> Work:
        """Send `tensor` to rank `dst`, matched by `tag` (0 … 2^48 - 1)."""
        return self._message(Kind.SEND, OpType.SEND, tensor, dst, tag)

    def recv(self, tensor: np.ndarray, src: int | None, tag: int) -> Work:
        """Receive into `tensor` from `src` (``None``: any rank).

        A message of another size fails the Work; the group stays usable.
        """
        return self._message(
            Kind.RECV, OpType.RECV, tensor, -1 if src is None else src, tag
        )

    def check_message(self, op: OpType, peer: int | None, tag: int) -> None:
        """Raise `ValueError` for a tag that gloo does not have, and for this rank."""
        if not 0 <= tag < _TAGS:
            raise ValueError(
                f"{op.value} in {self.place}: tag={tag}; gloo has tags 0 to {_TAGS - 1}"
            )
        if self._side is None or peer == self.rank:
            raise ValueError(
                f"{op.value} in {self.place}: a rank cannot exchange "
                "messages with itself over gloo; copy the array instead"
            )

    def _message(
        self, kind: int, op_type: OpType, tensor: np.ndarray, peer: int, tag: int
    ) -> Work:
        assert self._side is not None

        def build(operation: PlacedOperation) -> bytes:
            segment, offset = operation.place(
                tensor, load=kind == Kind.SEND, store=kind == Kind.RECV
            )
            return Command(
                kind,
                peer=peer,
                length=tensor.nbytes,
                number=operation.number,
                segment=segment,
                offset=offset,
                extra=tag,
            ).pack()

        work = GlooWork(op_type, None, self._side.reader)
        # Sends and receives are not counted in the budget of shared memory: they
        # may be in flight for ever, and no later op may wait for them.
        operation = (
            PlacedOperation(work, build, inputs=(tensor,))
            if kind == Kind.SEND
            else ReceiveOperation(work, build, tensor.nbytes)
        )
        self._side.submit(operation, collective=False)
        return work

    def _submit(
        self,
        op_type: OpType,
        result: object,
        build: Callable[[PlacedOperation], bytes],
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
    ) -> Work:
        assert self._side is not None
        work = GlooWork(op_type, result, self._side.reader)
        arrays = {id(array): array.nbytes for array in (*inputs, *outputs)}
        self._side.submit(PlacedOperation(work, build, sum(arrays.values()), inputs))
        return work

    # -- end of life -------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Kill the side process; at once, from any thread, any number of times."""
        if self._side is not None:
            self._side.kill()
            self._side.reader.stop_copies()

    def shutdown(self) -> None:
        """End the side process in good order."""
        if self._side is not None:
            self._side.close()


def _reduce_command(
    kind: int, tensor: np.ndarray, reduction: Reduction, root: int = 0
) -> Command:
    return Command(
        kind,
        dtype=reduction.dtype,
        reduction=reduction.op,
        peer=root,
        length=tensor.size * reduction.factor,
    )


def _narrowed(
    work: Work, wide: np.ndarray, tensor: np.ndarray, *, store: bool = True
) -> Work:
    """Return a Work that copies the result of `work`, in `wide`, to `tensor`."""
    if wide is tensor:
        return work

    def narrow() -> None:
        if not store:
            return
        # A value beyond the dtype becomes infinite without a warning, as in gloo.
        with np.errstate(over="ignore"):
            tensor.reshape(-1)[:] = wide

    return chain(work, work.op_type, narrow, tensor)


def _create(store: Store, rank: int, size: int, timeout: float) -> Backend:
    return GlooBackend(store, rank, size)


Backend.register_backend(
    "gloo",
    _create,
    devices="cpu",
    unavailable=unavailable,
    has_options=has_options,
)
