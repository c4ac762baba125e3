"""A simulation of CUDA and NCCL in plain Python, for machines without a GPU.

The simulation implements the protocols `Cuda` and `Nccl`. A stream is a thread that
runs tasks in order. Events, kernels and communicators behave like those of CUDA and
NCCL as far as the backend can observe: a kernel of NCCL starts after the preceding
work of its stream, waits until every rank has launched the kernel, moves real bytes
between addresses, and leaves invalid results when its communicator is aborted. The
ranks of a test are threads of one process; rank n uses device n.

The attributes of `Simulation` inject faults, by rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rankscope.backends.devices import cuda_device
from rankscope.backends.errors import DistError, LibraryFailure
from rankscope.backends.nccl import nccl4py
from rankscope.backends.nccl.interface import GpuApi

_LIBRARIES = nccl4py._load

_TYPES = [
    *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64"),
    # numpy lacks bfloat16 and the float8 dtypes: integers of the same size.
    *("uint16", "uint8", "uint8"),
]
_FOLDS: list[Callable[..., Any]] = [np.add, np.multiply, np.maximum, np.minimum, np.add]
_AVG = 4


def use_gpu_api(load: Callable[[], GpuApi] | None) -> None:
    """Have the nccl backend use what ``load()`` returns; ``None``: the libraries."""
    nccl4py._load, nccl4py._api = load or _LIBRARIES, None
    cuda_device.use_driver(None)


class DeviceArray(np.ndarray):
    """A host array that reports a CUDA device through DLPack."""

    device: Any = 0

    def __array_finalize__(self, other: Any) -> None:
        self.device = getattr(other, "device", 0)

    def __dlpack_device__(self) -> Any:
        return 2, self.device


class Stream:
    """A simulated CUDA stream: a thread that runs tasks in order of submission."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"simulated-{name}")
        self.thread.daemon = True
        self.thread.start()

    def put(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def close(self) -> None:
        self._tasks.put(None)

    def synchronize(self, timeout: float = 30) -> None:
        done = threading.Event()
        self.put(done.set)
        assert done.wait(timeout), "the stream hangs"


class Event:
    """A simulated CUDA event.

    `mark` belongs to the last record: the stream sets `mark` when it reaches the
    event. `at` is the time of that, in seconds of ``time.perf_counter()``.
    """

    def __init__(self, *, timed: bool) -> None:
        self.timed = timed
        self.mark: threading.Event | None = None
        self.at = 0.0
        self.freed = False


class Clique:
    """The state that the ranks of one communicator share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.comms: dict[int, Comm] = {}
        self.changed = threading.Condition()
        # Number of the collective → rank → the input of the rank.
        self.brought: dict[int, dict[int, Any]] = defaultdict(dict)
        self.finished: set[int] = set()
        self.messages: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)


class Comm:
    def __init__(self, clique: Clique, rank: int) -> None:
        self.clique, self.rank = clique, rank
        self.collectives = 0
        self.aborted = False
        self.freed = False
        self.running = 0
        self.splits = 0
        self.revoked = False
        #: Number of calls of suspend and resume; odd: suspended.
        self.suspensions = 0
        #: The communicator of a split or shrink in progress.
        self.child: Comm | None = None


class Simulation:
    """The simulated GPUs of this process, and NCCL between the GPUs."""

    def __init__(self) -> None:
        self.cuda, self.nccl = SimulatedCuda(self), SimulatedNccl(self)
        self.api = GpuApi(self.nccl, self.cuda)
        self.streams: dict[int, Stream] = {}
        self.events: list[Event] = []
        self.cliques: dict[bytes, Clique] = defaultdict(lambda: Clique(0))
        self.lock = threading.Lock()
        #: The name and the rank of each call of NCCL, in order.
        self.calls: list[tuple[str, int]] = []
        # The faults, by rank: `fails` and `init_fails` are errors of NCCL (a text is
        # that of a `LibraryFailure`); an abort waits for the event of `abort_waits`,
        # for 30 s at most; ranks of `in_progress` report ncclInProgress.
        self.fails: dict[int, str | DistError] = {}
        self.init_fails: dict[int, str] = {}
        self.abort_waits: dict[int, threading.Event] = {}
        self.in_progress: set[int] = set()
        #: Ranks whose kernels end only by an abort.
        self.hangs: set[int] = set()
        #: A call of the rank returns only after the event, or after 30 s.
        self.calls_stuck: dict[int, threading.Event] = {}
        self.freed_streams: set[int] = set()
        self.capability = (9, 0)
        #: Streams that a CUDA graph is being captured on.
        self.captured: set[int] = set()

    def close(self) -> None:
        for clique in self.cliques.values():
            for comm in clique.comms.values():
                self.nccl.stop(comm)
        for stream in list(self.streams.values()):
            stream.close()
        for stream in list(self.streams.values()):
            stream.thread.join(10)

    # -- the calls of a rank's own code on its device --------------------------

    def array(self, values: Any, device: int, dtype: Any = None) -> DeviceArray:
        made = np.array(values, dtype=dtype).view(DeviceArray)
        made.device = device
        return made

    def user_stream(self, device: int) -> Stream:
        return self.streams[self.cuda.current_streams(device)[0]]

    def compute(self, device: int, task: Callable[[], None]) -> None:
        """Run `task` on the caller's stream, after the preceding work."""
        self.user_stream(device).put(task)

    def synchronize(self, device: int, timeout: float = 30) -> None:
        self.user_stream(device).synchronize(timeout)


class SimulatedCuda:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._local = threading.local()

    def device_count(self) -> int:
        return 8

    def current_device(self) -> int | None:
        return getattr(self._local, "device", None)

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self._local.device = self.current_device(), index
        try:
            yield
        finally:
            self._local.device = before

    def use(self, index: int) -> None:
        self._local.device = index

    def capturing(self, stream: int) -> bool:
        return stream in self._simulation.captured

    def current_streams(self, index: int) -> tuple[int, ...]:
        # The default stream of a device has the number of the device; the streams of
        # `new_stream` are numbered from 1000.
        with self._simulation.lock:
            if index not in self._simulation.streams:
                self._simulation.streams[index] = Stream(f"default-{index}")
        return (index,)

    def has_more(self, array: Any, unsigned: str, mask: int, most: int) -> bool:
        self._simulation.synchronize(self.device_of(array))
        bits = array.view(unsigned)
        return bool(((bits & bits.dtype.type(mask)) > most).any())

    def new_stream(self, *, high_priority: bool = False) -> int:
        with self._simulation.lock:
            number = 1000 + len(self._simulation.streams)
            self._simulation.streams[number] = Stream(f"stream-{number}")
        return number

    def free_stream(self, stream: int) -> None:
        self._stream(stream).close()
        self._simulation.freed_streams.add(stream)

    def _stream(self, stream: int) -> Stream:
        assert stream not in self._simulation.freed_streams, "used after it was freed"
        return self._simulation.streams[stream]

    def new_event(self, *, timed: bool) -> Event:
        event = Event(timed=timed)
        self._simulation.events.append(event)
        return event

    def free_event(self, event: Event) -> None:
        assert not event.freed
        event.freed = True

    def record(self, event: Event, stream: int) -> None:
        assert not event.freed
        mark = event.mark = threading.Event()

        def reach() -> None:
            event.at = time.perf_counter()
            mark.set()

        self._stream(stream).put(reach)

    def wait(self, stream: int, event: Event) -> None:
        assert not event.freed
        mark = event.mark
        if mark is not None:
            self._stream(stream).put(lambda: (mark.wait(), None)[1])

    def reached(self, event: Event) -> bool:
        return event.mark is None or event.mark.is_set()

    def elapsed_ms(self, start: Event, end: Event) -> float:
        assert start.timed
        assert end.timed
        return (end.at - start.at) * 1e3

    def capability(self, index: int) -> tuple[int, int]:
        return self._simulation.capability

    def address(self, array: np.ndarray) -> int:
        return array.ctypes.data

    def device_of(self, array: DeviceArray) -> int:
        return array.device

    def scratch(self) -> DeviceArray:
        return self._simulation.array([0.0], self.current_device() or 0, np.float32)


class SimulatedNccl:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._local = threading.local()
        self._factors: dict[int, float] = {}

    # -- communicators -------------------------------------------------------

    def unique_id(self) -> bytes:
        return uuid.uuid4().bytes

    def init(
        self, size: int, rank: int, unique_id: bytes, options: dict[str, Any]
    ) -> Comm:
        self._note("init", rank)
        if rank in self._simulation.init_fails:
            raise LibraryFailure(self._simulation.init_fails[rank])
        with self._simulation.lock:
            clique = self._simulation.cliques[unique_id]
            clique.size = size
            comm = clique.comms[rank] = Comm(clique, rank)
        return comm

    can_shrink = can_revoke = True

    def float8_lacks(self) -> str:
        return ""

    def split(self, comm: Comm, rank: int) -> Comm:
        self._note("split", comm.rank)
        comm.splits += 1
        key = b"split %d %d" % (id(comm.clique), comm.splits)
        return self._derive(comm, key, rank, comm.clique.size)

    def shrink(self, comm: Comm, excluded: Sequence[int], *, abort: bool) -> Comm:
        self._note("shrink", comm.rank)
        assert comm.rank not in excluded
        if abort:
            self.stop(comm)
            with comm.clique.changed:
                assert comm.clique.changed.wait_for(lambda: not comm.running, 30)
        rank = comm.rank - sum(one < comm.rank for one in excluded)
        key = b"shrink %d %r" % (id(comm.clique), tuple(excluded))
        return self._derive(comm, key, rank, comm.clique.size - len(excluded))

    def _derive(self, comm: Comm, key: bytes, rank: int, size: int) -> Comm:
        assert not comm.freed, "split off a communicator that was freed"
        assert not comm.suspensions % 2, "split off a communicator that is suspended"
        assert not comm.running, "split off a communicator that is at something"
        with self._simulation.lock:
            clique = self._simulation.cliques[key]
            clique.size = size
            comm.child = clique.comms[rank] = Comm(clique, rank)
        return comm.child

    def suspend_lacks(self) -> str:
        return ""

    def suspend(self, comm: Comm) -> None:
        self._note("suspend", comm.rank)
        assert not comm.running, "suspended while it is at something"
        assert not comm.suspensions % 2, "suspended twice"
        comm.suspensions += 1

    def resume(self, comm: Comm) -> None:
        self._note("resume", comm.rank)
        assert comm.suspensions % 2, "resumed without a suspend"
        comm.suspensions += 1

    def memory_stats(self, comm: Comm) -> dict[str, int]:
        assert not comm.freed, "asked of a communicator that was freed"
        flag = comm.suspensions % 2
        return {"suspend": 12, "suspended": flag, "persist": 4, "total": 16}

    def ready(self, comm: Comm) -> bool:
        assert not comm.freed, "asked of a communicator that was freed"
        if comm.child is not None:
            if len(comm.child.clique.comms) < comm.child.clique.size:
                return False
            comm.child = None
        failure = self._simulation.fails.get(comm.rank)
        if failure is not None:
            raise LibraryFailure(failure) if isinstance(failure, str) else failure
        if comm.rank in self._simulation.in_progress:
            return False
        if comm.revoked and comm.running:
            return False
        if any(one.suspensions < comm.suspensions for one in _ranks(comm)):
            return False
        return len(comm.clique.comms) == comm.clique.size

    def stop(self, comm: Comm) -> None:
        with comm.clique.changed:
            comm.aborted = True
            comm.clique.changed.notify_all()

    def revoke(self, comm: Comm) -> None:
        self._note("revoke", comm.rank)
        assert not comm.freed, "revoked after it was freed"
        comm.revoked = True
        self.stop(comm)

    def abort(self, comm: Comm) -> None:
        self._note("abort", comm.rank)
        assert not comm.freed, "freed twice"
        waits = self._simulation.abort_waits.get(comm.rank)
        if waits is not None:
            waits.wait(30)
        self.stop(comm)
        with comm.clique.changed:
            assert comm.clique.changed.wait_for(lambda: not comm.running, 30)
        comm.freed = True

    def finalize(self, comm: Comm) -> None:
        self._note("finalize", comm.rank)
        assert not comm.revoked, "finalized after it was revoked"

    def destroy(self, comm: Comm) -> None:
        self._note("destroy", comm.rank)
        assert not comm.freed, "freed twice"
        comm.freed = True

    def _note(self, name: str, rank: int) -> None:
        self._simulation.calls.append((name, rank))

    # -- calls -------------------------------------------------------------------

    def group_start(self) -> None:
        self._local.group = []

    def group_end(self) -> None:
        group, self._local.group = self._local.group, None
        if group:
            comm, stream, _ = group[0]
            self._note("group", comm.rank)
            self._launch(comm, stream, [task for _, _, task in group])

    def _issue(self, name: str, comm: Comm, stream: int, task: Any) -> None:
        assert not comm.freed, "called on a communicator that was freed"
        assert not comm.revoked, "called on a communicator that was revoked"
        assert not comm.suspensions % 2, "called on a communicator that is suspended"
        assert comm.rank not in self._simulation.in_progress, "called while in progress"
        self._note(name, comm.rank)
        stuck = self._simulation.calls_stuck.get(comm.rank)
        if stuck is not None:
            stuck.wait(30)
        if getattr(self._local, "group", None) is not None:
            self._local.group.append((comm, stream, task))
        else:
            self._launch(comm, stream, [task])

    def _launch(self, comm: Comm, stream: int, tasks: Sequence[Any]) -> None:
        # Sends before receives: NCCL runs all ops of a group concurrently, and here a
        # receive before the send of the same rank would block both ranks.
        ordered = sorted(tasks, key=lambda task: task[0])

        def kernel() -> None:
            with comm.clique.changed:
                comm.running += 1
            for _, run in ordered:
                run()
            with comm.clique.changed:
                comm.running -= 1
                comm.clique.changed.notify_all()

        self._simulation.streams[stream].put(kernel)

    def _collective(
        self,
        name: str,
        comm: Comm,
        stream: int,
        brings: Callable[[], np.ndarray | None],
        takes: Callable[[list[Any]], None],
    ) -> None:
        clique = comm.clique

        def run() -> None:
            with clique.changed:
                number = comm.collectives
                comm.collectives += 1
                clique.brought[number][comm.rank] = brings()
                clique.changed.notify_all()
                clique.changed.wait_for(
                    lambda: (
                        comm.aborted
                        or (
                            len(clique.brought[number]) == clique.size
                            and comm.rank not in self._simulation.hangs
                        )
                    )
                )
                if not comm.aborted:
                    takes([clique.brought[number][r] for r in range(clique.size)])

        self._issue(name, comm, stream, (1, run))

    def _fold(self, arrays: list[np.ndarray], op: int) -> np.ndarray:
        factor = self._factors.get(op)
        if factor is not None:
            arrays = [array * np.asarray(factor, array.dtype) for array in arrays]
            op = 0
        total = arrays[0].copy()
        for array in arrays[1:]:
            _FOLDS[op](total, array, out=total)
        if op == _AVG:
            total = (total / len(arrays)).astype(total.dtype)
        return total

    def all_reduce(self, source, target, count, dtype, op, comm, stream):
        self._collective(
            "all_reduce",
            comm,
            stream,
            lambda: _at(source, count, dtype).copy(),
            lambda all_: _put(target, self._fold(all_, op)),
        )

    def broadcast(self, source, target, count, dtype, root, comm, stream):
        mine = comm.rank == root
        self._collective(
            "broadcast",
            comm,
            stream,
            lambda: _at(source, count, dtype).copy() if mine else None,
            lambda all_: _put(target, all_[root]),
        )

    def reduce(self, source, target, count, dtype, op, root, comm, stream):
        def take(all_: list[Any]) -> None:
            if comm.rank == root:
                _put(target, self._fold(all_, op))

        self._collective(
            "reduce", comm, stream, lambda: _at(source, count, dtype).copy(), take
        )

    def all_gather(self, source, target, count, dtype, comm, stream):
        self._collective(
            "all_gather",
            comm,
            stream,
            lambda: _at(source, count, dtype).copy(),
            lambda all_: _put(target, np.concatenate(all_)),
        )

    def reduce_scatter(self, source, target, count, dtype, op, comm, stream):
        def take(all_: list[Any]) -> None:
            start = comm.rank * count
            _put(target, self._fold(all_, op)[start : start + count])

        size = comm.clique.size
        self._collective(
            "reduce_scatter",
            comm,
            stream,
            lambda: _at(source, count * size, dtype).copy(),
            take,
        )

    def send(self, source, count, dtype, peer, comm, stream):
        clique = comm.clique

        def run() -> None:
            with clique.changed:
                data = _at(source, count, dtype).tobytes()
                clique.messages[comm.rank, peer].append(data)
                clique.changed.notify_all()

        self._issue("send", comm, stream, (0, run))

    def recv(self, target, count, dtype, peer, comm, stream):
        clique = comm.clique

        def run() -> None:
            with clique.changed:
                box = clique.messages[peer, comm.rank]
                clique.changed.wait_for(lambda: comm.aborted or box)
                if not comm.aborted:
                    came = box.popleft()
                    _put(target, np.frombuffer(came, _TYPES[dtype]))

        self._issue("recv", comm, stream, (2, run))

    def premul_sum(self, factor: float, dtype: int, comm: Comm) -> int:
        number = 100 + len(self._factors)
        self._factors[number] = factor
        return number

    def free_op(self, op: int, comm: Comm) -> None:
        self._note("free_op", comm.rank)


def _ranks(comm: Comm) -> list[Comm]:
    return list(comm.clique.comms.values())


def _at(address: int, count: int, dtype: int) -> np.ndarray:
    kind = np.dtype(_TYPES[dtype])
    buffer = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
    return np.frombuffer(memoryview(buffer), kind, count)


def _put(address: int, values: np.ndarray) -> None:
    data = values.tobytes()
    ctypes.memmove(address, data, len(data))
