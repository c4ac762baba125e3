"""Tests of nccl4py and cuda-bindings over stub libraries; run in ``.venv-nccl``.

The stubs, `nccl_stub.c` and `cuda_stub.c`, support groups of one rank. The tests
therefore check the fit between the backend and the two packages: names, arguments,
results that the packages hide, the GIL, and that no handle is used after its free.
cupy cannot run over a stub, because cupy calls the driver through undocumented
tables: `HalfCuda` replaces the part of cupy, which is arrays and current streams.
`test_nccl_library` creates the environment, compiles the stubs and runs this file.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.waiting import until
from rankscope.backends.devices import arrays, cuda_context
from rankscope.backends.devices.cuda_driver import CudaLibrary
from rankscope.backends.devices.gpu_memory import GpuMemory
from rankscope.backends.errors import (
    ConnectionLostError,
    DistBackendError,
    LibraryFailure,
)
from rankscope.backends.groups.config import BackendConfig
from rankscope.backends.groups.process_group import ProcessGroup
from rankscope.backends.groups.spec import Origin
from rankscope.backends.groups.watchdog import watchdog
from rankscope.backends.interface import staging
from rankscope.backends.nccl import nccl4py, options
from rankscope.backends.nccl import nccl4py as nccl_library
from rankscope.backends.nccl.interface import GpuApi
from rankscope.backends.nccl.nccl4py import NcclLibrary
from rankscope.backends.work.async_errors import take_async_error
from tests.backends.gpu_simulation import DeviceArray, Simulation, use_gpu_api

IN_PROGRESS, SYSTEM_ERROR, REMOTE_ERROR, INTERNAL_ERROR = 7, 2, 6, 3


class Stub:
    """The settings and counters of a stub, by their names in the C source."""

    def __init__(self, library: ctypes.CDLL) -> None:
        object.__setattr__(self, "_library", library)

    def _cell(self, name: str) -> Any:
        kind = ctypes.c_double if name == "factor" else ctypes.c_int
        return kind.in_dll(self._library, f"stub_{name}")

    def __getattr__(self, name: str) -> Any:
        return self._cell(name).value

    def __setattr__(self, name: str, value: int) -> None:
        self._cell(name).value = value


class HalfCuda(CudaLibrary):
    """`CudaLibrary`, but its arrays are those of the simulation."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation.cuda

    def current_streams(self, index: int) -> tuple[int, ...]:
        return (0,)

    def address(self, array: Any) -> int:
        return self._simulation.address(array)

    def device_of(self, array: Any) -> int:
        return self._simulation.device_of(array)

    def scratch(self) -> Any:
        return self._simulation.scratch()


# The dynamic loader returns a library that is already loaded: the stubs are loaded
# first, so nccl4py and cuda-bindings use the stubs.


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ["RANKSCOPE_TEST_NCCL_STUB"], ctypes.RTLD_GLOBAL)


@pytest.fixture(scope="session")
def driver() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ["RANKSCOPE_TEST_CUDA_STUB"], ctypes.RTLD_GLOBAL)


@pytest.fixture(scope="session")
def nvml() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ["RANKSCOPE_TEST_NVML_STUB"], ctypes.RTLD_GLOBAL)


def told(
    library: ctypes.CDLL, knobs: dict[str, int], counters: tuple[str, ...]
) -> Iterator[Stub]:
    """Yield the stub with `knobs` set and `counters` at 0; reset `knobs` at the end."""
    made = Stub(library)
    for name, value in {**knobs, **dict.fromkeys(counters, 0)}.items():
        setattr(made, name, value)
    yield made
    for name, value in knobs.items():
        setattr(made, name, value)


@pytest.fixture
def stub(library: ctypes.CDLL) -> Iterator[Stub]:
    yield from told(
        library,
        {"version": 22807, "async": 0, "call": 0, "slow_ms": 0, "abort_ms": 0},
        (
            *("inits", "aborts", "destroys", "calls", "groups", "splits", "shrinks"),
            *("revokes", "homeless"),
        ),
    )


@pytest.fixture
def cuda_stub(driver: ctypes.CDLL) -> Iterator[Stub]:
    counters = ("waits", "contexts", "switches", "broken_captures")
    knobs = {"query": 0, "query_ms": 0, "global_capture": 0}
    yield from told(driver, knobs, counters)


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    made = Simulation()
    yield made
    made.close()


@pytest.fixture
def group(
    stub: Stub, cuda_stub: Stub, simulation: Simulation, tmp_path: Path
) -> Iterator[ProcessGroup]:
    """Yield a group of one rank; check what it leaves, and where it called NCCL.

    It frees its streams and events, and calls NCCL on its device alone.
    """
    before = (cuda_stub.streams, cuda_stub.events)
    use_gpu_api(lambda: GpuApi(NcclLibrary(), HalfCuda(simulation)))
    store = dist.FileStore(str(tmp_path / "store"), 1)
    made = ProcessGroup("g", [0], 0, BackendConfig("cuda:nccl"), store, 30)
    made.simulation = simulation  # type: ignore[attr-defined]
    yield made
    cuda_stub.query = 0
    made.shutdown()
    until(lambda: (cuda_stub.streams, cuda_stub.events) == before)
    assert stub.homeless == 0
    store.close()
    use_gpu_api(None)
    watchdog.stop()
    take_async_error()


def array(group: Any, values: Any, dtype: Any = np.float32, device: int = 0) -> Any:
    return group.simulation.array(values, device, dtype)


def test_every_op_gets_through(group: ProcessGroup, stub: Stub) -> None:
    def zeros() -> Any:
        return array(group, [0, 0, 0])

    x = array(group, [1, 2, 3])
    out = zeros()
    ops = [
        lambda: dist.all_reduce(x, group=group),
        lambda: dist.all_reduce(x, dist.make_nccl_premul_sum(0.25), group=group),
        lambda: dist.broadcast(x, 0, group=group),
        lambda: dist.reduce(x, 0, group=group),
        lambda: dist.all_gather([out], x, group=group),
        lambda: dist.all_gather_into_tensor(out, x, group=group),
        lambda: dist.reduce_scatter(out, [x], group=group),
        lambda: dist.reduce_scatter_tensor(out, x, group=group),
        lambda: dist.gather(x, [out], 0, group=group),
        lambda: dist.scatter(out, [x], 0, group=group),
        lambda: dist.all_to_all([out], [x], group=group),
        lambda: dist.all_to_all_single(out, x, group=group),
    ]
    for op in ops:
        calls = stub.calls
        out[:] = 0
        op()
        assert stub.calls > calls
        np.testing.assert_array_equal(x, [1, 2, 3])
    np.testing.assert_array_equal(out, x)
    assert stub.factor == 0.25
    dist.barrier(group=group)
    with dist.coalescing_manager(group):
        for _ in range(5):
            dist.all_reduce(array(group, [1, 2, 3]), group=group)
    assert group.summary().devices["cuda"] == "nccl (device 0: running)"


def test_communicators_are_nonblocking_and_take_options(
    group: ProcessGroup, stub: Stub
) -> None:
    with dist.nccl_options(min_ctas=3, max_ctas=5):
        dist.all_reduce(array(group, [1]), group=group)
    assert stub.blocking == 0
    assert (stub.min_ctas, stub.max_ctas) == (3, 5)
    with (
        pytest.raises(ValueError, match="there is no 'min_cta'"),
        dist.nccl_options(min_cta=3),
    ):
        pass


def test_the_options_are_the_fields_of_the_config(stub: Stub) -> None:
    """A field that a new nccl4py adds has to become an option, or be refused."""
    from nccl import core

    fields = {one.name for one in dataclasses.fields(core.NCCLConfig)}
    offered = set(options._KINDS) - {options.HIGH_PRIORITY}
    assert offered | options._REFUSED.keys() == fields
    # Each value is one that the package passes on.
    nccl = NcclLibrary()
    values: dict[type, Any] = {int: 1, bool: True, str: "x"}
    chosen = {name: values[options._KINDS[name]] for name in offered}
    nccl.init(1, 0, nccl.unique_id(), chosen)
    assert (stub.min_ctas, stub.max_ctas) == (1, 1)


def test_the_name_of_a_communicator_outlives_the_call(
    library: ctypes.CDLL, stub: Stub
) -> None:
    nccl = NcclLibrary()
    name = "a name that the next objects of its size overwrite"
    nccl.init(1, 0, nccl.unique_id(), {"comm_name": name})
    kept = [b"x" * len(name) for _ in range(1000)]
    kept += [bytes(bytearray(b"y" * len(name))) for _ in range(1000)]
    told = ctypes.c_char_p.in_dll(library, "stub_comm_name").value
    assert told == name.encode()


def test_a_stream_of_high_priority(group: ProcessGroup, cuda_stub: Stub) -> None:
    dist.all_reduce(array(group, [1]), group=group)
    assert cuda_stub.priority == 0
    other = ProcessGroup("h", [0], 0, group.config, group.store, 30)
    with dist.nccl_options(high_priority=True):
        dist.all_reduce(array(group, [1]), group=other)
    # The highest of the range that the stub gives, and not ordered with stream 0.
    assert (cuda_stub.priority, cuda_stub.stream_flags) == (-5, 1)
    other.shutdown()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANKSCOPE_NCCL_USE_COMM_NONBLOCKING", "0"),
        ("TORCH_NCCL_USE_COMM_NONBLOCKING", "0"),
        ("NCCL_COMM_BLOCKING", "1"),
    ],
)
def test_blocking_is_the_opt_out(
    name: str,
    value: str,
    group: ProcessGroup,
    stub: Stub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(name, value)
    dist.all_reduce(array(group, [1]), group=group)
    assert stub.blocking == 1


def test_an_op_is_over_when_its_event_was_reached(
    group: ProcessGroup, cuda_stub: Stub
) -> None:
    # CU_STREAM_NON_BLOCKING, CUDA_ERROR_NOT_READY, CUDA_ERROR_ILLEGAL_ADDRESS
    x = array(group, [1])
    work = dist.all_reduce(x, group=group, async_op=True)
    work.synchronize()
    assert cuda_stub.stream_flags == 1
    assert work.get_duration() == pytest.approx(2.5)
    dist.enable_timing(group, False)
    cuda_stub.query = 600
    work = dist.all_reduce(x, group=group, async_op=True)
    waits = cuda_stub.waits
    assert work.wait()
    assert cuda_stub.waits == waits + 1
    assert not work.is_completed()
    cuda_stub.query = 0
    work.synchronize()
    assert work.get_duration() is None
    cuda_stub.query = 700
    with pytest.raises(
        dist.DistError, match=r"CUDA reports: .*CUDA_ERROR_ILLEGAL_ADDRESS"
    ):
        dist.all_reduce(x, group=group, async_op=True).synchronize()


def on_thread(task: Callable[[], Any]) -> Any:
    """Return the result of `task` on a thread that never chose a device."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(task).result(30)


def test_a_thread_without_a_device_gets_a_context_on_no_other_device(
    cuda_stub: Stub, simulation: Simulation
) -> None:
    cuda = HalfCuda(simulation)

    def visits() -> list[int | None]:
        devices = [cuda.current_device()]
        with cuda.device(2):
            devices.append(cuda.current_device())
            with cuda.device(2):
                devices.append(cuda.current_device())
            with cuda.device(3):
                devices.append(cuda.current_device())
            devices.append(cuda.current_device())
        return [*devices, cuda.current_device()]

    assert on_thread(visits) == [None, 2, 2, 3, 2, None]
    assert cuda_stub.contexts == 0b1100
    # In and out of both devices; the block that changes nothing has no switch.
    assert cuda_stub.switches == 4
    with pytest.raises(LibraryFailure, match="CUDA_ERROR_INVALID_DEVICE"):
        cuda.use(4)


@pytest.mark.parametrize("end", ["shutdown", "abort"])
def test_the_threads_of_a_group_create_contexts_on_its_device_alone(
    group: ProcessGroup, cuda_stub: Stub, end: str
) -> None:
    def life() -> int | None:
        x = array(group, [1], device=3)
        for _ in range(3):
            work = dist.all_reduce(x, group=group, async_op=True)
            work.synchronize()
        getattr(group, end)(*(["enough"] if end == "abort" else []))
        return nccl4py.load().cuda.current_device()

    assert on_thread(life) is None
    until(lambda: cuda_stub.streams == 0)
    assert cuda_stub.contexts == 0b1000


def test_staged_copies_create_contexts_on_the_device_of_the_array_alone(
    cuda_stub: Stub, monkeypatch: pytest.MonkeyPatch, simulation: Simulation
) -> None:
    """Over a module in place of cupy that records the device of each of its calls."""
    cuda = HalfCuda(simulation)
    seen: list[tuple[str, int | None]] = []

    def noted(name: str, result: Any = None) -> Any:
        seen.append((name, cuda.current_device()))
        return result

    stream = SimpleNamespace(synchronize=lambda: noted("synchronize"))
    fake = SimpleNamespace(
        cuda=SimpleNamespace(get_current_stream=lambda: stream),
        array=lambda host: noted("array", host),
    )
    pinned = SimpleNamespace(empty_pinned=lambda *shape: noted("pinned"))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(sys.modules, "cupyx", pinned)
    monkeypatch.setattr(cuda_context, "_contexts", None)
    copies = staging._cuda()
    there = SimpleNamespace(
        shape=(1,),
        dtype="f4",
        device=SimpleNamespace(id=2),
        get=lambda out: noted("get"),
        set=lambda host: noted("set"),
    )
    to_device = copies.to_device
    assert to_device is not None
    on_thread(lambda: copies.to_host(there))
    on_thread(lambda: copies.from_host(None, there))
    on_thread(lambda: to_device(np.ones(1), 2))
    names = ["pinned", "get", "set", "synchronize", "array"]
    assert seen == [(name, 2) for name in names]
    assert cuda_stub.contexts == 0b100


class Tensor:
    """An array of another library, on device 2."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 2

    def __dlpack__(self, **_: Any) -> Any:
        raise NotImplementedError("the module in place of cupy does not call it")


def test_an_array_of_another_library_creates_a_context_on_its_device_alone(
    cuda_stub: Stub, monkeypatch: pytest.MonkeyPatch, simulation: Simulation
) -> None:
    """Over a module in place of cupy that sets and restores the device as cupy does."""
    cuda = HalfCuda(simulation)

    def from_dlpack(array: Tensor) -> Any:
        # For the CUDA runtime, device 0 is current on a thread that chose none.
        before = cuda.current_device() or 0
        cuda.use(array.__dlpack_device__()[1])
        cuda.use(before)
        return SimpleNamespace(shape=(1,), dtype=np.dtype("f4"), size=1)

    fake = SimpleNamespace(from_dlpack=from_dlpack, ndarray=DeviceArray)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(cuda_context, "_contexts", None)

    def visit() -> int | None:
        assert arrays.native(Tensor(), "cuda", "tensor", "all_reduce").size == 1
        return cuda.current_device()

    assert on_thread(visit) is None
    assert cuda_stub.contexts == 0b100


def test_the_uuid_of_a_gpu_needs_no_context(
    cuda_stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_context, "_contexts", None)
    assert cuda_context.gpu_uuid(2) == "02020202-0202-0202-0202-020202020202"
    assert cuda_context.gpu_uuid(9) == ""
    assert not cuda_context.cuda_contexts().is_active(2)
    assert (cuda_stub.contexts, cuda_stub.switches) == (0, 0)


def test_the_memory_of_the_board_needs_no_context(
    cuda_stub: Stub, nvml: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_context, "_contexts", None)
    stub, gib = Stub(nvml), 1 << 30
    memory = GpuMemory(1)
    assert memory.read() == (gib, 80 * gib, 3 << 29)
    assert GpuMemory(2).read() == (2 * gib, 80 * gib, 3 << 29)  # a part of a GPU
    for listed in (0, 1, 3):
        stub.processes = listed
        assert memory.read() == (gib, 80 * gib, None), listed
    stub.processes = 2
    stub.lost = 1
    assert memory.read() is None
    stub.lost = 0
    assert GpuMemory(3).read() is None  # unknown to NVML
    assert (cuda_stub.contexts, cuda_stub.switches) == (0, 0)


@pytest.mark.parametrize("end", ["wait", "abort"])
def test_no_thread_of_the_backend_breaks_a_capture_of_the_users(
    group: ProcessGroup, cuda_stub: Stub, end: str
) -> None:
    x = array(group, [1])
    dist.all_reduce(x, group=group)
    cuda_stub.query = 600
    work = dist.all_reduce(x, group=group, async_op=True)
    streams = cuda_stub.streams
    cuda_stub.global_capture = 1
    if end == "wait":
        # The progress thread alone looks: is_completed() calls nothing of CUDA.
        cuda_stub.query = 0
        until(work.is_completed)
    else:
        # An abort button's: no thread that captures.
        on_thread(lambda: group.abort("enough"))
        until(lambda: cuda_stub.streams == streams - 1)
    cuda_stub.global_capture = 0
    assert cuda_stub.broken_captures == 0


def test_what_was_freed_is_not_used(group: ProcessGroup) -> None:
    cuda = nccl4py.load().cuda
    with cuda.device(0):
        event = cuda.new_event(timed=True)
    cuda.free_event(event)
    with pytest.raises(LibraryFailure, match="a handle that the stub does not know"):
        cuda.record(event, 0)


def test_in_progress_is_waited_for(group: ProcessGroup, stub: Stub) -> None:
    setattr(stub, "async", IN_PROGRESS)
    began = time.monotonic()
    work = dist.all_reduce(array(group, [1]), group=group, async_op=True)
    assert time.monotonic() - began < 10
    until(lambda: stub.inits == 1)
    assert stub.calls == 0
    with pytest.raises(dist.DistTimeoutError):
        work.wait(0.1)
    setattr(stub, "async", 0)
    work.wait(20)
    # NCCL continues a call in the background: an event may be recorded only after the
    # call has finished.
    stub.call = IN_PROGRESS
    setattr(stub, "async", IN_PROGRESS)
    work = dist.all_reduce(array(group, [1]), group=group, async_op=True)
    setattr(stub, "async", 0)
    stub.call = 0
    work.wait(20)


def test_an_async_error_says_what_nccl_says(group: ProcessGroup, stub: Stub) -> None:
    dist.all_reduce(array(group, [1]), group=group)
    setattr(stub, "async", SYSTEM_ERROR)
    with pytest.raises(dist.DistError, match="the stub's last error"):
        dist.all_reduce(array(group, [1]), group=group)
    until(lambda: stub.aborts == 1)
    assert "a system error of the stub" in str(group.aborted)


def test_a_call_that_fails(group: ProcessGroup, stub: Stub) -> None:
    dist.all_reduce(array(group, [1]), group=group)
    stub.call = SYSTEM_ERROR
    with pytest.raises(dist.DistError, match="NCCL reports"):
        dist.all_reduce(array(group, [1]), group=group)
    until(lambda: stub.aborts == 1)


def counted_beside(task: Callable[[], object]) -> int:
    """Return the count of another thread, once a millisecond, while `task` runs."""
    counted, stop = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.is_set():
            counted += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    task()
    stop.set()
    thread.join()
    return counted


# The least count in a call of 400 ms, at one count per millisecond: a tenth, because
# other processes may use the cores.
FREE = 40


def test_the_gil_is_free_in_calls_and_aborts(group: ProcessGroup, stub: Stub) -> None:
    x = array(group, [1])
    dist.all_reduce(x, group=group)
    stub.slow_ms = stub.abort_ms = 400
    assert counted_beside(lambda: dist.all_reduce(x, group=group)) > FREE
    assert counted_beside(lambda: group.abort("enough")) > FREE


def test_the_gil_is_free_in_queries_of_events(
    group: ProcessGroup, cuda_stub: Stub
) -> None:
    cuda = nccl4py.load().cuda
    with cuda.device(0):
        event = cuda.new_event(timed=False)
    cuda.record(event, 0)
    cuda_stub.query_ms = 400
    assert counted_beside(lambda: cuda.reached(event)) > FREE
    cuda_stub.query_ms = 0
    cuda.free_event(event)


def test_an_abort_from_another_thread_ends_an_init(
    group: ProcessGroup, stub: Stub
) -> None:
    setattr(stub, "async", IN_PROGRESS)
    work = dist.all_reduce(array(group, [1]), group=group, async_op=True)
    until(lambda: stub.inits == 1)
    threading.Timer(0.1, group.abort, ["no more"]).start()
    with pytest.raises(dist.DistAbortedError, match="no more"):
        work.wait()
    until(lambda: stub.aborts == 1)


def test_the_end_destroys_and_does_not_abort(group: ProcessGroup, stub: Stub) -> None:
    dist.barrier(group=group)
    until(lambda: not group.status.in_flight)
    group.shutdown()
    assert (stub.destroys, stub.aborts) == (1, 0)


def test_a_group_is_split_off_another(
    group: ProcessGroup, stub: Stub, tmp_path: Path
) -> None:
    dist.barrier(group=group)
    other = ProcessGroup(
        "h", [0], 0, group.config, group.store, 30, origin=Origin(group.built_backend)
    )
    x = array(group, [1])
    work = dist.all_reduce(x, group=other, async_op=True)
    until(lambda: stub.splits == 1)
    with pytest.raises(dist.DistTimeoutError):
        # The parent communicator reports the progress of the split: the new
        # communicator has no handle yet.
        work.wait(0.1)
    assert stub.inits == 1
    setattr(stub, "async", 0)
    work.wait(20)
    assert stub.inits == 2
    other.abort("enough")
    until(lambda: stub.aborts == 1)
    dist.barrier(group=group)
    other.shutdown()


def test_shrink_gets_through(stub: Stub) -> None:
    nccl = NcclLibrary()
    assert nccl.can_shrink
    comm = nccl.init(4, 0, nccl.unique_id(), {"blocking": False})
    left = nccl.shrink(comm, [3, 1], abort=True)
    assert not nccl.ready(left)
    # The new communicator has no handle yet, so the abort has nothing to free.
    nccl.abort(left)
    assert stub.aborts == 0
    setattr(stub, "async", 0)
    assert nccl.ready(comm)
    assert nccl.ready(left)
    assert (stub.shrinks, stub.excluded, stub.shrink_flags) == (1, 3, 1)
    stub.version = 22602
    assert not NcclLibrary().can_shrink


def test_an_abort_revokes_what_is_in_flight_first(
    group: ProcessGroup, stub: Stub, cuda_stub: Stub
) -> None:
    x = array(group, [1])
    dist.all_reduce(x, group=group, async_op=True).synchronize()
    cuda_stub.query = 600
    dist.all_reduce(x, group=group, async_op=True)
    group.abort("enough")
    until(lambda: stub.aborts == 1)
    assert stub.revokes == 1


@pytest.mark.parametrize(
    ("version", "revokes"),
    [(22706, False), (22803, False), (22807, True), (23003, True)],
)
def test_revoke_is_there_from_2_28_7_on(
    stub: Stub, version: int, revokes: bool
) -> None:
    stub.version = version
    assert NcclLibrary().can_revoke is revokes


def test_a_group_is_suspended_and_resumed(group: ProcessGroup, stub: Stub) -> None:
    dist.all_reduce(array(group, [1]), group=group)
    with pytest.raises(
        NotImplementedError, match=r"2\.28\.7 is here, 2\.29\.7 is need"
    ):
        group.suspend()
    stub.version = 22907
    cuda = HalfCuda(group.simulation)  # type: ignore[attr-defined]
    use_gpu_api(lambda: GpuApi(NcclLibrary(), cuda))
    other = ProcessGroup("h", [0], 0, group.config, group.store, 30)
    dist.all_reduce(array(group, [1]), group=other)
    sizes = {"suspend": 1000, "persist": 3000, "total": 4000}
    assert other.memory_stats() == {**sizes, "suspended": 0}
    other.suspend()
    assert other.memory_stats() == {**sizes, "suspended": 1}
    with pytest.raises(DistBackendError, match="is suspended"):
        dist.all_reduce(array(group, [1]), group=other)
    other.resume()
    assert other.memory_stats()["suspended"] == 0
    dist.all_reduce(array(group, [1]), group=other)
    other.shutdown()


def test_an_old_library_is_refused_with_the_remedy(stub: Stub) -> None:
    assert nccl_library._no_library() is None
    stub.version = 21403
    reason = nccl_library._no_library() or ""
    assert "NCCL 2.14.3 is too old, 2.23 is needed: " in reason
    # As this environment does it: "uv pip install" where uv has made it.
    assert "pip install --upgrade nvidia-nccl-cu1" in reason


def test_a_machine_without_a_driver_says_so() -> None:
    reason = nccl_library.unavailable_reason()
    assert reason is not None
    assert reason.startswith("there is no usable NVIDIA driver here (cudaError")
    assert "\n" not in reason
    with pytest.raises(dist.DistBackendError, match="no usable NVIDIA driver"):
        nccl4py.load()
    assert not dist.is_nccl_available()


def test_a_result_of_nccl_is_one_of_ours(stub: Stub) -> None:
    nccl = NcclLibrary()
    comm = nccl.init(1, 0, nccl.unique_id(), {"blocking": False})
    assert nccl.ready(comm)
    stub.call = INTERNAL_ERROR
    with pytest.raises(LibraryFailure, match="NCCL reports"):
        nccl.all_reduce(0, 0, 0, 7, 0, comm, 0)
    stub.call = IN_PROGRESS
    nccl.all_reduce(0, 0, 0, 7, 0, comm, 0)
    nccl.abort(comm)


@pytest.mark.parametrize(
    ("result", "kind", "alone"),
    [
        (REMOTE_ERROR, ConnectionLostError, False),
        # NCCL's words alone: a socket, or something else on this host.
        (SYSTEM_ERROR, ConnectionLostError, True),
        (INTERNAL_ERROR, LibraryFailure, False),
    ],
)
def test_an_error_that_a_dead_peer_may_cause_is_a_lost_connection(
    stub: Stub, result: int, kind: type[DistBackendError], alone: bool
) -> None:
    nccl = NcclLibrary()
    comm = nccl.init(2, 0, nccl.unique_id(), {"blocking": False})
    setattr(stub, "async", result)
    with pytest.raises(kind, match="the stub's last error") as polled:
        nccl.ready(comm)
    stub.call = result
    with pytest.raises(kind, match="NCCL reports") as called:
        nccl.all_reduce(0, 0, 0, 7, 0, comm, 0)
    for caught in (polled, called):
        assert type(caught.value) is kind
        assert caught.value.reason == (str(caught.value) if alone else None)
    nccl.abort(comm)
