"""The NCCL backend over a simulated GPU: see `gpu_simulation`.

What it says of NCCL itself is said by the tests over a stub of the library
(`test_nccl_library`) and, on a GPU, by ``tests/gpu``.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.waiting import until
from rankscope.backends.nccl import communicator
from rankscope.backends.nccl.backend import NCCLBackend
from rankscope.backends.nccl.communicator import ABORT_EACH, ABORT_WAIT
from rankscope.backends.nccl.stream import NCCLStream
from rankscope.backends.work.state import WorkState
from tests.backends.gpu_ranks import Rank, Ranks
from tests.backends.gpu_simulation import Simulation
from tools import support_table

OP = dist.ReduceOp
TYPES = ["int8", "uint8", "int32", "int64", "float16", "float32", "float64"]
MOVED = [*TYPES, "bool", "int16", "uint16", "complex64", "complex128"]
REAL_OPS = [OP.SUM, OP.PRODUCT, OP.MIN, OP.MAX, OP.AVG]


# -- exactness -----------------------------------------------------------------


def fold(op: dist.ReduceOp, arrays: list[np.ndarray]) -> np.ndarray:
    if arrays[0].dtype.kind == "b":
        any_ = op in (OP.SUM, OP.MAX)
        return (np.logical_or if any_ else np.logical_and).reduce(arrays)
    if op is OP.AVG:
        return (sum(arrays) / len(arrays)).astype(arrays[0].dtype)
    fold_ = {OP.SUM: np.add, OP.PRODUCT: np.multiply, OP.MIN: np.minimum}
    return fold_.get(op, np.maximum).reduce(arrays).astype(arrays[0].dtype)


def ops_of(dtype: str) -> list[dist.ReduceOp]:
    kind = np.dtype(dtype).kind
    if kind == "b":
        return [OP.SUM, OP.PRODUCT, OP.MIN, OP.MAX]
    return [OP.SUM, OP.AVG] if kind == "c" else REAL_OPS


@pytest.mark.parametrize("size", [1, 2, 4])
def test_reductions_are_exact(ranks: Ranks, size: int) -> None:
    def body(r: Rank) -> None:
        for dtype in [*TYPES, "bool", "complex64", "complex128"]:
            for op in ops_of(dtype):
                all_ = r.everybodys(7, dtype)
                x = r.random(7, dtype)
                dist.all_reduce(x, op, group=r.pg)
                r.synchronize()
                np.testing.assert_array_equal(x, fold(op, all_))

                root = size - 1
                x = r.random(7, dtype)
                dist.reduce(x, root, op, group=r.pg)
                r.synchronize()
                expected = fold(op, all_) if r.rank == root else all_[r.rank]
                np.testing.assert_array_equal(x, expected)

                parts = r.random(3 * size, dtype)
                out = r.array(np.zeros(3), dtype)
                dist.reduce_scatter_tensor(out, parts, op, group=r.pg)
                r.synchronize()
                total = fold(op, r.everybodys(3 * size, dtype))
                mine = slice(3 * r.rank, 3 * r.rank + 3)
                np.testing.assert_array_equal(out, total[mine])

                # Parts of different sizes: rank r has r elements.
                uneven = [r.random(p, dtype) for p in range(size)]
                out = r.array(np.zeros(r.rank), dtype)
                dist.reduce_scatter(out, uneven, op, group=r.pg)
                r.synchronize()
                np.testing.assert_array_equal(
                    out, fold(op, r.everybodys(r.rank, dtype))
                )

    ranks.start(size)(body)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_moves_are_exact(ranks: Ranks, size: int) -> None:
    def body(r: Rank) -> None:
        for dtype in MOVED:
            all_ = r.everybodys(5, dtype)
            root = size // 2
            x = r.random(5, dtype)
            dist.broadcast(x, root, group=r.pg)
            r.synchronize()
            np.testing.assert_array_equal(x, all_[root])

            x = r.random(5, dtype)
            out = r.array(np.zeros(5 * size), dtype)
            dist.all_gather_into_tensor(out, x, group=r.pg)
            rows = [r.array(np.zeros(5), dtype) for _ in range(size)]
            dist.all_gather(rows, x, group=r.pg)
            r.synchronize()
            np.testing.assert_array_equal(out, np.concatenate(all_))
            np.testing.assert_array_equal(rows, all_)

            rows = [r.array(np.zeros(5), dtype) for _ in range(size)]
            mine = rows if r.rank == root else None
            dist.gather(x, mine, root, group=r.pg)
            r.synchronize()
            if r.rank == root:
                np.testing.assert_array_equal(rows, all_)

            given = [r.random(5, dtype, p) for p in range(size)]
            out = r.array(np.zeros(5), dtype)
            dist.scatter(out, given if r.rank == root else None, root, group=r.pg)
            r.synchronize()
            np.testing.assert_array_equal(out, given[r.rank])

            # Rank a gives a + b elements to rank b.
            send = [r.random(r.rank + p, dtype) for p in range(size)]
            came = [r.array(np.zeros(r.rank + p), dtype) for p in range(size)]
            dist.all_to_all(came, send, group=r.pg)
            r.synchronize()
            for p in range(size):
                np.testing.assert_array_equal(came[p], r.random(r.rank + p, dtype, p))

    ranks.start(size)(body)


def test_the_table_of_reductions(ranks: Ranks) -> None:
    table = support_table.reductions("nccl")

    def body(r: Rank) -> list[str]:
        wrong = []
        for dtype, row in table.items():
            for op, how in row.items():
                x = r.random(5, dtype)
                given = dist.make_nccl_premul_sum(1) if op is OP.PREMUL_SUM else op
                try:
                    dist.all_reduce(x, given, group=r.pg)
                    r.synchronize()
                except (TypeError, ValueError):
                    if how is not None:
                        wrong.append(f"{dtype} {op.name} is refused")
                    continue
                same = fold(
                    OP.SUM if op is OP.PREMUL_SUM else op, r.everybodys(5, dtype)
                )
                if how is None or not np.array_equal(x, same):
                    wrong.append(f"{dtype} {op.name}, {how}: {x} and not {same}")
        return wrong

    assert ranks.start(2)(body) == [[], []]


CALLS: dict[str, Callable[[Rank, Any, Any], Any]] = {
    "broadcast": lambda r, x, parts: dist.broadcast(x, 0, r.pg),
    "all_reduce": lambda r, x, parts: dist.all_reduce(x, group=r.pg),
    "reduce": lambda r, x, parts: dist.reduce(x, 0, group=r.pg),
    "all_gather": lambda r, x, parts: dist.all_gather(parts, x, r.pg),
    "all_gather_into_tensor": lambda r, x, parts: dist.all_gather_into_tensor(
        r.array(np.zeros(8)), x, r.pg
    ),
    "gather": lambda r, x, parts: dist.gather(
        x, parts if r.rank == 0 else None, 0, r.pg
    ),
    "scatter": lambda r, x, parts: dist.scatter(
        x, parts if r.rank == 0 else None, 0, r.pg
    ),
    "reduce_scatter": lambda r, x, parts: dist.reduce_scatter(x, parts, group=r.pg),
    "reduce_scatter_tensor": lambda r, x, parts: dist.reduce_scatter_tensor(
        x, r.array(np.zeros(8)), group=r.pg
    ),
    "all_to_all": lambda r, x, parts: dist.all_to_all(
        parts, [r.array(np.zeros(4)) for _ in parts], r.pg
    ),
    "all_to_all_single": lambda r, x, parts: dist.all_to_all_single(
        r.array(np.zeros(4)), x, group=r.pg
    ),
    "barrier": lambda r, x, parts: dist.barrier(r.pg),
    "send": lambda r, x, parts: (dist.recv if r.rank else dist.send)(
        x, 1 - r.rank, group=r.pg
    ),
    "recv": lambda r, x, parts: (dist.send if r.rank else dist.recv)(
        x, 1 - r.rank, group=r.pg
    ),
    "all_reduce_coalesced": lambda r, x, parts: dist.all_reduce_coalesced(
        parts, group=r.pg
    ),
    "all_gather_coalesced": lambda r, x, parts: dist.all_gather_coalesced(
        [[r.array(np.zeros(4))] for _ in range(2)], [x], r.pg
    ),
    "all_gather_into_tensor_coalesced": lambda r, x, parts: (
        dist.all_gather_into_tensor_coalesced([r.array(np.zeros(8))], [x], r.pg)
    ),
    "reduce_scatter_tensor_coalesced": lambda r, x, parts: (
        dist.reduce_scatter_tensor_coalesced([x], [r.array(np.zeros(8))], group=r.pg)
    ),
}


@pytest.mark.parametrize(
    "op", [op for op in support_table.OPS if support_table.support(NCCLBackend, op)]
)
def test_an_op_calls_the_functions_of_nccl_that_the_table_names(
    ranks: Ranks, simulation: Simulation, op: str
) -> None:
    ranks.start(2)(lambda r: dist.barrier(r.pg))
    simulation.calls.clear()

    def body(r: Rank) -> None:
        CALLS[op](r, r.array(np.zeros(4)), [r.array(np.zeros(4)) for _ in range(2)])
        r.synchronize()

    ranks(body)
    declared = support_table.NCCL_CALLS
    if op == "all_to_all_single":
        assert op not in declared
        assert support_table.support(NCCLBackend, op) == "all_to_all"
        declared = {op: declared["all_to_all"]}
    # The first rank's alone: of a message each rank has one side.
    called = {name for name, rank in simulation.calls if rank == 0} - {"group"}
    assert {f"nccl{name.title().replace('_', '')}" for name in called} == {
        *declared[op]
    }


def test_premul_sum(ranks: Ranks) -> None:
    def body(r: Rank) -> None:
        x = r.array([1.0, 2.0], np.float32)
        dist.all_reduce(x, dist.make_nccl_premul_sum(0.5), group=r.pg)
        r.synchronize()
        np.testing.assert_array_equal(x, [1.0, 2.0])
        with pytest.raises(TypeError, match="floating-point"):
            dist.all_reduce(r.array([1, 2]), dist.make_nccl_premul_sum(0.5), group=r.pg)
        with pytest.raises(ValueError, match="needs a factor"):
            dist.all_reduce(x, OP.PREMUL_SUM, group=r.pg)

    ranks.start(2)(body)


def test_messages_and_batches(ranks: Ranks) -> None:
    def body(r: Rank) -> None:
        other = 1 - r.rank
        if r.rank == 0:
            dist.send(r.array([1, 2, 3]), 1, group=r.pg)
        else:
            x = r.array([0, 0, 0])
            dist.recv(x, 0, group=r.pg)
            r.synchronize()
            np.testing.assert_array_equal(x, [1, 2, 3])
        given, came = r.random(4, "float32"), r.array(np.zeros(4), np.float32)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, given, other, r.pg),
                dist.P2POp(dist.irecv, came, other, r.pg),
            ]
        )
        for work in works:
            work.wait()
        r.synchronize()
        np.testing.assert_array_equal(came, r.random(4, "float32", other))
        with pytest.raises(ValueError, match="has no tags"):
            dist.send(given, other, group=r.pg, tag=3)

    ranks.start(2)(body)


def test_coalesced_ops_are_one_call(ranks: Ranks, simulation: Simulation) -> None:
    def body(r: Rank) -> None:
        arrays = [r.array(np.full(3, i + r.rank), np.float32) for i in range(8)]
        with dist.coalescing_manager(r.pg, async_ops=True) as manager:
            for array in arrays:
                dist.all_reduce(array, group=r.pg)
        manager.wait()
        r.synchronize()
        for i, array in enumerate(arrays):
            np.testing.assert_array_equal(array, np.full(3, 2 * i + 1))

    ranks.start(2)(body)
    assert [call for call, rank in simulation.calls if rank == 0].count("group") == 1


def test_coalesced_all_gathers_are_one_call(
    ranks: Ranks, simulation: Simulation
) -> None:
    def body(r: Rank) -> None:
        inputs = [r.array(np.full(1 + i + r.rank, float(i + r.rank))) for i in range(4)]
        outputs = [
            [r.array(np.zeros(1 + i + rank)) for i in range(4)] for rank in range(2)
        ]
        dist.all_gather_coalesced(outputs, inputs, r.pg)
        r.synchronize()
        for rank, row in enumerate(outputs):
            for i, array in enumerate(row):
                np.testing.assert_array_equal(array, np.full(1 + i + rank, i + rank))

    ranks.start(2)(body)
    assert [call for call, rank in simulation.calls if rank == 0].count("group") == 1


def test_what_nccl_has_not_is_refused_before_anything_moves(ranks: Ranks) -> None:
    def body(r: Rank) -> None:
        with pytest.raises(TypeError, match="NCCL cannot reduce arrays of int16"):
            dist.all_reduce(r.array([1], np.int16), group=r.pg)
        with pytest.raises(TypeError, match=r"no ReduceOp\.AVG for arrays of bool"):
            dist.all_reduce(r.array([True]), OP.AVG, group=r.pg)
        with pytest.raises(ValueError, match=r"no ReduceOp\.BXOR"):
            dist.all_reduce(r.array([1]), OP.BXOR, group=r.pg)
        with pytest.raises(ValueError, match="not C-contiguous"):
            dist.all_reduce(r.array(np.ones((4, 4)))[:, 1], group=r.pg)
        x = r.array([1.0])
        dist.all_reduce(x, group=r.pg)
        r.synchronize()
        assert x[0] == 2

    ranks.start(2)(body)


# -- streams and memory --------------------------------------------------------


@pytest.mark.parametrize("events", ["kept", "left out"])
def test_an_op_comes_after_what_the_stream_was_given(
    ranks: Ranks, simulation: Simulation, events: str
) -> None:
    ranks.start(2)
    ranks(lambda r: dist.barrier(group=r.pg))
    if events == "left out":
        simulation.cuda.wait = lambda stream, event: None  # type: ignore[method-assign]

    def body(r: Rank) -> None:
        x = r.array([0.0])
        go = threading.Event()

        def fill() -> None:
            assert go.wait(20)
            x[0] = 5

        r.simulation.compute(r.rank, fill)
        work = dist.all_reduce(x, group=r.pg, async_op=True)
        if events == "left out":
            # What this test is there to see.
            work.synchronize()
            assert x[0] == 0
            go.set()
            r.synchronize()
            return
        assert not work.is_completed()
        assert work.started_ns == 0
        go.set()
        work.synchronize()
        assert x[0] == 10

    ranks(body)


def test_wait_orders_the_stream_and_not_the_host(ranks: Ranks) -> None:
    returned, go = threading.Barrier(2, timeout=20), threading.Event()

    def body(r: Rank) -> None:
        x, seen = r.array([1.0]), r.array([0.0])
        if r.rank == 1:
            r.simulation.compute(r.rank, lambda: (go.wait(60), None)[1])
        dist.all_reduce(x, group=r.pg)
        r.simulation.compute(r.rank, lambda: seen.__setitem__(0, x[0]))
        # Both hosts come here while the device of rank 1 is busy.
        returned.wait()
        assert seen[0] == 0
        returned.wait()
        go.set()
        r.synchronize()
        assert seen[0] == 2

    ranks.start(2)
    ranks(lambda r: dist.barrier(group=r.pg))
    ranks(body)


def test_wait_with_a_timeout_blocks_the_host(ranks: Ranks) -> None:
    def body(r: Rank) -> None:
        x = r.array([1.0])
        if r.rank == 0:
            work = dist.all_reduce(x, group=r.pg, async_op=True)
            with pytest.raises(dist.DistTimeoutError, match="still in flight"):
                work.wait(0.2)
            go.set()
        else:
            assert go.wait(20)
            work = dist.all_reduce(x, group=r.pg, async_op=True)
        work.wait(20)
        assert work.is_success()
        assert x[0] == 2

    go = threading.Event()
    ranks.start(2)(body)


@pytest.mark.parametrize("references", ["kept", "left out"])
def test_arrays_are_kept_until_the_device_is_done(
    ranks: Ranks, references: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    pool: list[Any] = []
    ranks.start(2)
    ranks(lambda r: dist.barrier(group=r.pg))
    if references == "left out":
        submit = NCCLStream.submit

        def forgetful(queue: Any, works: Any, calls: Any, kept: Any) -> None:
            submit(queue, works, calls, ())
            for work in works:
                work._result = ()

        monkeypatch.setattr(NCCLStream, "submit", forgetful)

    def body(r: Rank) -> None:
        if r.rank == 1:
            assert go.wait(20)
            mine = r.array(np.ones(1000))
            rows = [r.array(np.ones(1000)) for _ in range(2)]
            dist.all_gather(rows, mine, group=r.pg, async_op=True).wait(20)
            return
        memory, other = r.array(np.ones(1000)), r.array(np.ones(1000))
        freed = weakref.ref(memory)
        # As a pool's: the device may write to it after its array has gone.
        pool.extend([memory.base, other.base])
        dist.all_gather([memory, other], memory, group=r.pg)
        del memory
        # The caller has nothing of it any more, and the device still uses it.
        if references == "left out":
            until(lambda: freed() is None)
        else:
            assert freed() is not None
        go.set()
        until(lambda: freed() is None)

    ranks(body)


def test_a_barrier_blocks_the_host(ranks: Ranks) -> None:
    entered: list[float] = []
    left: list[float] = []

    def body(r: Rank) -> None:
        if r.rank == 1:
            time.sleep(0.2)
        entered.append(time.monotonic())
        dist.barrier(group=r.pg)
        left.append(time.monotonic())

    ranks.start(3)(body)
    assert min(left) >= max(entered)


# -- timing ----------------------------------------------------------------------


def test_durations_are_the_devices_and_only_where_asked_for(
    ranks: Ranks, simulation: Simulation
) -> None:
    def body(r: Rank) -> tuple[float | None, float, float | None]:
        dist.barrier(group=r.pg)
        go = threading.Event()
        r.simulation.compute(r.rank, lambda: (go.wait(20), None)[1])
        timed = dist.all_reduce(r.array([1.0]), group=r.pg, async_op=True)
        time.sleep(0.2)  # what comes before on the caller's stream
        began = time.monotonic()
        go.set()
        timed.wait(20)
        took_ms = (time.monotonic() - began) * 1000
        dist.enable_timing(r.pg, False)
        plain = dist.all_reduce(r.array([1.0]), group=r.pg, async_op=True)
        plain.wait(20)
        return timed.get_duration(), took_ms, plain.get_duration()

    ranks.start(2)
    ranks(lambda r: dist.enable_timing(r.pg, True))
    for timed, took_ms, plain in ranks(body):
        # What came before on the caller's stream does not count.
        assert timed is not None
        assert timed <= took_ms
        assert plain is None
    before = sum(event.timed for event in simulation.events)
    ranks(lambda r: dist.all_reduce(r.array([1.0]), group=r.pg))
    ranks(lambda r: r.synchronize())
    assert sum(event.timed for event in simulation.events) == before


# -- hangs, failures, aborts -------------------------------------------------------


def test_a_missing_rank_at_init_is_named(ranks: Ranks) -> None:
    ranks.start(3, timeout=1)

    def body(r: Rank) -> str | None:
        if r.rank == 1:
            return None
        with pytest.raises(dist.DistAbortedError) as caught:
            dist.all_reduce(r.array([1.0]), group=r.pg)
        return str(caught.value)

    for message in (message for message in ranks(body) if message):
        assert "was not ready after 1 s: rank 1 of the group" in message


def test_an_abort_during_init_ends_it_on_all_ranks(
    ranks: Ranks, simulation: Simulation
) -> None:
    ranks.start(3)

    def body(r: Rank) -> float | None:
        if r.rank == 1:
            until(lambda: sum(c == "init" for c, _ in simulation.calls) == 2)
            r.pg.abort("I do not like it")
            return None
        with pytest.raises(dist.DistAbortedError, match="I do not like it"):
            dist.all_reduce(r.array([1.0]), group=r.pg)
        return time.monotonic()

    began = time.monotonic()
    assert max(t for t in ranks(body) if t) - began < 5
    until(lambda: sum(c == "abort" for c, _ in simulation.calls) == 2)


def test_a_hung_op_is_aborted_and_the_group_rebuilt(
    ranks: Ranks, simulation: Simulation
) -> None:
    """The whole story: rank 2 leaves one out; the others hang on the device."""
    ranks.start(3)
    ranks(lambda r: dist.barrier(group=r.pg))
    inside = threading.Barrier(3)

    def body(r: Rank) -> None:
        if r.rank == 2:
            inside.wait(20)
            until(lambda: bool(ranks.ranks[0].pg.status.started))
            r.pg.abort("rank 2 gives up", by="the notebook")
            return
        x = r.array([1.0])
        work = dist.all_reduce(x, group=r.pg, async_op=True)
        queued = dist.all_reduce(r.array([2.0]), group=r.pg, async_op=True)
        assert work.wait()
        inside.wait(20)
        # As cupy's synchronize(): the host sits in it until the stream ends.
        r.synchronize()
        for one in (work, queued):
            for waits in (one.wait, one.synchronize, lambda one=one: one.wait(5)):
                with pytest.raises(dist.DistAbortedError, match="rank 2 gives up"):
                    waits()
            assert one.state is WorkState.ABORTED
        assert work.returned_early
        with pytest.raises(dist.DistAbortedError):
            dist.all_reduce(x, group=r.pg)

    ranks(body)
    for rank in range(3):
        assert ("abort", rank) in simulation.calls

    def again(r: Rank) -> None:
        r.pg.rebuild()
        x = r.array([1.0])
        dist.all_reduce(x, group=r.pg)
        r.synchronize()
        assert x[0] == 3

    ranks(again)


def test_the_timeout_counts_from_the_start_on_the_device(ranks: Ranks) -> None:
    ranks.start(2, timeout=1.5)
    ranks(lambda r: dist.barrier(group=r.pg))

    def late(r: Rank) -> None:
        # The caller's stream is busy for longer than the timeout: no fault.
        r.simulation.compute(r.rank, lambda: time.sleep(2))
        work = dist.all_reduce(r.array([1.0]), group=r.pg, async_op=True)
        work.synchronize()
        assert work.is_success()

    ranks(late)

    def missing(r: Rank) -> None:
        if r.rank == 0:
            work = dist.all_reduce(r.array([1.0]), group=r.pg, async_op=True)
            with pytest.raises(dist.DistTimeoutError, match=r"not done 1\.5 s after"):
                work.synchronize()
            assert work.state is WorkState.TIMED_OUT

    ranks(missing)
    until(lambda: ranks.ranks[1].pg.aborted is not None)


def test_an_error_of_nccl_ends_the_group_everywhere(
    ranks: Ranks, simulation: Simulation
) -> None:
    ranks.start(2)
    ranks(lambda r: dist.barrier(group=r.pg))

    def body(r: Rank) -> str:
        if r.rank == 1:
            until(lambda: bool(ranks.ranks[0].pg.status.in_flight))
            simulation.fails[0] = "NCCL reports: remote error; the network is gone"
            until(lambda: r.pg.aborted is not None)
            return str(r.pg.aborted)
        with pytest.raises(dist.DistError) as caught:
            dist.all_reduce(r.array([1.0]), group=r.pg, async_op=True).synchronize()
        return str(caught.value)

    for message in ranks(body):
        assert "the network is gone" in message
    simulation.fails.clear()


def test_an_init_that_fails_says_why(ranks: Ranks, simulation: Simulation) -> None:
    simulation.init_fails[1] = "NCCL reports: no interface"
    ranks.start(2)

    def body(r: Rank) -> None:
        with pytest.raises(dist.DistError, match="no interface"):
            dist.all_reduce(r.array([1.0]), group=r.pg)

    ranks(body)


def test_an_abort_that_does_not_come_back_is_said_and_waited_for_no_longer(
    ranks: Ranks, simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = simulation.abort_waits[0] = threading.Event()
    ranks.start(2)
    ranks(lambda r: dist.barrier(group=r.pg))

    def body(r: Rank) -> None:
        if r.rank == 1:
            return
        work = dist.all_reduce(r.array([1.0]), group=r.pg, async_op=True)
        began = time.monotonic()
        r.pg.abort("enough")
        assert time.monotonic() - began < ABORT_WAIT + 10
        with pytest.raises(dist.DistAbortedError, match="enough"):
            work.synchronize()
        until(lambda: "abort does not return" in r.pg.summary().devices["cuda"])

    ranks(body)
    assert "has not returned from its abort" in caplog.text
    assert "%dist_restart" in caplog.text
    blocked.set()
    until(
        lambda: "aborted" in ranks.ranks[0].pg.summary().devices["cuda"],
    )


def test_an_abort_that_takes_its_time_is_no_stuck_one(
    ranks: Ranks,
    simulation: Simulation,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(communicator, "ABORT_EACH", 60.0)
    slow = simulation.abort_waits[0] = threading.Event()
    ranks.start(1)
    (r,) = ranks.ranks
    dist.barrier(group=r.pg)
    # The caller goes on after ABORT_WAIT, and nothing is reported yet.
    r.pg.abort("enough")
    assert r.pg.summary().devices["cuda"] == "nccl (device 0: aborting)"
    slow.set()
    until(
        lambda: r.pg.summary().devices["cuda"] == "nccl (device 0: aborted)",
    )
    assert "has not returned from its abort" not in caplog.text


def test_the_budget_of_an_abort_grows_with_the_communicators_of_the_device(
    simulation: Simulation, tmp_path: Path
) -> None:
    groups = [Ranks(simulation, tmp_path).start(2, name=name) for name in "abc"]
    released = simulation.abort_waits[0] = threading.Event()
    try:
        for ranks in groups:
            ranks(lambda r: dist.barrier(group=r.pg))
        threads = [
            threading.Thread(target=ranks.ranks[0].pg.abort, args=("enough",))
            for ranks in groups
        ]
        for thread in threads:
            thread.start()
        until(lambda: simulation.calls.count(("abort", 0)) == 3)
        budgets = {device: communicator._abort_budget(device) for device in (0, 7)}
        for thread in threads:
            thread.join()
        assert budgets == {0: 3 * ABORT_EACH, 7: ABORT_EACH}
    finally:
        released.set()
        for ranks in groups:
            ranks.close()


def test_an_abort_goes_round_a_call_that_is_stuck(
    ranks: Ranks, simulation: Simulation
) -> None:
    ranks.start(2)
    ranks(lambda r: dist.barrier(group=r.pg))
    stuck = simulation.calls_stuck[0] = threading.Event()

    def body(r: Rank) -> None:
        if r.rank == 1:
            until(lambda: ("all_reduce", 0) in simulation.calls[-3:])
            ranks.ranks[0].pg.abort("from another thread")
            until(lambda: ("abort", 0) in simulation.calls)
            stuck.set()
            return
        with pytest.raises(dist.DistAbortedError, match="from another thread"):
            dist.all_reduce(r.array([1.0]), group=r.pg)

    ranks(body)


def test_nccl_goes_on_in_the_background_while_the_host_does_too(
    ranks: Ranks, simulation: Simulation
) -> None:
    ranks.start(2)
    ranks(lambda r: dist.barrier(group=r.pg))
    simulation.in_progress.add(0)

    def body(r: Rank) -> None:
        began = time.monotonic()
        work = dist.all_reduce(r.array([1.0]), group=r.pg, async_op=True)
        assert time.monotonic() - began < 15
        if r.rank == 0:
            assert work.launch.end_event is None
            simulation.in_progress.clear()
        work.wait(20)

    ranks(body)


def test_the_end_frees_everything(ranks: Ranks, simulation: Simulation) -> None:
    ranks.start(2)
    ranks(lambda r: dist.all_reduce(r.array([1.0]), group=r.pg))
    ranks(lambda r: r.synchronize())
    until(lambda: not any(r.pg.status.in_flight for r in ranks.ranks))
    ranks.close()
    for rank in range(2):
        assert ("destroy", rank) in simulation.calls
        assert ("abort", rank) not in simulation.calls
    assert all(event.freed for event in simulation.events)


def test_the_end_waits_for_what_the_device_is_at(
    ranks: Ranks, simulation: Simulation
) -> None:
    """The others would be aborted in the middle of it."""
    ranks.start(2)

    def body(r: Rank) -> None:
        x = r.array([1.0])
        dist.barrier(group=r.pg)
        if r.rank == 1:
            r.simulation.compute(r.rank, lambda: time.sleep(0.3))
        dist.all_reduce(x, group=r.pg)
        r.pg.shutdown()
        assert x[0] == 2

    ranks(body)
    assert not [call for call in simulation.calls if call[0] == "abort"]


def test_a_batch_that_is_refused_leaves_nothing_in_flight(ranks: Ranks) -> None:
    def body(r: Rank) -> None:
        other = 1 - r.rank
        x, y = r.array([1.0]), r.array([0.0])
        with pytest.raises(ValueError, match="has no tags"):
            dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, x, other, r.pg),
                    dist.P2POp(dist.irecv, y, other, r.pg, tag=5),
                ]
            )
        until(lambda: not r.pg.status.in_flight)

    ranks.start(2)(body)


def test_arrays_on_several_devices_are_refused(ranks: Ranks) -> None:
    def body(r: Rank) -> None:
        rows = [r.array([0.0]), r.simulation.array([0.0], 7)]
        with pytest.raises(ValueError, match="the arrays lie on devices"):
            dist.all_gather(rows, r.array([1.0]), group=r.pg)

    ranks.start(2)(body)


def test_a_destroy_and_an_abort_free_it_once(
    ranks: Ranks, simulation: Simulation
) -> None:
    for _ in range(20):
        simulation.calls.clear()
        ranks = Ranks(simulation, ranks.folder)
        ranks.start(2, name=f"g{time.monotonic_ns()}")
        ranks(lambda r: dist.barrier(group=r.pg))
        threads = [
            threading.Thread(target=task)
            for r in ranks.ranks
            for task in (r.pg.shutdown, lambda r=r: r.pg.abort("at the same time"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ranks.close()
        # A second free of a communicator fails inside the simulation.
        for rank in range(2):
            until(partial(_freed_once, simulation, rank))


def _freed_once(simulation: Simulation, rank: int) -> bool:
    calls = simulation.calls
    return calls.count(("abort", rank)) + calls.count(("destroy", rank)) == 1


def test_the_board_hears_of_the_communicator(ranks: Ranks) -> None:
    ranks.start(2)
    assert ranks.ranks[0].pg.summary().devices == {"cuda": "nccl (not built)"}
    ranks(lambda r: dist.barrier(group=r.pg))
    assert ranks.ranks[1].pg.summary().devices == {"cuda": "nccl (device 1: running)"}
    ranks.ranks[0].pg.abort("")
    assert ranks.ranks[0].pg.summary().devices == {"cuda": "nccl (device 0: aborted)"}
