"""The NCCL backend: collectives of CUDA arrays, asynchronous to the host."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..devices.cuda_device import chosen_device, local_device
from ..errors import DistBackendError, DistError
from ..interface.base import Array, Backend
from ..stores.base import Store
from ..stores.prefix import PrefixStore
from ..work.op_timeout import own_timeout
from ..work.op_type import OpType
from ..work.reduce_op import PremulSum, ReduceOp
from ..work.work import Work
from .calls import Calls, no_call
from .communicator import NCCLComm
from .dtypes import REDUCE_OPS, Reduction, is_float8, reduction
from .interface import GpuApi
from .launch_queue import queue_of_device
from .nan_check import refuse_nan
from .nccl4py import load, unavailable_reason
from .options import SWITCH, nonblocking, options, switch, take_high_priority
from .split import CommSplit
from .stream import NCCLStream, abort_streams
from .suspension import Suspension
from .work import Call, NCCLWork

__all__ = ["NCCLBackend"]

_alive: weakref.WeakSet[NCCLBackend] = weakref.WeakSet()
_alive_lock = threading.Lock()


class _Issue(NamedTuple):
    """An op of a coalescing block, with the arrays that it reads and writes."""

    stream: NCCLStream
    work: NCCLWork
    calls: Sequence[Call]
    arrays: Sequence[Array]


class NCCLBackend(Backend):
    """One group over NCCL, on this rank.

    The semantics are those of c10d's ``ProcessGroupNCCL``: ``wait()`` makes the
    caller's current stream wait for the op and does not block the host. Sends and
    receives are matched in order of issue, without tags.
    """

    name = "nccl"
    interface_version = 1
    buffers_messages = False
    supports_split = True
    reduce_ops = REDUCE_OPS

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        super().__init__(rank, size)
        self._api: GpuApi = load()
        self._calls = Calls(self._api)
        self._store, self._timeout = store, timeout
        self._options = options()
        self._high_priority = take_high_priority(self._options)
        #: Whether wait() blocks the host, and whether inputs are searched for NaN.
        self._blocking_wait = switch("BLOCKING_WAIT")
        self._nan_check = switch("NAN_CHECK")
        self._streams: dict[int, NCCLStream] = {}
        self._suspension = Suspension(self._api, store, rank, size)
        #: In a coalescing block, what is issued at its end, all on one stream.
        self._batch: list[_Issue] | None = None
        self._split: Callable[[int], CommSplit] | None = None
        #: The device whose communicator was created before the first op; ``None``
        #: after the first op.
        self._prepared: int | None = None
        self._used = False
        #: The backend of the shrunken group's parent: an abort of the parent does not
        #: abort this backend.
        self._successor_of: Backend | None = None
        self._lock = threading.Lock()
        self._aborted = False
        with _alive_lock:
            _alive.add(self)

    # -- issuing -----------------------------------------------------------------

    def _stream_for(self, device: int) -> NCCLStream:
        """Return the stream of `device`; the first call creates the communicator."""
        stream = self._streams.get(device)
        if stream is not None:
            return stream
        with self._lock:
            if self._aborted:
                raise DistBackendError("the group was aborted or destroyed")
            return self._streams.get(device) or self._open(device)

    def _open(self, device: int) -> NCCLStream:
        # The communicators of a rank are matched across ranks by order of first use,
        # because the device numbers may differ between ranks.
        ordinal, queue = len(self._streams), queue_of_device(self._api, device)
        comm = NCCLComm(
            self._api,
            device,
            queue.lock,
            f"NCCL communicator on device {device} of {self.place}",
            PrefixStore(f"comm{ordinal}", self._store),
            self.rank,
            self.size,
            own_timeout() or self._timeout,
            self._options,
            self._split(device) if self._split is not None else None,
        )
        stream = NCCLStream(
            self._api, queue, comm, self._failed, high_priority=self._high_priority
        )
        self._streams[device] = stream
        comm.open()
        return stream

    def prepare(self, arrays: Sequence[Array] = (), index: int | None = None) -> None:
        """Begin to create the communicator of a device; every rank has to call it."""
        if arrays:
            index = self._api.cuda.device_of(arrays[0])
        elif self._streams:
            return
        elif index is None:
            index = self.default_device()
        assert index is not None
        self._stream_for(index)
        if not arrays and not self._used:
            self._prepared = index

    def split_from(
        self,
        parent: Backend | None,
        excluded: Sequence[int],
        release: Callable[[], None] | None,
    ) -> None:
        """Derive communicators by ``ncclCommSplit`` or ``ncclCommShrink`` if possible.

        A communicator is derived only if every rank can do so. The communicators of a
        shrunken group are created at once, those of a split group at first use.
        """
        streams = dict(parent._streams) if isinstance(parent, NCCLBackend) else {}
        ordinals = {device: ordinal for ordinal, device in enumerate(streams)}
        others = threading.Semaphore(max(0, len(streams) - 1))

        def release_after_last() -> None:
            if release is not None and not others.acquire(blocking=False):
                release()

        if not streams:
            release_after_last()

        def split(device: int) -> CommSplit:
            return CommSplit(
                streams.get(device),
                ordinals.get(device, -1),
                tuple(excluded),
                release is not None,
                release_after_last if device in streams else lambda: None,
            )

        self._split = split
        self._successor_of = parent if release is not None else None
        if excluded:
            for device in streams:
                self._stream_for(device)

    def _failed(self, reason: str | DistError) -> None:
        """Report the failure of a stream, unless the backend was aborted."""
        if not self._aborted:
            self.on_failure(reason)

    def _start(
        self,
        kind: OpType,
        arrays: Sequence[Array],
        calls: Sequence[Call],
        *,
        reads: bool = True,
        ops: int = 1,
        result: Any = None,
    ) -> NCCLWork:
        """Issue an op on `arrays`; raise `ValueError` if they are on two devices."""
        devices = sorted({self._api.cuda.device_of(array) for array in arrays})
        if len(devices) > 1:
            raise ValueError(
                f"{kind.value} in {self.place}: the arrays lie on devices "
                f"{', '.join(map(str, devices))}; expected one"
            )
        if self._prepared not in (None, devices[0]):
            raise ValueError(
                f"{kind.value} in {self.place}: the arrays lie on device {devices[0]}, "
                f"and its communicator is on device {self._prepared}; say which one "
                "this process uses: init_process_group(device_id=...)"
            )
        if self._nan_check and reads:
            refuse_nan(self._api.cuda, kind, arrays, ops)
        self._prepared, self._used = None, True
        work = NCCLWork(kind, result)
        work.timed = self.timing
        work.blocking = self._blocking_wait
        stream = self._stream_for(devices[0])
        if not calls:
            # Nothing to move: the op ends when the preceding ops have ended.
            calls = [no_call]
        batch = self._batch
        if batch is None:
            stream.submit([work], calls, arrays)
            return work
        if batch and batch[0].stream is not stream:
            raise ValueError(
                f"{kind.value} in {self.place}: the arrays of one batch lie on devices "
                f"{batch[0].stream.comm.device} and {stream.comm.device}; expected one"
            )
        batch.append(_Issue(stream, work, calls, arrays))
        return work

    @contextlib.contextmanager
    def coalescing(self) -> Iterator[None]:
        """Issue the ops of the block as one NCCL group, at the end of the block."""
        batch: list[_Issue] = []
        self._batch = batch
        try:
            yield
            self._batch = None
            if batch:
                streams, works, calls, arrays = zip(*batch, strict=True)
                streams[0].submit(works, _joined(calls), _joined(arrays))
        except BaseException as error:
            # None was issued: a wait for one would not end.
            for one in batch:
                one.work.mark_failed(error)
            if batch and isinstance(error, DistBackendError):
                what = batch[0].work.describe()
                raise DistBackendError(f"{what}: {error}") from error
            raise
        finally:
            self._batch = None

    # -- checks --------------------------------------------------------------------

    def check(
        self, op: OpType, dtype: Any, reduce_op: ReduceOp | None
    ) -> Reduction | None:
        """Return how NCCL applies `reduce_op` to `dtype`."""
        if reduce_op is None:
            return None
        if not isinstance(reduce_op, PremulSum) and reduce_op is not (
            ReduceOp.PREMUL_SUM
        ):
            super().check(op, dtype, reduce_op)
        made = reduction(self, op, dtype, reduce_op)
        if is_float8(dtype):
            lacking = self._api.nccl.float8_lacks() or self._capability_lacks()
            if lacking:
                raise TypeError(
                    f"{op.value} in {self.place}: "
                    f"float8 cannot be reduced here: {lacking}; convert "
                    "it, for instance to bfloat16, or move it as it is"
                )
        return made

    def _capability_lacks(self) -> str:
        """Return why the GPU cannot reduce float8; empty if the GPU can."""
        device = self.default_device()
        major, minor = self._api.cuda.capability(device)
        if major >= 9:
            return ""
        return f"device {device} has compute capability {major}.{minor}, 9.0 is needed"

    # -- collectives: `calls` says which functions of NCCL, several in one group ------

    def all_reduce(self, tensor: Array, op: Reduction) -> Work:
        call = self._calls.all_reduce(tensor, op)
        return self._start(OpType.ALL_REDUCE, [tensor], [call])

    def all_reduce_coalesced(self, tensors: Sequence[Array], op: ReduceOp) -> Work:
        kind = OpType.ALL_REDUCE
        calls = [
            self._calls.all_reduce(tensor, reduction(self, kind, tensor.dtype, op))
            for tensor in tensors
        ]
        return self._start(kind, list(tensors), calls)

    def broadcast(self, tensor: Array, src: int) -> Work:
        call = self._calls.broadcast(tensor, src)
        reads = self.rank == src
        return self._start(OpType.BROADCAST, [tensor], [call], reads=reads)

    def reduce(self, tensor: Array, dst: int, op: Reduction) -> Work:
        call = self._calls.reduce(tensor, dst, op)
        return self._start(OpType.REDUCE, [tensor], [call])

    def all_gather(self, tensor_list: Sequence[Array], tensor: Array) -> Work:
        calls = self._calls.all_gather(tensor_list, tensor)
        return self._start(OpType.ALL_GATHER, [*tensor_list, tensor], calls)

    def all_gather_coalesced(
        self, tensor_lists: Sequence[Sequence[Array]], tensors: Sequence[Array]
    ) -> Work:
        pairs = list(zip(tensor_lists, tensors, strict=True))
        calls = [call for pair in pairs for call in self._calls.all_gather(*pair)]
        arrays = [*_joined(tensor_lists), *tensors]
        return self._start(OpType.ALL_GATHER, arrays, calls, ops=len(pairs))

    def all_gather_into_tensor(self, output: Array, tensor: Array) -> Work:
        call = self._calls.all_gather_into_tensor(output, tensor)
        return self._start(OpType.ALL_GATHER_INTO_TENSOR, [output, tensor], [call])

    def all_gather_into_tensor_coalesced(
        self, outputs: Sequence[Array], tensors: Sequence[Array]
    ) -> Work:
        calls = [
            self._calls.all_gather_into_tensor(output, tensor)
            for output, tensor in zip(outputs, tensors, strict=True)
        ]
        return self._start(OpType.ALL_GATHER_INTO_TENSOR, [*outputs, *tensors], calls)

    def reduce_scatter(
        self, output: Array, input_list: Sequence[Array], op: Reduction
    ) -> Work:
        calls = self._calls.reduce_scatter(output, input_list, op)
        return self._start(OpType.REDUCE_SCATTER, [output, *input_list], calls)

    def reduce_scatter_tensor(
        self, output: Array, tensor: Array, op: Reduction
    ) -> Work:
        call = self._calls.reduce_scatter_tensor(output, tensor, op)
        return self._start(OpType.REDUCE_SCATTER_TENSOR, [output, tensor], [call])

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Array], tensors: Sequence[Array], op: ReduceOp
    ) -> Work:
        kind = OpType.REDUCE_SCATTER_TENSOR
        calls = [
            self._calls.reduce_scatter_tensor(
                output, tensor, reduction(self, kind, output.dtype, op)
            )
            for output, tensor in zip(outputs, tensors, strict=True)
        ]
        return self._start(kind, [*outputs, *tensors], calls)

    def gather(
        self, tensor: Array, gather_list: Sequence[Array] | None, dst: int
    ) -> Work:
        outputs = list(gather_list or ()) if self.rank == dst else []
        calls = self._calls.gather(tensor, outputs, dst)
        return self._start(OpType.GATHER, [tensor, *outputs], calls)

    def scatter(
        self, tensor: Array, scatter_list: Sequence[Array] | None, src: int
    ) -> Work:
        inputs = list(scatter_list or ()) if self.rank == src else []
        calls = self._calls.scatter(tensor, inputs, src)
        return self._start(OpType.SCATTER, [tensor, *inputs], calls)

    def all_to_all(
        self, output_list: Sequence[Array], input_list: Sequence[Array]
    ) -> Work:
        calls = self._calls.all_to_all(output_list, input_list)
        return self._start(OpType.ALL_TO_ALL, [*output_list, *input_list], calls)

    def barrier(self) -> Work:
        """Issue an all_reduce of one number; ``wait()`` blocks the host, as in c10d."""
        cuda = self._api.cuda
        with cuda.device(self.default_device()):
            tensor = cuda.scratch()
        add = reduction(self, OpType.BARRIER, tensor.dtype, ReduceOp.SUM)
        call = self._calls.all_reduce(tensor, add)
        work = self._start(OpType.BARRIER, [tensor], [call])
        work.blocking = True
        return work

    def default_device(self) -> int:
        """Return the device of the group's first op, else the process's device."""
        for device in self._streams:
            return device
        chosen = chosen_device()
        return local_device(self._api.cuda.device_count()) if chosen is None else chosen

    # -- point to point -----------------------------------------------------------

    def check_message(self, op: OpType, peer: int | None, tag: int) -> None:
        if tag:
            raise ValueError(
                f"{op.value} in {self.place}: tag={tag}; the nccl backend has no tags, "
                "messages are matched in order"
            )
        if peer is None:
            raise ValueError(
                f"{op.value} in {self.place}: the nccl backend cannot receive from any "
                "rank; give src"
            )

    def send(self, tensor: Array, dst: int, tag: int) -> Work:
        calls = [self._calls.send(tensor, dst)] if tensor.size else []
        return self._start(OpType.SEND, [tensor], calls)

    def recv(self, tensor: Array, src: int | None, tag: int) -> Work:
        assert src is not None
        calls = [self._calls.recv(tensor, src)] if tensor.size else []
        return self._start(OpType.RECV, [tensor], calls, result=src)

    # -- state and end ------------------------------------------------------------

    def state(self) -> str:
        return ", ".join(
            f"device {device}: {stream.describe()}"
            for device, stream in list(self._streams.items())
        )

    def suspend_lacks(self) -> str:
        if not nonblocking():
            return (
                "blocking communicators cannot be suspended, as nothing would end the "
                f"wait for a rank that never comes: {SWITCH}=1 avoids this"
            )
        return self._api.nccl.suspend_lacks()

    def suspend(self) -> None:
        streams = list(self._streams.values())
        self._suspension.suspend(streams, own_timeout() or self._timeout)

    def resume(self) -> None:
        streams = list(self._streams.values())
        self._suspension.resume(streams, own_timeout() or self._timeout)

    def memory_stats(self) -> dict[str, int]:
        return self._suspension.memory_stats(list(self._streams.values()))

    def abort(self, reason: str) -> None:
        """Abort the communicators, and the groups that could block the abort.

        ``ncclCommAbort`` may block behind a kernel of another communicator on the same
        device: where ``ncclCommRevoke`` does not end the kernels of this group first,
        the groups that have work in flight on the device are aborted as well.
        """
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
        self._store.close()
        mine = list(self._streams.values())
        if mine:
            abort_streams(mine, reason, partial(self._abort_beside, reason))

    def _abort_beside(self, reason: str, devices: set[int]) -> None:
        """Abort the other groups that have work in flight on `devices`."""
        with _alive_lock:
            alive = list(_alive)
        for backend in alive:
            if backend is self or backend._aborted or backend._successor_of is self:
                continue
            for stream in list(backend._streams.values()):
                if stream.in_nccl and stream.comm.device in devices:
                    stream.abort_group(
                        f"it had work in flight on device {stream.comm.device} beside "
                        f"a communicator that was aborted: {reason}"
                    )

    def shutdown(self) -> None:
        """Free the communicators, after derivations in progress have ended."""
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
        for stream in self._streams.values():
            stream.comm.await_derivation()
        self._store.close()
        for stream in self._streams.values():
            stream.close()


def _joined(lists: Iterable[Sequence[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


Backend.register_backend(
    "nccl",
    NCCLBackend,
    devices="cuda",
    unavailable=unavailable_reason,
    has_options=lambda: bool(options()),
)
