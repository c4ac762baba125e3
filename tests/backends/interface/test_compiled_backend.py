"""A backend in C++: notebooks/dummy_backend, compiled with this machine's compiler.

It sets every output to zero, on a thread of its own. What is tested is all the
rest: that it is a backend like any other.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest

import rankscope as dist
from rankscope import ReduceOp, WorkState
from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups.world import world
from rankscope.backends.work.flight_recorder import recorder
from tests.backends.interface.dummy import build

_COMPILER = (sysconfig.get_config_var("CXX") or "g++").split()[0]

pytestmark = [
    pytest.mark.processes,
    pytest.mark.soak,
    pytest.mark.skipif(shutil.which(_COMPILER) is None, reason=f"no {_COMPILER} here"),
    pytest.mark.timeout(300),  # the first run compiles
]


class Elsewhere(np.ndarray):
    """An array that says it lies on a device of another type."""

    def __dlpack_device__(self) -> tuple[int, int]:  # type: ignore[override]
        return 12, 0  # kDLExtDev


def issue(tensor: np.ndarray) -> Any:
    """The Work of an all_reduce: a `DummyWork`, where it is dummy's."""
    return dist.all_reduce(tensor, async_op=True)


@pytest.fixture(scope="module")
def site() -> Path:
    """The folder that the package is installed in."""
    return build()


# -- found by its entry point, on several ranks ------------------------------


def alone(me: Rank, site: str) -> None:
    sys.path.insert(0, site)
    dist.init_process_group("cpu:dummy", timeout=30)
    assert "rankscope_dummy" not in sys.modules
    x = np.full(5, me.rank + 1.0)
    work = issue(x)
    assert work.wait()
    assert x.tolist() == [0.0] * 5
    assert type(work).__name__ == "DummyWork"
    assert dist.Work in type(work).__mro__
    assert work.progress == 1.0
    assert work.result()[0] is x
    assert work.duration_ns > 0

    outs = [np.ones(3, np.int16) for _ in range(2)]
    assert dist.all_gather(outs, np.ones(3, np.int16)) is None
    assert [out.tolist() for out in outs] == [[0, 0, 0], [0, 0, 0]]
    for op, call in {
        "broadcast": lambda: dist.broadcast(x, src=0),
        "barrier": dist.barrier,
        "send": lambda: dist.send(x, 1 - me.rank),
    }.items():
        with pytest.raises(
            NotImplementedError, match=f"^backend 'dummy' does not implement {op}$"
        ):
            call()
    assert world.get_group().summary().in_flight == 0
    # Its ops do not wait for each other, and one with a rank that left is refused.
    me.meet("end")
    dist.destroy_process_group()


def test_it_serves_a_group_without_an_import(site: Path) -> None:
    run_ranks(2, alone, str(site))


def beside_tcp(me: Rank, site: str) -> None:
    sys.path.insert(0, site)
    dist.init_process_group("cpu:tcp,ext:dummy", timeout=30)
    both = world.get_group()
    x, y = np.ones(4), np.ones(4).view(Elsewhere)
    works = [issue(array) for array in (x, y, x)]
    for work in works:
        work.wait()
    assert x.tolist() == [4.0] * 4
    assert y.tolist() == [0.0] * 4
    assert [type(work).__name__ == "DummyWork" for work in works] == [
        False,
        True,
        False,
    ]
    assert [work.sequence_number for work in works] == [1, 2, 3]
    assert both.summary().devices == {"cpu": "tcp", "ext": "dummy"}

    y[...] = 1
    others = [np.ones(3), np.ones(2)]
    with dist.coalescing_manager():
        dist.all_reduce(others[0])
        dist.all_reduce(y)
        dist.all_reduce(others[1])
    assert [array.tolist() for array in (*others, y)] == [[2] * 3, [2] * 2, [0] * 4]

    # The same ranks, the same device type, another backend.
    zeros = dist.new_group(backend="cpu:dummy", group_desc="zeros")
    z = np.ones(4)
    first = issue(z)
    first.wait()
    assert z.tolist() == [2.0] * 4
    dist.all_reduce(z, group=zeros)
    assert z.tolist() == [0.0] * 4
    with pytest.raises(ValueError, match="no backend for device type 'ext'"):
        dist.all_reduce(y, group=zeros)
    dist.destroy_process_group()


def test_it_stands_beside_tcp_in_one_group_and_in_two(site: Path) -> None:
    run_ranks(2, beside_tcp, str(site))


# -- one rank: the thread, the Work, the end ---------------------------------


@pytest.fixture(scope="module")
def package(site: Path) -> Iterator[ModuleType]:
    """The module `rankscope_dummy`, from the installed package."""
    sys.path.insert(0, str(site))
    yield importlib.import_module("rankscope_dummy")
    sys.path.remove(str(site))


Join = Callable[..., dist.ProcessGroup]


@pytest.fixture
def join(tmp_path: Path, package: ModuleType) -> Iterator[Join]:
    """Make the default group of one rank, at the given bytes per second."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    threads = psutil.Process().num_threads()

    def make(bytes_per_second: float = float("inf"), **more: Any) -> dist.ProcessGroup:
        package.register("slow", bytes_per_second)
        dist.init_process_group("cpu:slow", store=store, rank=0, world_size=1, **more)
        recorder.clear()
        return world.get_group()

    yield make
    dist.destroy_process_group()
    store.close()
    del dist.Backend.registry["slow"]
    until(lambda: psutil.Process().num_threads() <= threads)


MEBI = 1 << 20


def test_it_runs_on_its_own_thread_while_python_computes(join: Join) -> None:
    join(bytes_per_second=8 * MEBI)
    x = np.ones(4 * MEBI, np.uint8)
    work = issue(x)
    seen, turns = [], 0
    # No call in this loop lets the GIL go on purpose: the thread needs it for
    # its two reports only, and gets it by the interpreter's own switching.
    while not work.is_completed():
        turns += 1
        if work.state is WorkState.STARTED:
            seen.append(work.progress)
    assert turns > 1000
    assert seen == sorted(seen)
    assert len(set(seen)) > 10
    assert not x.any()
    assert work.duration_ns > 0.4e9


def test_ops_queue_in_order_and_each_start_is_its_own(join: Join) -> None:
    group = join(bytes_per_second=2 * MEBI)
    arrays = [np.ones(MEBI, np.uint8) for _ in range(2)]
    first, second = [issue(x) for x in arrays]
    until(lambda: first.state is WorkState.STARTED)
    assert second.state is WorkState.SCHEDULED
    assert group.summary().oldest.state == "started"
    with pytest.raises(dist.DistTimeoutError, match="still in flight"):
        second.wait(timeout=0.05)
    second.wait()
    assert second.started_ns >= first.completed_ns
    assert second.duration_ns == second.completed_ns - second.started_ns
    assert [entry["state"] for entry in recorder.dump()] == ["completed"] * 2


def test_what_the_base_class_builds_stands_on_it(join: Join) -> None:
    join()
    x, many = np.ones(6), [np.ones(n) for n in (1, 2, 3)]
    dist.all_reduce(x, ReduceOp.AVG)
    out = np.ones(6)
    work = dist.reduce_scatter_tensor(out, np.ones(6), async_op=True)
    assert work.get_future().result(10)[0] is out
    dist.all_reduce_coalesced(many)
    gathered = np.ones(2)
    dist.all_gather_into_tensor(gathered, np.ones(2))
    for array in (x, out, *many, gathered):
        assert not array.any()

    async def reduced(array: np.ndarray) -> Any:
        return await issue(array)

    y = np.ones(3)
    assert asyncio.run(reduced(y))[0] is y
    assert not y.any()


@pytest.mark.parametrize("dtype", ["bool", "float16", "complex128", "int8"])
def test_every_dtype_and_shape_will_do(join: Join, dtype: str) -> None:
    join()
    for shape in [(), (1,), (3, 5), (70_001,)]:
        x = np.ones(shape, dtype)
        dist.all_reduce(x)
        assert not x.any()


def has_begun(work: Any) -> bool:
    return work.progress > 0


def test_an_abort_stops_in_the_middle_and_lets_go_of_everything(join: Join) -> None:
    join(bytes_per_second=8 * MEBI)
    arrays = [np.ones(16 * MEBI, np.uint8) for _ in range(2)]
    gone = [weakref.ref(x) for x in arrays]
    running, queued = [issue(x) for x in arrays]
    until(partial(has_begun, running))
    dist.abort_process_group(reason="enough")
    written = running.op.bytes_done
    for work in (running, queued):
        with pytest.raises(dist.DistAbortedError, match="all_reduce #.*enough"):
            work.wait()
        assert work.state is WorkState.ABORTED
    assert 0 < written < 16 * MEBI
    # Nothing was written after abort() returned, and nothing of the second.
    assert not arrays[0][:written].any()
    assert arrays[0][written:].all()
    assert arrays[1].all()
    assert running.op.bytes_done == written

    dist.rebuild_process_group()
    x = np.ones(3)
    dist.all_reduce(x)
    assert not x.any()
    del arrays, running, queued, work
    until(lambda: gc.collect() >= 0 and not any(ref() is not None for ref in gone))


def test_the_groups_timeout_ends_a_slow_op(join: Join) -> None:
    join(bytes_per_second=MEBI, timeout=0.3)
    with pytest.raises(dist.DistTimeoutError, match=r"all_reduce #1 .* 0\.3 s"):
        dist.all_reduce(np.ones(16 * MEBI, np.uint8))


def test_cycles_of_abort_and_rebuild_leave_no_thread(join: Join) -> None:
    join(bytes_per_second=MEBI)
    threads = psutil.Process().num_threads()
    for _ in range(30):
        work = issue(np.ones(MEBI, np.uint8))
        dist.abort_process_group(reason="again")
        assert work.state is WorkState.ABORTED
        dist.rebuild_process_group()
    # The recorder's watch and the like come once; a thread each would be 30.
    until(lambda: psutil.Process().num_threads() <= threads + 3)


def test_the_last_reference_may_go_on_the_thread_itself(package: ModuleType) -> None:
    threads = psutil.Process().num_threads()
    holder = [package.DummyBackend(0, 1, 4.0 * MEBI)]
    work = holder[0].all_reduce(np.ones(MEBI, np.uint8), ReduceOp.SUM)
    work.add_done_callback(lambda _: holder.clear())
    work.wait(10)
    until(lambda: not holder)
    until(lambda: psutil.Process().num_threads() <= threads)


def test_a_callback_that_raises_is_reported_and_the_thread_goes_on(
    join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    join(bytes_per_second=4 * MEBI)
    work = issue(np.ones(MEBI, np.uint8))
    work.add_done_callback(lambda _: {"a": 1}["route"])
    work.wait()
    until(lambda: "KeyError: 'route'" in caplog.text)
    assert "a callback of all_reduce #1 of group 'default' on rank 0" in caplog.text
    x = np.ones(3)
    dist.all_reduce(x)
    assert not x.any()


SCRIPT = """
    import sys
    import numpy as np
    import rankscope as dist

    sys.path.insert(0, {site!r})
    import rankscope_dummy
    rankscope_dummy.register("slow", 1e6)
    store = dist.FileStore({path!r}, 1)
    dist.init_process_group("cpu:slow", store=store, rank=0, world_size=1)
    dist.all_reduce(np.ones(3))
    work = dist.all_reduce(np.ones(20_000_000, np.uint8), async_op=True)
    print("leaving")
"""


def test_a_program_may_end_with_an_op_in_flight(site: Path, tmp_path: Path) -> None:
    script = textwrap.dedent(SCRIPT).format(site=str(site), path=str(tmp_path / "s"))
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


# -- without a Python class --------------------------------------------------------


def twinless(me: Rank, folder: str) -> None:
    sys.path.insert(0, folder)
    module = importlib.import_module("rankscope_twinless")
    assert module.Twinless.__mro__[1] is dist.Backend
    dist.init_process_group("cpu:twinless", timeout=30)
    x = np.arange(4.0)
    dist.all_reduce(x)
    assert x.tolist() == [0, 2, 4, 6]
    # What the base class makes of it, and what the group does for it.
    mean, part = np.ones(3), np.zeros(2)
    dist.all_reduce(mean, ReduceOp.AVG)
    dist.reduce_scatter_tensor(part, np.ones(4))
    assert (mean.tolist(), part.tolist()) == ([1, 1, 1], [2, 2])
    work = issue(x)
    assert work.wait()
    assert work.sequence_number == 4
    dist.barrier()
    with pytest.raises(TypeError, match="float64 only"):
        dist.all_reduce(np.ones(2, np.int32))
    with pytest.raises(NotImplementedError, match="'twinless' does not implement send"):
        dist.send(x, 1 - me.rank)
    dist.all_reduce(x)
    assert world.get_group().status.collective_seq == 6
    assert x.tolist() == [0, 8, 16, 24]
    me.meet("end")
    dist.destroy_process_group()


def test_an_extension_may_make_the_subclass_itself(tmp_path: Path) -> None:
    import pybind11

    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    subprocess.run(
        [
            *(_COMPILER, "-std=c++17", "-shared", "-fPIC", "-O1"),
            *(f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"),
            *(str(Path(__file__).with_name("twinless.cpp")), "-o"),
            str(tmp_path / f"rankscope_twinless{suffix}"),
        ],
        check=True,
    )
    run_ranks(2, twinless, str(tmp_path))
