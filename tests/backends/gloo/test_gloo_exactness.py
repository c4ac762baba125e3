"""gloo through the public API: exact, in order, patient, and clean afterwards."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import psutil
import pytest

import rankscope as dist
from rankscope.backends.conformance import exact, reference
from rankscope.backends.conformance.checker import Checker
from rankscope.backends.conformance.ranks import Rank, Ranks, run_ranks
from rankscope.backends.conformance.trial import HostArrays
from rankscope.backends.conformance.waiting import until
from rankscope.backends.gloo.library import gloo_options, installed
from rankscope.backends.groups.summary import GroupStatus
from rankscope.backends.groups.world import world as groups
from tests.backends import whole_surface
from tests.backends.scripts import script

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        not dist.is_gloo_available(), reason="no gloo library for this Python"
    ),
]


@contextlib.contextmanager
def world(timeout: float = 60, backend: str = "gloo") -> Iterator[None]:
    """The default group, from the environment that Ranks sets."""
    dist.init_process_group(backend, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def everything(me: Rank, async_op: bool) -> int:
    with world():
        return whole_surface.check_everything(Checker(HostArrays(), async_op=async_op))


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.soak)])
def test_every_collective_is_exact(size: int) -> None:
    counts = run_ranks(size, everything, False, timeout=170)
    assert len(set(counts)) == 1
    assert counts[0] > 1000


@pytest.mark.soak
def test_every_collective_is_exact_when_asynchronous() -> None:
    counts = run_ranks(3, everything, True, timeout=170)
    assert len(set(counts)) == 1


def the_rest(me: Rank) -> None:
    with world():
        whole_surface.built_on_ops()


def other_devices(me: Rank) -> Mapping[str, str]:
    with world(backend="cpu:gloo,ext:gloo,cuda:nccl"):
        whole_surface.staged()
        x = np.ones(3)
        dist.all_reduce(x)
        return groups.summary()[0].devices


def test_arrays_of_another_device_are_staged_through_host_memory() -> None:
    for devices in run_ranks(3, other_devices):
        assert devices == {"cpu": "gloo", "ext": "gloo", "cuda": "nccl (not built)"}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_objects_sparse_arrays_and_batches(size: int) -> None:
    run_ranks(size, the_rest)


# -- what gloo cannot reduce -----------------------------------------------


BXOR = dist.ReduceOp.BXOR
_FOLD: dict[dist.ReduceOp, Any] = {
    **reference.NUMPY,
    dist.ReduceOp.BAND: np.bitwise_and,
    dist.ReduceOp.BOR: np.bitwise_or,
    dist.ReduceOp.BXOR: np.bitwise_xor,
}


def integers(me: Rank) -> bool:
    """What gloo's library does not compute."""

    def held(size: int, dtype: str) -> list[np.ndarray]:
        drawn = [np.random.default_rng([r, size]) for r in range(me.size)]
        if dtype == "bool":
            return [one.integers(0, 2, size).astype(bool) for one in drawn]
        limits = np.iinfo(dtype)
        return [
            one.integers(limits.min, limits.max, size, dtype, endpoint=True)
            for one in drawn
        ]

    def fold(op: dist.ReduceOp, arrays: list[np.ndarray]) -> np.ndarray:
        return functools.reduce(_FOLD[op], arrays)

    with world():
        for dtype in ("bool", "int16", "uint16", "int64"):
            for size in (5, 40_000, 1_500_001 if dtype != "int64" else 300_001):
                for op in _FOLD:
                    if size > 40_000 and op not in (BXOR, dist.ReduceOp.SUM):
                        continue
                    all_ = held(size, dtype)
                    x = all_[me.rank].copy()
                    dist.all_reduce(x, op)
                    np.testing.assert_array_equal(x, fold(op, all_))
            all_ = held(7, dtype)
            x = all_[me.rank].copy()
            dist.reduce(x, 1, BXOR)
            wanted = fold(BXOR, all_) if me.rank == 1 else all_[me.rank]
            np.testing.assert_array_equal(x, wanted)
            parts = [one.copy() for one in held(3 * me.size, dtype)]
            out = np.zeros(3, dtype)
            dist.reduce_scatter_tensor(out, parts[me.rank], BXOR)
            mine = slice(3 * me.rank, 3 * me.rank + 3)
            np.testing.assert_array_equal(out, fold(BXOR, [p[mine] for p in parts]))
        return True


@pytest.mark.parametrize("size", [2, 3])
def test_integers_of_16_bits_bool_and_bitwise_reductions(size: int) -> None:
    assert all(run_ranks(size, integers))


def refusals(me: Rank) -> list[str]:
    seen = []
    with world():
        for dtype in ("int16", "float32", "bool", "complex64"):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.BOR, dist.ReduceOp.MAX):
                held = [reference.data(r, 9, dtype) for r in range(2)]
                x = held[me.rank].copy()
                try:
                    dist.all_reduce(x, op)
                except (TypeError, ValueError) as error:
                    np.testing.assert_array_equal(x, held[me.rank])
                    seen.append(f"{dtype} {op.name}: {type(error).__name__} {error}")
                else:
                    wanted = _FOLD[op](*held)
                    np.testing.assert_array_equal(x, wanted)
        y = np.ones(3)
        dist.all_reduce(y)
        assert y.tolist() == [2.0, 2.0, 2.0]
    return seen


def test_a_reduction_gloo_cannot_do_honestly_is_refused_by_all_ranks_alike() -> None:
    first, second = run_ranks(2, refusals)
    assert [text.split(":")[0] for text in first] == [
        text.split(":")[0] for text in second
    ]
    refused = {text.split(":")[0] for text in first}
    assert refused == {"float32 BOR", "complex64 BOR", "complex64 MAX"}
    for text in first:
        dtype = text.split()[0]
        assert dtype in text.split(":", 1)[1], text


# -- a thousand collectives over two overlapping groups ---------------------


def footprint() -> dict[str, int]:
    """Threads, descriptors, children of this process; resident MiB of all."""
    gc.collect()
    me = psutil.Process()
    family = [me, *me.children(recursive=True)]
    return {
        "threads": threading.active_count(),
        "descriptors": sum(process.num_fds() for process in family),
        "processes": len(family),
        "MiB": sum(process.memory_info().rss for process in family) >> 20,
    }


def more(after: dict[str, int], before: dict[str, int]) -> bool:
    return any(after[what] > before[what] for what in before if what != "MiB")


def soak(me: Rank, count: int) -> tuple[dict[str, int], dict[str, int]]:
    with world():
        low = dist.new_group([0, 1, 2])
        high = dist.new_group([1, 2, 3])
        mine = [group for group in (low, high) if group]
        plan = random.Random(5)

        def run(operations: int) -> None:
            for _ in range(operations):
                group = plan.choice([low, high])
                name = plan.choice(
                    [*exact.WITHOUT_REDUCE_OP[:-1], *exact.WITH_REDUCE_OP]
                )
                size = plan.choice([1, 13, 1009, 70_001])
                async_op = plan.random() < 0.3
                if group not in mine:
                    continue
                one(name, size, group, async_op)

        def one(name: str, size: int, group: Any, async_op: bool) -> None:
            with groups.default_group(group.group_name):
                checker = Checker(async_op=async_op)
                if name in exact.WITH_REDUCE_OP:
                    getattr(checker, name)(size, "float64", dist.ReduceOp.SUM)
                elif name in ("all_to_all", "all_to_all_single", "all_gather"):
                    getattr(checker, name)(size, "int64")
                else:
                    rooted(checker, name, size, group)

        run(count // 4)
        before = footprint()
        run(count - count // 4)
        # The thread for ops that nobody waits for, and the pipe that it sleeps at, end
        # some time after the last one.
        until(lambda: not more(footprint(), before), 20)
        after = footprint()
    left = psutil.Process().children(recursive=True)
    assert not left, left
    return before, after


def rooted(checker: Checker, name: str, size: int, group: Any) -> None:
    """The ops that the checker addresses by rank: of the world, here."""
    ranks = dist.get_process_group_ranks(group)
    held = reference.data(ranks[1], size, "int64")
    if name == "broadcast":
        x = held.copy() if checker.rank == 1 else np.zeros_like(held)
        checker.done(dist.broadcast(x, ranks[1], async_op=checker.async_op))
        np.testing.assert_array_equal(x, held)
    elif name == "all_gather_into_tensor":
        checker.all_gather_into_tensor(size, "int64")
    elif name == "gather":
        outs = [np.zeros_like(held) for _ in ranks] if checker.rank == 1 else None
        checker.done(dist.gather(held, outs, ranks[1], async_op=checker.async_op))
        for out in outs or []:
            np.testing.assert_array_equal(out, held)
    else:
        parts = [held + r for r in ranks] if checker.rank == 1 else None
        out = np.zeros_like(held)
        checker.done(dist.scatter(out, parts, ranks[1], async_op=checker.async_op))
        np.testing.assert_array_equal(out, held + ranks[checker.rank])


@pytest.mark.soak
def test_a_thousand_mixed_collectives_leave_everything_as_it_was() -> None:
    for before, after in run_ranks(4, soak, 1000, timeout=170):
        assert after.pop("MiB") <= before.pop("MiB") + 40
        assert all(after[what] <= before[what] for what in before), (before, after)


# -- order, patience, timeouts ----------------------------------------------


def in_order(me: Rank) -> list[float]:
    with world():
        x = np.array([float(me.rank + 1)])
        works = []
        for step in range(40):
            if step % 2:
                works.append(dist.broadcast(x, step % 4, async_op=True))
            else:
                works.append(dist.all_reduce(x, async_op=True))
        works[-1].wait()
        assert all(work.is_success() for work in works)
        starts = [work.started_ns for work in works]
        assert starts == sorted(starts)
        return x.tolist()


def test_ops_of_a_group_run_in_the_order_of_issue() -> None:
    results = run_ranks(4, in_order)
    assert results == [[10.0 * 4.0**19]] * 4


LATE = 45.0


PATIENT = [1000, 50_000, 1 << 20]


def patient(me: Rank, late: float, library: str) -> list[float]:
    """Each op in a group of its own, as the ops of one group wait for each other."""
    with world(timeout=300), gloo_options(library=library):
        members = [dist.new_group([0, 1]) for _ in PATIENT]
        for group in (None, *members):
            dist.barrier(group=group)
        if me.rank == 1:
            threading.Event().wait(late)
        began = time.monotonic()
        arrays = [np.ones(size) for size in PATIENT]
        works = [
            dist.all_reduce(x, group=group, async_op=True)
            for x, group in zip(arrays, members, strict=True)
        ]
        y = np.full(30_000, float(me.rank))
        works.append(dist.irecv(y, 1) if me.rank == 0 else dist.isend(y, 0))
        seconds = []
        for work in works:
            work.wait()
            seconds.append(time.monotonic() - began)
        assert all((x == 2.0).all() for x in arrays)
        assert (y == 1.0).all()
        return seconds


@pytest.fixture(scope="module", autouse=True)
def waiting_for_a_late_rank(
    _module_leaves_nothing: None,
) -> Iterator[dict[str, Ranks]]:
    """Two ranks per library of the last test here; they wait during the other tests."""
    with contextlib.ExitStack() as end:
        yield {
            library: end.enter_context(Ranks(2, patient, LATE, library, timeout=600))
            for library in installed()
        }


def impatient(me: Rank) -> tuple[float, str]:
    with world(timeout=3):
        dist.barrier()
        if me.rank == 1:
            me.listen()
            return 0.0, ""
        began = time.monotonic()
        with pytest.raises(dist.DistTimeoutError) as caught:
            dist.all_reduce(np.ones(1000))
        took = time.monotonic() - began
        with pytest.raises(dist.DistAbortedError, match="timed out"):
            dist.barrier()
        return took, str(caught.value)


def test_a_timeout_of_3_s_fires_after_3_s_and_says_what_to_do() -> None:
    with Ranks(2, impatient) as ranks:
        until(lambda: ranks._receive([0], time.monotonic() + 30))
        ranks.tell(1, "go")
        (took, message), _ = ranks.wait()
    assert 2.9 < took < 15
    assert "all_reduce #2 of group 'default' on rank 0" in message
    assert "3 s" in message
    assert "rebuild" in message


def abort_and_rebuild(me: Rank) -> list[float]:
    with world():
        dist.barrier()
        seconds = []
        for attempt in range(3):
            if me.rank == 0:
                # Everybody hangs in it; one rank has not even entered.
                timer = threading.Timer(0.3, dist.abort_process_group, (None, "test"))
                timer.start()
            if me.rank != 3:
                with pytest.raises(dist.DistAbortedError, match="test"):
                    dist.all_reduce(np.ones(100 + attempt))
            else:
                until(lambda: dist.group.WORLD.aborted)
            began = time.monotonic()
            dist.rebuild_process_group()
            x = np.full(10, float(me.rank))
            dist.all_reduce(x)
            seconds.append(time.monotonic() - began)
            assert x.tolist() == [6.0] * 10
        return seconds


def test_an_abort_reaches_every_rank_and_the_group_is_rebuilt() -> None:
    for seconds in run_ranks(4, abort_and_rebuild):
        assert max(seconds) < 20


def monitored(me: Rank) -> list[str]:
    with world():
        dist.monitored_barrier(timeout=30)
        said = []
        for every in (False, True):
            if me.rank in (0, 2):
                with pytest.raises(dist.DistBackendError) as caught:
                    dist.monitored_barrier(timeout=0.5, wait_all_ranks=every)
                said.append(str(caught.value))
            else:
                # Keep the numbers in step: a barrier that cannot succeed here.
                with pytest.raises(dist.DistBackendError):
                    me_too_late(me)
        dist.barrier()
        return said


def me_too_late(me: Rank) -> None:
    """Enter the barrier when rank 0 has given its verdict."""
    store, number = dist.group.WORLD.store, dist.group.WORLD.status.collective_seq + 1
    store.wait([f"monitored_barrier/{number}/verdict"], timeout=30)
    dist.monitored_barrier(timeout=0.5)


def test_monitored_barrier_names_who_is_missing_and_the_group_stays_usable() -> None:
    said = run_ranks(4, monitored)
    assert "rank 1 did not reach it" in said[0][0]
    assert "ranks 1, 3 did not reach it" in said[0][1]
    assert said[2] == said[0]


# -- what else a rank can do meanwhile --------------------------------------


def responsive(me: Rank) -> int:
    with world():
        dist.barrier()
        if me.rank == 1:
            me.listen()
            dist.all_reduce(np.ones(10))
            return 0
        count, over = 0, threading.Event()

        def counting() -> None:
            nonlocal count
            while not over.wait(0.001):
                count += 1
                if count == 100:
                    me.report("counted")

        thread = threading.Thread(target=counting)
        thread.start()
        dist.all_reduce(np.ones(10))
        over.set()
        thread.join()
        return count


def test_other_threads_of_a_rank_run_while_an_op_is_in_flight() -> None:
    with Ranks(2, responsive) as ranks:
        # Rank 1 enters the op once the other thread of rank 0 has counted.
        assert ranks.next_report(0) == "counted"
        ranks.tell(1, "go")
        count, _ = ranks.wait()
    assert count >= 100


def statuses(me: Rank) -> GroupStatus:
    with world():
        dist.barrier()
        if me.rank == 1:
            me.listen()
        work = dist.all_reduce(np.ones(10), async_op=True)
        if me.rank == 0:
            summary = groups.summary
            until(lambda: summary()[0].oldest.state == "started")
            seen = summary()[0]
            me.report(seen)
        work.wait()
        return groups.summary()[0]


def test_a_hung_op_is_seen_as_started() -> None:
    with Ranks(2, statuses) as ranks:
        seen = ranks.next_report(0)
        ranks.tell(1, "go")
        after, _ = ranks.wait()
    assert seen.started.op == "all_reduce"
    assert seen.started.seq == 2
    assert seen.completed.seq == 1
    assert "test_gloo_exactness.py" in seen.oldest.source
    assert after.completed.seq == 2


# -- a plain script ----------------------------------------------------------

SCRIPT = """
import numpy as np
import rankscope as dist

dist.init_process_group("gloo", timeout=60)
x = np.full(4, float(dist.get_rank()))
dist.all_reduce(x)
pair = dist.new_group([0, 1])
if dist.get_rank() < 2:
    dist.broadcast(x, src=1, group=pair)
print(dist.get_rank(), x.tolist())
dist.destroy_process_group()
"""


def test_a_plain_script_needs_nothing_but_the_environment() -> None:
    for rank, (code, output) in enumerate(run_ranks(3, script, SCRIPT)):
        assert code == 0, output
        assert output == f"{rank} [3.0, 3.0, 3.0, 3.0]\n"


def only_two(me: Rank) -> float:
    with world():
        for _ in range(2):
            x = np.full(5, float(me.rank))
            if me.rank == 0:
                dist.send(x, 3)
            elif me.rank == 3:
                dist.recv(x, 0)
            me.report("done")
            me.listen()
            dist.rebuild_process_group()
        return float(x[0])


def test_a_send_between_two_ranks_does_not_wait_for_the_others_to_communicate() -> None:
    with Ranks(4, only_two) as ranks:
        for _ in range(2):
            for rank in range(4):
                ranks.next_report(rank)
            for rank in range(4):
                ranks.tell(rank, "go")
        assert ranks.wait() == [0.0, 1.0, 2.0, 0.0]


def smaller(me: Rank) -> float:
    with world():
        dist.barrier()
        if me.rank == 1:
            # Out of the barrier: the abort by the others would end it with an error.
            me.report("in")
            me.listen()
            return 0.0
        work = dist.all_reduce(np.ones(3), async_op=True)
        # The first to shrink it ends it for the other.
        me.report("in")
        me.listen()
        left = dist.shrink_group([1], shrink_flags=dist.SHRINK_ABORT)
        x = np.full(5, me.rank + 1.0)
        dist.all_reduce(x, group=left)
        with pytest.raises(dist.DistAbortedError, match="go on without rank 1"):
            work.wait()
        me.report("done")
        return float(x[0])


def test_the_ranks_that_are_left_go_on_in_a_smaller_group() -> None:
    with Ranks(3, smaller) as ranks:
        for rank in range(3):
            ranks.next_report(rank)
        for rank in (0, 2):
            ranks.tell(rank, "go")
        for rank in (0, 2):
            ranks.next_report(rank)
        ranks.tell(1, "go")
        assert ranks.wait() == [4.0, 0.0, 4.0]


@pytest.mark.parametrize("library", list(installed()))
def test_a_rank_that_comes_45_s_late_is_waited_for(
    waiting_for_a_late_rank: dict[str, Ranks], library: str
) -> None:
    # gloo gives up after 30 s unless it is told to wait.
    waited, _ = waiting_for_a_late_rank[library].wait()
    assert len(waited) == len(PATIENT) + 1
    assert min(waited) > LATE - 1
