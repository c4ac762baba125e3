"""The NCCL backend: collectives of CUDA arrays, on the device's own time.

The ops of a group run on one stream per device, one after the other, behind
what the caller's current streams had been given when they were issued. A
communicator for each device is made at its first use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .backend import Array, Backend
from .errors import DistBackendError
from .nccl_comm import NCCLComm
from .nccl_descent import Descent
from .nccl_lane import lane_of
from .nccl_library import unavailable_reason
from .nccl_options import options
from .nccl_queue import Call, NCCLQueue, NCCLWork, abort_queues
from .nccl_seam import Seam, load
from .nccl_types import (
    REDUCE_OPS,
    Reduction,
    check,
    freight,
    is_float8,
    reduction,
    wire,
)
from .op_timeout import own_timeout
from .own_device import own_device
from .prefix_store import PrefixStore
from .reduce_op import PremulSum, ReduceOp
from .store import Store
from .work import OpType, Work

__all__ = ["NCCLBackend"]

_alive: weakref.WeakSet[NCCLBackend] = weakref.WeakSet()
_alive_lock = threading.Lock()


@dataclasses.dataclass
class _Batch:
    """What a coalescing block collects, to be given to NCCL as one."""

    queue: NCCLQueue | None = None
    works: list[NCCLWork] = dataclasses.field(default_factory=list)
    calls: list[Call] = dataclasses.field(default_factory=list)
    kept: list[Any] = dataclasses.field(default_factory=list)


class NCCLBackend(Backend):
    """One group over NCCL, on this rank.

    Semantics of c10d's ``ProcessGroupNCCL``: ``wait()`` orders the caller's
    current stream behind the op and does not block the host. Sends and receives
    are matched in order of issue, without tags.
    """

    name = "nccl"
    splits = True
    reduce_ops = REDUCE_OPS

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        super().__init__(rank, size)
        self._seam: Seam = load()
        self._store, self._timeout = store, timeout
        self._options = options()
        self._queues: dict[int, NCCLQueue] = {}
        self._batch: _Batch | None = None
        self._origin: Callable[[int], Descent] | None = None
        #: The device that was begun before there was an array.
        self._foreseen: int | None = None
        self._used = False
        #: Whose abort makes way for this one, and does not take it along.
        self._heir_of: Backend | None = None
        self._lock = threading.Lock()
        self._aborted = False
        with _alive_lock:
            _alive.add(self)

    # -- issuing -----------------------------------------------------------------

    def _queue_for(self, device: int) -> NCCLQueue:
        """The queue of `device`; its communicator is begun if this is its first use."""
        queue = self._queues.get(device)
        if queue is not None:
            return queue
        with self._lock:
            if self._aborted:
                raise DistBackendError("the group was aborted or destroyed")
            return self._queues.get(device) or self._open(device)

    def _open(self, device: int) -> NCCLQueue:
        # Ranks use their first, second … device in the same order, whatever
        # numbers these have on each of them.
        place, lane = len(self._queues), lane_of(self._seam, device)
        comm = NCCLComm(
            self._seam,
            device,
            lane.lock,
            f"NCCL communicator on device {device} of {self.place}",
            PrefixStore(f"comm{place}", self._store),
            self.rank,
            self.size,
            own_timeout() or self._timeout,
            self._options,
            self._origin(device) if self._origin is not None else None,
        )
        queue = NCCLQueue(self._seam, lane, comm, self._failed)
        self._queues[device] = queue
        comm.open()
        return queue

    def prepare(self, arrays: Sequence[Array] = (), index: int | None = None) -> None:
        """Begin the communicator of a device, which needs every rank of the group."""
        if arrays:
            index = self._seam.cuda.device_of(arrays[0])
        elif self._queues:
            return
        elif index is None:
            index = self.own_device()
        assert index is not None
        self._queue_for(index)
        if not arrays and not self._used:
            self._foreseen = index

    def descend(
        self,
        parent: Backend | None,
        excluded: Sequence[int],
        release: Callable[[], None] | None,
    ) -> None:
        """By ``ncclCommSplit`` or ``ncclCommShrink``, where all ranks can.

        The communicators of a shrunken group are begun at once.
        """
        queues = dict(parent._queues) if isinstance(parent, NCCLBackend) else {}
        places = {device: place for place, device in enumerate(queues)}
        done = threading.Semaphore(max(0, len(queues) - 1))

        def over() -> None:
            if release is not None and not done.acquire(blocking=False):
                release()

        if not queues:
            over()

        def descent(device: int) -> Descent:
            return Descent(
                queues.get(device),
                places.get(device, -1),
                tuple(excluded),
                release is not None,
                over if device in queues else _unused,
            )

        self._origin = descent
        self._heir_of = parent if release is not None else None
        if excluded:
            for device in queues:
                self._queue_for(device)

    def _failed(self, reason: str) -> None:
        if not self._aborted:
            self.on_failure(reason)

    def _start(
        self, kind: OpType, arrays: Sequence[Array], calls: Sequence[Call]
    ) -> NCCLWork:
        """Issue an op on `arrays`, which lie on one device."""
        devices = sorted({self._seam.cuda.device_of(array) for array in arrays})
        if len(devices) > 1:
            raise ValueError(
                f"{kind.value} in {self.place}: the arrays lie on devices "
                f"{', '.join(map(str, devices))}; expected one"
            )
        if self._foreseen not in (None, devices[0]):
            raise ValueError(
                f"{kind.value} in {self.place}: the arrays lie on device {devices[0]}, "
                f"and its communicator is on device {self._foreseen}; say which one "
                "this process uses: init_process_group(device_id=...)"
            )
        self._foreseen, self._used = None, True
        work = NCCLWork(kind)
        work.timed = self.timing
        queue = self._queue_for(devices[0])
        if not calls:
            # Nothing to move: it is over when what came before is.
            calls = [_nothing]
        batch = self._batch
        if batch is None:
            queue.submit([work], calls, arrays)
            return work
        if batch.queue is not None and batch.queue is not queue:
            raise ValueError(
                f"{kind.value} in {self.place}: the arrays of one batch lie on devices "
                f"{batch.queue.comm.device} and {queue.comm.device}; expected one"
            )
        batch.queue = queue
        batch.works.append(work)
        batch.calls += calls
        batch.kept += arrays
        return work

    @contextlib.contextmanager
    def coalescing(self) -> Iterator[None]:
        """The ops issued in the block are one NCCL group."""
        batch = self._batch = _Batch()
        try:
            yield
            self._batch = None
            if batch.queue is not None:
                batch.queue.submit(batch.works, batch.calls, batch.kept)
        except BaseException as error:
            # Nothing of it was issued, and nothing of it may stay in flight.
            for work in batch.works:
                work.mark_failed(error)
            if batch.works and isinstance(error, DistBackendError):
                what = batch.works[0].describe()
                raise DistBackendError(f"{what}: {error}") from error
            raise
        finally:
            self._batch = None

    def _at(self, array: Array) -> int:
        return self._seam.cuda.address(array)

    # -- checks --------------------------------------------------------------------

    def check(self, op: OpType, dtype: Any, reduce_op: ReduceOp | None) -> None:
        """Refuse reductions that `dtype` does not have."""
        if reduce_op is None or dtype is None:
            return
        if not isinstance(reduce_op, PremulSum) and reduce_op is not (
            ReduceOp.PREMUL_SUM
        ):
            super().check(op, dtype, reduce_op)
        check(op, dtype, reduce_op)
        if is_float8(dtype):
            lacking = self._seam.nccl.float8_lacks() or self._capability_lacks()
            if lacking:
                raise TypeError(
                    f"{op.value}: float8 cannot be reduced here: {lacking}; convert "
                    "it, for instance to bfloat16, or move it as it is"
                )

    def _capability_lacks(self) -> str:
        device = self.own_device()
        major, minor = self._seam.cuda.capability(device)
        if major >= 9:
            return ""
        return f"device {device} has compute capability {major}.{minor}, 9.0 is needed"

    # -- collectives ---------------------------------------------------------------

    def _reducing(self, name: str, array: Array, op: ReduceOp, *fixed: Any) -> Call:
        """A call of NCCL's `name` with the reduction `op`; see `_Reduce`."""
        return _Reduce(self._seam, name, reduction(op, array.dtype), fixed)

    def all_reduce(self, tensor: Array, op: ReduceOp) -> Work:
        """``ncclAllReduce``, in place."""
        return self._start(OpType.ALL_REDUCE, [tensor], [self._all_reduce(tensor, op)])

    def _all_reduce(self, tensor: Array, op: ReduceOp) -> Call:
        at, kind = self._at(tensor), wire(tensor.dtype)
        return self._reducing(
            "all_reduce", tensor, op, at, at, tensor.size * kind.per_element, kind.dtype
        )

    def all_reduce_coalesced(self, tensors: Sequence[Array], op: ReduceOp) -> Work:
        """One NCCL group of all_reduces."""
        calls = [self._all_reduce(tensor, op) for tensor in tensors]
        return self._start(OpType.ALL_REDUCE, list(tensors), calls)

    def broadcast(self, tensor: Array, src: int) -> Work:
        """``ncclBroadcast``, in place."""
        call = self._broadcast(self._at(tensor), tensor, src)
        return self._start(OpType.BROADCAST, [tensor], [call])

    def _broadcast(self, source: int, target: Array, root: int) -> Call:
        nccl, at, kind = self._seam.nccl, self._at(target), freight(target.dtype)
        count = target.size * kind.per_element

        def call(comm: Any, stream: int) -> None:
            nccl.broadcast(source, at, count, kind.dtype, root, comm, stream)

        return call

    def reduce(self, tensor: Array, dst: int, op: ReduceOp) -> Work:
        """``ncclReduce``, in place on `dst`."""
        call = self._reduce(tensor, self._at(tensor), dst, op)
        return self._start(OpType.REDUCE, [tensor], [call])

    def _reduce(self, source: Array, target: int, root: int, op: ReduceOp) -> Call:
        kind = wire(source.dtype)
        count = source.size * kind.per_element
        return self._reducing(
            "reduce", source, op, self._at(source), target, count, kind.dtype, root
        )

    def all_gather(self, tensor_list: Sequence[Array], tensor: Array) -> Work:
        """One NCCL group of broadcasts, straight into the list's arrays."""
        source = self._at(tensor)
        calls = [
            self._broadcast(source, output, root)
            for root, output in enumerate(tensor_list)
            if output.size
        ]
        return self._start(OpType.ALL_GATHER, [*tensor_list, tensor], calls)

    def all_gather_into_tensor(self, output: Array, tensor: Array) -> Work:
        """``ncclAllGather``."""
        call = self._all_gather(output, tensor)
        return self._start(OpType.ALL_GATHER_INTO_TENSOR, [output, tensor], [call])

    def _all_gather(self, output: Array, tensor: Array) -> Call:
        nccl, kind = self._seam.nccl, freight(tensor.dtype)
        source, target = self._at(tensor), self._at(output)
        count = tensor.size * kind.per_element

        def call(comm: Any, stream: int) -> None:
            nccl.all_gather(source, target, count, kind.dtype, comm, stream)

        return call

    def all_gather_into_tensor_coalesced(
        self, outputs: Sequence[Array], tensors: Sequence[Array]
    ) -> Work:
        """One NCCL group of all-gathers."""
        calls = [
            self._all_gather(output, tensor)
            for output, tensor in zip(outputs, tensors, strict=True)
        ]
        return self._start(OpType.ALL_GATHER_INTO_TENSOR, [*outputs, *tensors], calls)

    def reduce_scatter(
        self, output: Array, input_list: Sequence[Array], op: ReduceOp
    ) -> Work:
        """One NCCL group of reductions, each to its owner; parts may differ in size."""
        target = self._at(output)
        calls = [
            self._reduce(part, target, root, op)
            for root, part in enumerate(input_list)
            if part.size
        ]
        return self._start(OpType.REDUCE_SCATTER, [output, *input_list], calls)

    def reduce_scatter_tensor(self, output: Array, tensor: Array, op: ReduceOp) -> Work:
        """``ncclReduceScatter``."""
        call = self._reduce_scatter(output, tensor, op)
        return self._start(OpType.REDUCE_SCATTER_TENSOR, [output, tensor], [call])

    def _reduce_scatter(self, output: Array, tensor: Array, op: ReduceOp) -> Call:
        kind = wire(output.dtype)
        count = output.size * kind.per_element
        return self._reducing(
            "reduce_scatter",
            output,
            op,
            self._at(tensor),
            self._at(output),
            count,
            kind.dtype,
        )

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Array], tensors: Sequence[Array], op: ReduceOp
    ) -> Work:
        """One NCCL group of reduce-scatters."""
        calls = [
            self._reduce_scatter(output, tensor, op)
            for output, tensor in zip(outputs, tensors, strict=True)
        ]
        return self._start(OpType.REDUCE_SCATTER_TENSOR, [*outputs, *tensors], calls)

    def gather(
        self, tensor: Array, gather_list: Sequence[Array] | None, dst: int
    ) -> Work:
        """One NCCL group of sends and receives."""
        outputs = list(gather_list or ()) if self.rank == dst else []
        calls = [self._send(tensor, dst)] if tensor.size else []
        calls += [
            self._recv(output, peer)
            for peer, output in enumerate(outputs)
            if output.size
        ]
        return self._start(OpType.GATHER, [tensor, *outputs], calls)

    def scatter(
        self, tensor: Array, scatter_list: Sequence[Array] | None, src: int
    ) -> Work:
        """One NCCL group of sends and receives."""
        inputs = list(scatter_list or ()) if self.rank == src else []
        calls = [
            self._send(part, peer) for peer, part in enumerate(inputs) if part.size
        ]
        calls += [self._recv(tensor, src)] if tensor.size else []
        return self._start(OpType.SCATTER, [tensor, *inputs], calls)

    def all_to_all(
        self, output_list: Sequence[Array], input_list: Sequence[Array]
    ) -> Work:
        """One NCCL group of sends and receives; parts may differ in size."""
        calls = [
            self._send(part, peer) for peer, part in enumerate(input_list) if part.size
        ]
        calls += [
            self._recv(part, peer) for peer, part in enumerate(output_list) if part.size
        ]
        return self._start(OpType.ALL_TO_ALL, [*output_list, *input_list], calls)

    def barrier(self) -> Work:
        """An all_reduce of one number; its ``wait()`` blocks the host, as in c10d."""
        cuda = self._seam.cuda
        with cuda.device(self.own_device()):
            tensor = cuda.scratch()
        work = self._start(
            OpType.BARRIER, [tensor], [self._all_reduce(tensor, ReduceOp.SUM)]
        )
        work.blocking = True
        return work

    def own_device(self) -> int:
        """The device that the group was used on first, else this process's."""
        for device in self._queues:
            return device
        told = own_device()
        return self._seam.cuda.current_device() if told is None else told

    # -- messages --------------------------------------------------------------------

    def send(self, tensor: Array, dst: int, tag: int) -> Work:
        """``ncclSend``; in a batch, all of it is one NCCL group."""
        _no_tag(tag)
        return self._start(OpType.SEND, [tensor], [self._send(tensor, dst)])

    def recv(self, tensor: Array, src: int | None, tag: int) -> Work:
        """``ncclRecv``; in a batch, all of it is one NCCL group."""
        _no_tag(tag)
        if src is None:
            raise ValueError(
                "recv: the nccl backend cannot receive from any rank; give src"
            )
        work = self._start(OpType.RECV, [tensor], [self._recv(tensor, src)])
        work._result = src
        return work

    def _send(self, tensor: Array, peer: int) -> Call:
        nccl, at, kind = self._seam.nccl, self._at(tensor), freight(tensor.dtype)
        count = tensor.size * kind.per_element

        def call(comm: Any, stream: int) -> None:
            nccl.send(at, count, kind.dtype, peer, comm, stream)

        return call

    def _recv(self, tensor: Array, peer: int) -> Call:
        nccl, at, kind = self._seam.nccl, self._at(tensor), freight(tensor.dtype)
        count = tensor.size * kind.per_element

        def call(comm: Any, stream: int) -> None:
            nccl.recv(at, count, kind.dtype, peer, comm, stream)

        return call

    # -- the state, and the end --------------------------------------------------------

    def state(self) -> str:
        """The communicators' states, for the board."""
        return ", ".join(
            f"device {device}: {queue.comm.describe()}"
            for device, queue in list(self._queues.items())
        )

    def abort(self, reason: str) -> None:
        """Abort the communicators, and those of other groups that could hold this up.

        An abort may block behind a kernel of another communicator on the same
        device: groups that have work in flight there are aborted as well.
        """
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
        self._store.close()
        mine = list(self._queues.values())
        try:
            self._abort_beside({q.comm.device for q in mine if q.launched}, reason)
        finally:
            if mine:
                abort_queues(mine)

    def _abort_beside(self, devices: set[int], reason: str) -> None:
        """Abort the other groups that have work in flight on `devices`."""
        with _alive_lock:
            alive = list(_alive)
        for backend in alive:
            if backend is self or backend._aborted or backend._heir_of is self:
                continue
            for queue in list(backend._queues.values()):
                if queue.launched and queue.comm.device in devices:
                    queue.fail(
                        f"it had work in flight on device {queue.comm.device} beside "
                        f"a communicator that was aborted: {reason}"
                    )

    def shutdown(self) -> None:
        """Free the communicators in good order."""
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
        for queue in self._queues.values():
            queue.comm.settle()
        self._store.close()
        for queue in self._queues.values():
            queue.close()


class _Reduce:
    """A call with a reduction, which a PREMUL_SUM makes for the call alone."""

    __slots__ = ("fixed", "name", "reduction", "seam")

    def __init__(
        self,
        seam: Seam,
        name: str,
        made: Reduction,
        fixed: tuple[Any, ...],
    ) -> None:
        self.seam, self.name, self.reduction, self.fixed = seam, name, made, fixed

    def __call__(self, comm: Any, stream: int) -> None:
        nccl, op = self.seam.nccl, self.reduction.op
        source, target, count, dtype, *root = self.fixed
        factor = self.reduction.factor
        if factor is not None:
            op = nccl.premul_sum(factor, dtype, comm)
        getattr(nccl, self.name)(source, target, count, dtype, op, *root, comm, stream)
        if factor is not None:
            nccl.free_op(op, comm)


def _unused() -> None:
    """The release of what was not lent."""


def _nothing(comm: Any, stream: int) -> None:
    """The call of an op that has nothing to move on this rank."""


def _no_tag(tag: int) -> None:
    if tag:
        raise ValueError(
            f"tag {tag}: the nccl backend has no tags, messages are matched in order"
        )


Backend.register_backend(
    "nccl", NCCLBackend, devices=("cuda",), unavailable=unavailable_reason
)
