"""A backend made by subclassing only does what a built-in one does.

`StoreBackend` knows nothing but the public names. Here it goes through what
the built-in backends go through; what an author may get wrong is told clearly.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope import OpType, ReduceOp, WorkState
from rankscope.backends.conformance.checker import Checker
from rankscope.backends.conformance.ranks import Rank, Ranks, run_ranks
from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups.world import world
from rankscope.backends.interface.base import INTERFACE_VERSION
from rankscope.backends.interface.registry import builtin_devices
from rankscope.backends.work.flight_recorder import recorder
from tests.backends import whole_surface
from tests.backends.store_backend import StoreBackend, register
from tools import support_table


class FutureBackend(StoreBackend):
    """The same, its Works made of futures, as in c10d."""

    def _run(self, kind: OpType, function: Callable[..., Any], *args: Any) -> dist.Work:
        self._ops += 1
        future = self._thread.submit(function, self._ops, *args)
        return dist.create_work_from_future(future, kind)


BACKENDS = {"store": StoreBackend, "future": FutureBackend}


@contextlib.contextmanager
def joined(backend: str, timeout: float = 60) -> Iterator[dist.ProcessGroup]:
    """The default group, on this rank."""
    dist.Backend.register_backend(backend, BACKENDS[backend], devices="cpu")
    dist.init_process_group(f"cpu:{backend}", timeout=timeout)
    try:
        yield world.get_group()
    finally:
        dist.destroy_process_group()
    threads = [thread.name for thread in threading.enumerate()]
    assert not [name for name in threads if name.startswith("store-backend")]


# -- several ranks -----------------------------------------------------------


def exercise(me: Rank, backend: str, async_op: bool) -> int:
    with joined(backend):
        count = whole_surface.check_everything(
            Checker(async_op=async_op),
            sizes=[0, 7, 1009],
            reducible=["int32", "float64"],
            movable=["uint8", "bool", "complex128"],
        )
        whole_surface.built_on_ops()
    return count


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "backend", "async_op"), [(2, "future", False), (3, "store", True)]
)
def test_the_whole_surface(size: int, backend: str, async_op: bool) -> None:
    counts = run_ranks(size, exercise, backend, async_op)
    assert len(set(counts)) == 1
    assert counts[0] > 100


def late(me: Rank, backend: str) -> None:
    with joined(backend) as group:
        if me.rank == 1:
            me.listen()
        x = np.full(4, me.rank + 1.0)
        half = np.zeros(2)
        works = [
            dist.all_reduce(x, ReduceOp.AVG, async_op=True),
            dist.reduce_scatter_tensor(half, np.arange(4.0), async_op=True),
            dist.barrier(async_op=True),
        ]
        if me.rank == 0:
            # Nothing blocked, though the other rank has entered none of them;
            # nor did the fallbacks, AVG and reduce_scatter.
            with pytest.raises(
                dist.DistTimeoutError, match=r"all_reduce #1.*wait\(timeout=0.2 s\)"
            ):
                works[0].wait(timeout=0.2)
            assert works[0].state is WorkState.STARTED
            assert group.summary().in_flight == 3
            me.report("all in flight")
        for work in reversed(works):
            assert work.wait()
        assert x.tolist() == [1.5] * 4
        assert half.tolist() == [[0.0, 2.0], [4.0, 6.0]][me.rank]
        assert works[0].result()[0] is x
        assert [work.sequence_number for work in works] == [1, 2, 3]


@pytest.mark.processes
@pytest.mark.parametrize("backend", BACKENDS)
def test_async_ops_wait_for_a_late_rank_without_blocking(backend: str) -> None:
    with Ranks(2, late, backend) as ranks:
        ranks.next_report(0)
        ranks.tell(1, "go")
        ranks.wait()


def has_started(work: Any) -> bool:
    return work.state is WorkState.STARTED


def aborts(me: Rank, backend: str) -> list[float]:
    seconds = []
    with joined(backend) as group:
        for attempt in range(3):
            dist.barrier()
            if me.rank == 1:
                # Only now: an abort would reach this rank within its barrier.
                group.store.set("through the barrier", b"")
            else:
                group.store.wait(["through the barrier"])
            if me.rank == 0:
                x = np.full(4, 5.0)
                running = dist.all_reduce(x, async_op=True)
                queued = dist.broadcast(x, src=1, async_op=True)
                until(partial(has_started, running))
                began = time.monotonic()
                dist.abort_process_group(reason=f"attempt {attempt}")
                for work in (running, queued):
                    with pytest.raises(
                        dist.DistAbortedError, match=f"rank 0.*attempt {attempt}"
                    ):
                        work.wait()
                    assert work.state is WorkState.ABORTED
                seconds.append(time.monotonic() - began)
                assert x.tolist() == [5.0] * 4
            else:
                until(lambda: group.aborted)
                with pytest.raises(dist.DistAbortedError, match=f"attempt {attempt}"):
                    dist.barrier()
            dist.rebuild_process_group()
    return seconds


@pytest.mark.processes
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_abort_ends_what_runs_and_what_is_queued(backend: str) -> None:
    seconds, _ = run_ranks(2, aborts, backend)
    # The quickest: what else runs on the machine only adds to a time.
    assert min(seconds) < 2


def times_out(me: Rank) -> str:
    with joined("store") as group:
        dist.barrier()
        group.set_timeout(1)
        if me.rank == 1:
            until(lambda: group.aborted)
            return str(group.aborted)
        with pytest.raises(dist.DistTimeoutError) as caught:
            dist.all_reduce(np.ones(3))
        return str(caught.value)


@pytest.mark.processes
def test_the_groups_timeout_ends_an_op_on_every_rank() -> None:
    error, reason = run_ranks(2, times_out)
    assert "all_reduce #2 of group 'default' on rank 0" in error
    assert "1 s" in error
    assert "all_reduce #2" in reason
    assert "timed out after 1 s" in reason


def coalesces(me: Rank) -> None:
    with joined("store") as group:
        arrays = [np.full(n, me.rank + n, np.float64) for n in range(1, 9)]
        gathered, means = np.zeros(6), np.full(2, me.rank * 2)
        lists = [[np.zeros(n + rank) for rank in range(2)] for n in range(2)]
        with dist.coalescing_manager(async_ops=True) as manager:
            for array in arrays:
                dist.all_reduce(array)
            dist.all_gather_into_tensor(gathered, np.full(3, float(me.rank)))
            dist.all_reduce(means, ReduceOp.AVG)
            for n, outputs in enumerate(lists):
                dist.all_gather(outputs, np.full(n + me.rank, float(n + me.rank)))
        manager.wait(timeout=30)
        for n, array in enumerate(arrays, 1):
            assert np.all(array == 2 * n + 1)
        assert gathered.tolist() == [0, 0, 0, 1, 1, 1]
        assert means.tolist() == [1, 1]
        assert [[x.tolist() for x in row] for row in lists] == [
            [[], [1]],
            [[1], [2, 2]],
        ]
        backend = group.current.backends["cpu"]
        assert isinstance(backend, StoreBackend)
        assert backend._ops == 4  # one for each run of like ops
        entries = [entry for entry in recorder.dump() if entry["group"] == "default"]
        assert [entry["op_id"] for entry in entries] == list(range(1, 13))
        assert {entry["collective_seq_id"] for entry in entries} == {1}
        assert {entry["state"] for entry in entries} == {"completed"}


@pytest.mark.processes
def test_a_coalesced_batch_is_one_op_for_each_run() -> None:
    run_ranks(2, coalesces)


# -- one rank: the rest ------------------------------------------------------


class Gated(StoreBackend):
    """Runs an all_reduce when the test opens the gate."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        super().__init__(store, rank, size, timeout)
        self.gate = threading.Event()

    def all_reduce(self, tensor: Any, op: ReduceOp) -> dist.Work:
        return self._run(OpType.ALL_REDUCE, lambda number: self.gate.wait(30))

    def abort(self, reason: str) -> None:
        self.gate.set()
        super().abort(reason)


Join = Callable[..., dist.ProcessGroup]


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    """Make the default group of one rank over a backend with the given creator."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    # The built-in backends register once, when they are imported.
    names = {*dist.Backend.registry, *builtin_devices()}

    def make(creator: Any, timeout: float = 60) -> dist.ProcessGroup:
        dist.Backend.register_backend("own", creator, devices="cpu")
        dist.init_process_group(
            "own", store=store, rank=0, world_size=1, timeout=timeout
        )
        recorder.clear()
        return world.get_group()

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()
    store.close()
    for name in set(dist.Backend.registry) - names:
        del dist.Backend.registry[name]


def test_the_extended_api_tells_the_creator_of_its_group(join: Join) -> None:
    known: list[Any] = []

    def creator(options: Any, pg_options: Any) -> StoreBackend:
        known.append((options, pg_options))
        seconds = options.timeout.total_seconds()
        return StoreBackend(
            options.store, options.group_rank, options.group_size, seconds
        )

    group = join(Gated)
    dist.Backend.register_backend("told", creator, extended_api=True, devices="cpu")
    told = dist.new_group([0], backend="told", timeout=7, group_desc="told")
    x = np.ones(2)
    dist.all_reduce(x, group=told)
    ((options, pg_options),) = known
    assert (options.group_rank, options.group_size) == (0, 1)
    assert options.timeout == timedelta(seconds=7)
    assert options.group_id == told.group_name != group.group_name
    assert options.global_ranks_in_group == [0]
    assert pg_options is None


def test_a_premultiplied_sum_stands_on_sum(join: Join) -> None:
    group = join(StoreBackend)
    half = dist.make_nccl_premul_sum(0.5)
    x, narrow = np.array([2.0, 4.0]), np.array([3, 2049], np.float16)
    dist.all_reduce(x, half)
    assert x.tolist() == [1.0, 2.0]
    dist.reduce(x, 0, half)
    assert x.tolist() == [0.5, 1.0]
    # In float32, and rounded once: 2049 is no float16, half of 2048 is one.
    dist.all_reduce(narrow, half)
    assert narrow.tolist() == [1.5, 1024.0]
    out, given = np.zeros(2, np.float32), np.array([2, 6], np.float32)
    dist.reduce_scatter(out, [given], half)
    assert (out.tolist(), given.tolist()) == ([1.0, 3.0], [2.0, 6.0])
    dist.reduce_scatter_tensor(out, given, half)
    assert out.tolist() == [1.0, 3.0]
    y, z = np.full(3, 8.0), np.full(2, 8.0)
    with dist.coalescing_manager():
        dist.all_reduce(x, half)
        dist.all_reduce(y, half)
        dist.all_reduce(z)
    assert (x.tolist(), y.tolist(), z.tolist()) == ([0.25, 0.5], [4.0] * 3, [8.0] * 2)
    issued = group.status.collective_seq
    with pytest.raises(TypeError, match="PREMUL_SUM is not defined for arrays of int"):
        dist.all_reduce(np.ones(2, np.int32), half)
    assert group.status.collective_seq == issued


def test_an_op_in_the_queue_has_not_started(join: Join) -> None:
    group = join(Gated)
    first = dist.all_reduce(np.ones(3), async_op=True)
    second = dist.all_reduce(np.ones(3), async_op=True)
    gated = group.current.backends["cpu"]
    assert isinstance(gated, Gated)
    until(lambda: first.state is WorkState.STARTED)
    assert second.state is WorkState.SCHEDULED
    gated.gate.set()
    second.wait()
    assert second.started_ns >= first.completed_ns
    assert second.duration_ns == second.completed_ns - second.started_ns
    entries = recorder.dump()
    assert [entry["state"] for entry in entries] == ["completed", "completed"]
    assert entries[1]["time_started_ns"] == second.started_ns
    assert entries[1]["frame"]["file"] == __file__


def test_a_queued_op_whose_group_is_aborted_is_never_run(join: Join) -> None:
    ran = list[str]()

    class Noting(Gated):
        def broadcast(self, tensor: Any, src: int) -> dist.Work:
            return self._run(OpType.BROADCAST, lambda number: ran.append("broadcast"))

    join(Noting)
    dist.all_reduce(np.ones(3), async_op=True)
    queued = dist.broadcast(np.ones(3), src=0, async_op=True)
    dist.abort_process_group(reason="enough")
    assert queued.state is WorkState.ABORTED
    assert ran == []


def test_hooks_awaiting_futures_and_callbacks(join: Join) -> None:
    join(StoreBackend)
    seen: list[tuple[str, bool]] = []
    hook = dist.add_op_hook(
        post=lambda record, work: seen.append((record.op_type.value, work.is_success()))
    )
    try:
        x = np.arange(3.0)

        async def reduced() -> Any:
            work = dist.all_reduce(x, async_op=True)
            assert isinstance(work, dist.Work)
            return await work

        assert asyncio.run(reduced())[0] is x
        out = [np.zeros(3)]
        work = dist.all_gather(out, x, async_op=True)
        assert work.get_future().result(10)[0] is out[0]
        work.synchronize()
    finally:
        hook.remove()
    until(lambda: len(seen) == 2)
    assert seen == [("all_reduce", True), ("all_gather", True)]


def test_timing_is_switched_off_for_works_made_from_then_on(join: Join) -> None:
    group = join(StoreBackend)
    before = dist.barrier(async_op=True)
    dist.enable_timing(group, False)
    after = dist.barrier(async_op=True)
    after.wait()
    assert before.duration_ns is not None
    assert after.duration_ns is None


def test_an_op_that_raises_fails_with_an_error_that_names_it(join: Join) -> None:
    class Broken(StoreBackend):
        def all_reduce(self, tensor: Any, op: ReduceOp) -> dist.Work:
            return self._run(OpType.ALL_REDUCE, lambda number: {"a": 1}["route"])

    group = join(Broken)
    with pytest.raises(
        dist.DistBackendError,
        match="all_reduce #1 of group 'default' on rank 0 .*failed: KeyError: 'route'",
    ) as caught:
        dist.all_reduce(np.ones(3))
    assert isinstance(caught.value.__cause__, KeyError)
    assert recorder.dump()[-1]["state"] == "failed"
    # What to make of it is the backend's to say: on_failure aborts the group.
    dist.barrier()
    group.current.backends["cpu"].on_failure("the route is gone")
    with pytest.raises(dist.DistAbortedError, match="the route is gone"):
        dist.barrier()


def test_an_op_it_lacks_is_refused_under_the_name_it_is_registered_by(
    join: Join,
) -> None:
    class Plain(dist.Backend):
        pass

    join(lambda store, rank, size, timeout: Plain(rank, size))
    for op, call in {
        "all_reduce": lambda: dist.all_reduce(np.ones(3)),
        "broadcast": lambda: dist.broadcast(np.ones(3), src=0),
        "all_gather": lambda: dist.all_gather_into_tensor(np.ones(3), np.ones(3)),
        "barrier": dist.barrier,
    }.items():
        with pytest.raises(
            NotImplementedError, match=f"backend 'own' does not implement {op}"
        ):
            call()


# -- what an author may get wrong -------------------------------------------


def test_a_creator_that_raises_is_named(join: Join) -> None:
    def connect(store: dist.Store, rank: int, size: int) -> dist.Backend:
        raise AssertionError("never called: it takes no timeout")

    join(connect)
    with pytest.raises(
        dist.DistBackendError,
        match="barrier in group 'default' on rank 0: backend 'own' could not be made: "
        ".*connect raised TypeError",
    ) as caught:
        dist.barrier()
    assert isinstance(caught.value.__cause__, dist.DistBackendError)


def test_a_creator_that_returns_no_backend_is_named(join: Join) -> None:
    join(lambda *_: None)
    with pytest.raises(
        dist.DistBackendError, match="returned a NoneType; expected a rankscope.Backend"
    ):
        dist.barrier()


@pytest.mark.parametrize(
    ("stated", "remedy"),
    [(0, "update the package that provides the backend"), (2, "update Rankscope")],
)
def test_a_backend_of_another_interface_version_is_refused(
    join: Join, stated: int, remedy: str
) -> None:
    closed = list[str]()

    class Other(StoreBackend):
        interface_version = stated

        def shutdown(self) -> None:
            super().shutdown()
            closed.append("closed")

    join(Other)
    with pytest.raises(
        dist.DistBackendError,
        match=f"backend 'own' is written for version {stated} of the backend "
        f"interface, and this Rankscope has version 1: {remedy}$",
    ):
        dist.barrier()
    assert closed == ["closed"]


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        (0, "backend 'own' is written for version 0 of the backend interface, and"),
        ("1", "backend 'own' states '1' as its interface_version; expected a number"),
    ],
)
def test_a_backend_of_an_interface_version_that_is_none_is_refused(
    join: Join, stated: object, reason: str
) -> None:
    other = type("Other", (StoreBackend,), {"interface_version": stated})
    join(other)
    with pytest.raises(dist.DistBackendError, match=reason):
        dist.barrier()


def test_a_backend_that_states_no_interface_version_is_of_the_first(join: Join) -> None:
    assert "interface_version" not in vars(StoreBackend)
    assert StoreBackend.interface_version == 1
    join(StoreBackend)
    dist.barrier()


@pytest.mark.parametrize("name", ["tcp", "gloo", "mpi", "ucx", "nccl"])
def test_a_built_in_backend_states_the_current_interface_version(name: str) -> None:
    kind = support_table.classes()[name]
    assert vars(kind)["interface_version"] == INTERFACE_VERSION


def test_a_method_that_returns_no_work_is_named(join: Join) -> None:
    class Forgetful(StoreBackend):
        def all_reduce(self, tensor: Any, op: ReduceOp) -> dist.Work:
            super().all_reduce(tensor, op)
            return None  # type: ignore[return-value]

    join(Forgetful)
    with pytest.raises(TypeError, match="all_reduce #1 .*NoneType; expected a Work"):
        dist.all_reduce(np.ones(3))
    assert recorder.dump()[-1]["state"] == "failed"
    dist.barrier()


def test_an_array_without_what_dispatch_needs_is_refused(join: Join) -> None:
    class Bare:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 12, 0

    group = join(StoreBackend)
    with pytest.raises(
        TypeError, match="tensor \\(Bare, on 'ext'\\) has no shape, dtype, size"
    ):
        dist.all_reduce(Bare())
    assert group.status.collective_seq == 0


class OnCard:
    """An array that is no numpy array, on a device type of its own."""

    def __init__(self, data: Any) -> None:
        self.data = np.array(data, np.float64)
        self.shape, self.size, self.dtype = (
            self.data.shape,
            self.data.size,
            self.data.dtype,
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return 12, 0


def test_arrays_of_another_kind_are_coalesced_one_by_one(join: Join) -> None:
    class Card(dist.Backend):
        def __init__(self, rank: int, size: int) -> None:
            super().__init__(rank, size)
            self.thread = ThreadPoolExecutor(1)

        def all_reduce(self, tensor: OnCard, op: ReduceOp) -> dist.Work:
            return dist.create_work_from_call(
                self.thread, lambda: tensor.data.__imul__(10), op_type=OpType.ALL_REDUCE
            )

        def shutdown(self) -> None:
            self.thread.shutdown()

    join(StoreBackend)
    dist.Backend.register_backend(
        "card", lambda store, rank, size, timeout: Card(rank, size), devices="ext"
    )
    both = dist.new_group(backend="cpu:own,ext:card", group_desc="both")
    cards, x = [OnCard([1, 2]), OnCard([3])], np.ones(2)
    with dist.coalescing_manager(both):
        for card in cards:
            dist.all_reduce(card, group=both)
        dist.all_reduce(x, group=both)
    assert [card.data.tolist() for card in cards] == [[10, 20], [30]]
    assert x.tolist() == [1, 1]


def test_register_makes_it_known_for_host_memory() -> None:
    register("kept")
    try:
        assert dist.BackendConfig("kept").device_backend_map == {"cpu": "kept"}
    finally:
        del dist.Backend.registry["kept"]
