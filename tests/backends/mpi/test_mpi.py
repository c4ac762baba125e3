"""The MPI backend under a real mpiexec: exact, patient, and rid of what hangs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends import ReduceOp
from rankscope.backends.conformance import reference
from rankscope.backends.conformance.checker import Checker
from rankscope.backends.conformance.leaks import lives
from rankscope.backends.conformance.mpi_ranks import (
    MPIRanks,
    is_open_mpi,
    mpiexec,
    run_mpi_ranks,
)
from rankscope.backends.conformance.ranks import Rank, RankFailure, run_ranks
from rankscope.backends.conformance.waiting import until
from rankscope.backends.install import with_extra
from rankscope.backends.mpi import job as mpi_job
from tests.backends import whole_surface

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(
        not dist.is_mpi_available() or mpiexec() is None,
        reason="mpi4py or mpiexec is missing: pip install -e .[dev,mpi]",
    ),
]

# With this the other ranks outlive one that is killed.
ULFM = ("--with-ft", "ulfm")


@contextlib.contextmanager
def mpi(timeout: float = 60, backend: str = "cpu:mpi") -> Iterator[None]:
    """The default group, from what mpiexec and MPIRanks set."""
    dist.init_process_group(backend, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


# -- exactness -----------------------------------------------------------------


def everything(me: Rank, async_op: bool) -> int:
    with mpi():
        return whole_surface.check_everything(
            Checker(async_op=async_op),
            sizes=[0, 1, 7, 1009, 70_001] if async_op else whole_surface.SIZES,
            reducible=[*reference.REDUCIBLE, "int16", "uint16"],
        )


def narrow_floats(me: Rank) -> bool:
    from ml_dtypes import bfloat16

    with mpi():
        for size in (5, 40_000):
            held = [np.arange(size).astype(bfloat16) % (r + 3) for r in range(me.size)]
            for op, fold in ((dist.ReduceOp.SUM, sum), (dist.ReduceOp.MAX, None)):
                x = held[me.rank].copy()
                dist.all_reduce(x, op)
                wanted = fold(held) if fold else np.maximum.reduce(held)
                assert np.array_equal(x, wanted)
            moved = held[me.rank].copy()
            dist.broadcast(moved, 1)
            assert np.array_equal(moved, held[1])
    return True


@pytest.mark.processes
def test_bfloat16_is_moved_and_reduced() -> None:
    assert all(run_mpi_ranks(2, narrow_floats))


@pytest.mark.processes
@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.soak)])
def test_every_collective_is_exact(size: int) -> None:
    counts = run_mpi_ranks(size, everything, False, timeout=170)
    assert len(set(counts)) == 1
    assert counts[0] > 1000


@pytest.mark.processes
@pytest.mark.soak
def test_every_collective_is_exact_when_asynchronous() -> None:
    counts = run_mpi_ranks(3, everything, True, timeout=170)
    assert len(set(counts)) == 1


UFUNCS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


def other_reductions(me: Rank) -> None:
    arithmetic = [ReduceOp.SUM, ReduceOp.PRODUCT]
    cases = [(dtype, arithmetic) for dtype in ("complex64", "complex128", "longdouble")]
    cases += [
        (dtype, [op for op in UFUNCS if op is not ReduceOp.PRODUCT])
        for dtype in ("int8", "uint64", "bool")
    ]
    with mpi():
        for dtype, ops in cases:
            for op in ops:
                held = [reference.data(r, 5000, dtype) for r in range(me.size)]
                x = held[me.rank].copy()
                dist.all_reduce(x, op)
                wanted = held[0]
                for other in held[1:]:
                    wanted = UFUNCS[op](wanted, other)
                np.testing.assert_allclose(x, wanted, rtol=1e-6)
        x = np.full(3, np.nan if me.rank == 1 else me.rank, "f4")
        dist.all_reduce(x, ReduceOp.MAX)
        assert np.isnan(x).all()
        for bad, op in (("c8", ReduceOp.MAX), ("f4", ReduceOp.BAND)):
            with pytest.raises(
                TypeError, match=rf"{op.name} is not defined for arrays"
            ):
                dist.all_reduce(np.zeros(3, bad), op)
        with pytest.raises(ValueError, match="tag=32000"):
            dist.isend(np.zeros(1), (me.rank + 1) % me.size, tag=32000)
        dist.all_reduce(x)


@pytest.mark.processes
def test_reductions_of_other_dtypes() -> None:
    run_mpi_ranks(3, other_reductions)


def the_rest(me: Rank) -> None:
    with mpi():
        whole_surface.built_on_ops()


@pytest.mark.processes
@pytest.mark.parametrize("size", [1, 2, 4])
def test_objects_sparse_arrays_and_batches(size: int) -> None:
    run_mpi_ranks(size, the_rest)


def receives_from_any(me: Rank) -> None:
    with mpi():
        if me.rank:
            dist.send(np.full(3, me.rank), 0, tag=7)
            return
        senders = set()
        for _ in range(1, me.size):
            x = np.zeros(3, int)
            senders.add(dist.recv(x, tag=7))
            assert x[0] in senders
        assert senders == set(range(1, me.size))


@pytest.mark.processes
def test_recv_names_its_sender() -> None:
    run_mpi_ranks(4, receives_from_any)


# -- order, waiting, progress ------------------------------------------------------


def ordered(me: Rank) -> None:
    """Asynchronous ops on one array run one after the other; on two groups too."""
    with mpi():
        pair = dist.new_group([0, me.size - 1])
        x = np.ones(100_000)
        works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
        if pair:
            y = np.full(10, 1.0)
            inner = dist.all_reduce(y, group=pair, async_op=True)
            assert inner is not None
            inner.wait()
            np.testing.assert_array_equal(y, 2)
        for work in works:
            assert work is not None
            work.wait()
            assert work.duration_ns is not None
        np.testing.assert_array_equal(x, me.size**3)


@pytest.mark.processes
def test_ops_run_in_the_order_of_issue() -> None:
    run_mpi_ranks(3, ordered)


def unattended(me: Rank) -> None:
    """Works that nobody waits for get done, large ones too; the thread then ends."""
    with mpi():
        arrays = [np.full(1 << 20, r + 1.0) for r in range(3)]
        works = [dist.all_reduce(x, async_op=True) for x in arrays]
        up, down = (me.rank + 1) % me.size, (me.rank - 1) % me.size
        received = np.zeros(1 << 20)
        works += [dist.irecv(received, down), dist.isend(np.full(1 << 20, 7.0), up)]
        until(lambda: all(w is not None and w.is_success() for w in works), 30)
        assert arrays[2][0] == 3.0 * me.size
        assert received[-1] == 7.0
        names = [thread.name for thread in threading.enumerate()]
        assert "rankscope-messages" in names
        until(
            lambda: all(
                thread.name != "rankscope-messages" for thread in threading.enumerate()
            )
        )
        dist.all_reduce(arrays[0])


@pytest.mark.processes
def test_works_nobody_waits_for_are_done() -> None:
    run_mpi_ranks(3, unattended)


def late(me: Rank) -> float:
    """A rank waits for a late one; meanwhile it is idle, and its threads run."""
    with mpi():
        dist.barrier()
        me.meet("start")
        if me.rank == 0:
            time.sleep(1.0)  # being late is the subject
        ticks, stop = [0], threading.Event()

        def tick() -> None:
            while not stop.wait(0.001):
                ticks[0] += 1

        thread = threading.Thread(target=tick)
        thread.start()
        cpu = time.process_time()
        x = np.ones(4)
        dist.all_reduce(x)
        cpu = time.process_time() - cpu
        stop.set()
        thread.join()
        np.testing.assert_array_equal(x, me.size)
        if me.rank:
            assert ticks[0] > 100
        return cpu


@pytest.mark.processes
def test_waiting_for_a_late_rank_costs_little() -> None:
    assert max(run_mpi_ranks(2, late)[1:]) < 0.5


def interrupted(me: Rank) -> None:
    """An interrupt ends the wait, not the op."""
    with mpi():
        x = np.ones(4)
        dist.all_reduce(x)
        me.meet("start")
        if me.rank == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            with pytest.raises(KeyboardInterrupt):
                work.wait()
            assert not work.is_completed()
            me.meet("interrupted")
            work.wait()
        else:
            me.meet("interrupted")
            dist.all_reduce(x)
        np.testing.assert_array_equal(x, me.size**2)


@pytest.mark.processes
def test_an_interrupt_leaves_the_op_alone() -> None:
    run_mpi_ranks(2, interrupted)


def from_threads(me: Rank) -> None:
    """Groups made and used by several threads at once, in any order."""
    with mpi():
        groups = [
            dist.new_group(range(me.size), group_desc=f"thread {i}") for i in range(4)
        ]

        def use(i: int) -> None:
            for _ in range(30):
                x = np.full(3000, i + 1.0)
                dist.all_reduce(x, group=groups[i])
                np.testing.assert_array_equal(x, (i + 1) * me.size)

        order = range(4) if me.rank % 2 else reversed(range(4))
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(use, order))


@pytest.mark.processes
def test_several_threads_and_groups() -> None:
    run_mpi_ranks(3, from_threads)


# -- abort and rebuild ---------------------------------------------------------------


def aborted_while_meeting(me: Rank) -> None:
    """A rank that never comes to the group's first op hinders nobody."""
    with mpi():
        if me.rank == 0:
            work = dist.all_reduce(np.ones(3), async_op=True)
            assert work is not None
            begun = time.monotonic()
            dist.abort_process_group(reason="nobody came")
            with pytest.raises(dist.DistAbortedError, match="nobody came"):
                work.wait(20)
            # Far below the time that the wait has.
            assert time.monotonic() - begun < 15
        me.meet("aborted")
        dist.rebuild_process_group()
        x = np.ones(3)
        dist.all_reduce(x)
        np.testing.assert_array_equal(x, me.size)


@pytest.mark.processes
def test_abort_before_everybody_came() -> None:
    run_mpi_ranks(3, aborted_while_meeting)


def times_out(me: Rank) -> None:
    with mpi():
        dist.barrier()
        group = dist.new_group(timeout=2.0)
        assert isinstance(group, dist.ProcessGroup)
        dist.barrier(group)
        if me.rank == 0:
            begun = time.monotonic()
            with pytest.raises(dist.DistTimeoutError, match="2 s"):
                dist.all_reduce(np.ones(3), group=group)
            assert 1.9 < time.monotonic() - begun < 15
        else:
            until(lambda: group.aborted is not None)
        dist.rebuild_process_group(group)
        dist.barrier(group)


@pytest.mark.processes
def test_the_groups_timeout() -> None:
    run_mpi_ranks(2, times_out)


def leaves_while_another_hangs(me: Rank) -> None:
    """After an abort a rank's process ends, whatever the others do."""
    mpi_job._FINALIZE_SECONDS = 1.0
    dist.init_process_group("cpu:mpi", timeout=60)
    dist.barrier()
    if me.rank == 0:
        x = np.ones(1 << 18)
        dist.isend(x, 1)
        dist.irecv(np.ones(4), 1)
        dist.abort_process_group(reason="leaving")
        me.report(os.getpid())
        return
    me.listen(30)


@pytest.mark.processes
def test_a_rank_may_leave_after_an_abort() -> None:
    with MPIRanks(2, leaves_while_another_hangs) as ranks:
        pid = ranks.next_report(0)
        until(lambda: not lives(pid))
        if is_open_mpi():
            ranks.tell(1, "go")
            ranks.wait()
        else:
            # Hydra ends a job of which a process left without MPI_Finalize.
            other = ranks.pids[1]
            until(lambda: not lives(other))


# -- a rank that dies -----------------------------------------------------------------


def survives(me: Rank) -> list[float]:
    with mpi():
        x = np.ones(4)
        dist.all_reduce(x)
        me.report("ready")
        if me.rank == 2:
            me.listen(60)
            return []
        begun = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="rank 2"):
            dist.all_reduce(x)
        took = time.monotonic() - begun
        left = dist.new_group([rank for rank in range(me.size) if rank != 2])
        x = np.full(30_000, me.rank + 1.0)
        dist.all_reduce(x, group=left)
        np.testing.assert_array_equal(x, 1 + 2 + 4)
        again = dist.new_group([0, 1])
        if again:
            dist.broadcast(x, 0, group=again)
        return [took]


@pytest.mark.processes
def test_the_others_outlive_a_killed_rank() -> None:
    if not is_open_mpi():
        pytest.skip("only Open MPI's ranks outlive one that was killed")
    with MPIRanks(4, survives, options=ULFM) as ranks:
        for rank in range(4):
            ranks.next_report(rank)
        ranks.kill(2)
        results = ranks.wait()
    assert max(took for result in results for took in result or []) < 10


# -- how it is started ---------------------------------------------------------


def subset_first(me: Rank) -> None:
    """A group of some ranks comes up although the others never use MPI."""
    with mpi(backend="cpu:mpi"):
        if me.rank == 2:
            mpi_job.initialise()
        group = dist.new_group([0, 1])
        if group:
            x = np.ones(3)
            dist.all_reduce(x, group=group)
            np.testing.assert_array_equal(x, 2)


@pytest.mark.processes
def test_a_subgroup_alone() -> None:
    run_mpi_ranks(3, subset_first)


def imports_nothing(me: Rank) -> list[str]:
    dist.init_process_group("cpu:mpi", timeout=60)
    loaded = [name for name in sys.modules if name.startswith("mpi4py")]
    dist.destroy_process_group()
    return loaded


@pytest.mark.processes
def test_mpi_is_not_loaded_where_no_launcher_started_the_process() -> None:
    assert run_ranks(2, imports_nothing) == [[], []]


def two_of_four(me: Rank) -> float | None:
    """The first op is that of a group that ranks 1 and 2 know nothing of."""
    dist.init_process_group("cpu:mpi", timeout=20)
    x = np.full(3, float(me.rank))
    if me.rank in (0, 3):
        dist.all_reduce(x, group=dist.new_group([0, 3]))
    me.report("done")
    me.listen()
    dist.destroy_process_group()
    return x[0]


@pytest.mark.processes
def test_ranks_that_never_use_mpi_hold_up_nobody() -> None:
    # MPI_Init waits for all processes of the job: all of them call it.
    with MPIRanks(4, two_of_four) as ranks:
        for rank in (0, 3, 1, 2):
            assert ranks.next_report(rank) == "done"
        for rank in range(4):
            ranks.tell(rank, "go")
        assert ranks.wait() == [3.0, 1.0, 2.0, 3.0]


def with_mpi4py(me: Rank) -> None:
    """A script that uses mpi4py itself, and imported it first."""
    from mpi4py import MPI

    with mpi():
        x = np.ones(3)
        work = dist.all_reduce(x, async_op=True)
        # Upper case: allreduce() would keep the GIL, and with it the store.
        count = np.ones(1)
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, count)
        assert count[0] == me.size
        assert work is not None
        work.wait()
        np.testing.assert_array_equal(x, me.size)


@pytest.mark.processes
def test_beside_mpi4py() -> None:
    run_mpi_ranks(2, with_mpi4py)


SCRIPT = """
import numpy as np, sys, rankscope as dist
dist.init_process_group("cpu:mpi", *sys.argv[1:], timeout=20)
x = np.full(3, dist.get_rank() + 1.0)
dist.all_reduce(x)
sys.stdout.write(f"{dist.get_rank()} {x}\\n")
"""


@pytest.mark.processes
@pytest.mark.parametrize("method", [[], ["file://{folder}/store"]])
def test_a_plain_script(tmp_path: Any, method: list[str]) -> None:
    """Without MASTER_ADDR, without destroy_process_group, from any folder."""
    program = mpiexec()
    assert program is not None
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = ["--oversubscribe"] if is_open_mpi() else []
    done = subprocess.run(
        [
            program,
            "-n",
            "2",
            *options,
            sys.executable,
            script,
            *(part.format(folder=tmp_path) for part in method),
        ],
        env=dict(
            os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1"
        ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert sorted(done.stdout.splitlines()) == ["0 [3. 3. 3.]", "1 [3. 3. 3.]"]
    assert done.stderr == ""
    assert done.returncode == 0


def test_without_a_launcher(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    dist.init_process_group(
        "cpu:mpi", store=store, rank=0, world_size=2, wait_for_workers=False
    )
    try:
        with pytest.raises(dist.DistBackendError) as caught:
            dist.all_reduce(np.ones(3))
        assert "all_reduce in group 'default' on rank 0" in str(caught.value)
        assert "mpiexec -n 4" in str(caught.value)
        assert "%dist_init --engines mpi" in str(caught.value)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(dist.DistBackendError, match=re.escape(with_extra("mpi"))):
            dist.all_reduce(np.ones(3))
    finally:
        dist.destroy_process_group()
        store.close()


def mismatched(me: Rank) -> None:
    with mpi(timeout=20):
        dist.barrier()
        x = np.ones(4 if me.rank else 6)
        with pytest.raises(
            dist.DistBackendError,
            match="sent (32 bytes where 48|48 bytes where 32).*sizes differ",
        ):
            dist.all_reduce(x)
        dist.rebuild_process_group()
        dist.barrier()


@pytest.mark.processes
def test_sizes_that_differ_are_told() -> None:
    run_mpi_ranks(2, mismatched)


def longer_than_there_is_room_for(me: Rank, nbytes: int) -> None:
    with mpi(timeout=20):
        dist.barrier()
        memory = np.zeros(nbytes + 64, np.uint8)
        room = memory[:32]
        if me.rank == 0:
            sent = dist.isend(np.ones(nbytes, np.uint8), 1)
        call = partial(dist.recv, room, 0) if me.rank else dist.barrier
        with pytest.raises(dist.DistError, match=f"sent {nbytes} bytes where 32 were"):
            call()
        # Open MPI would write it all, and only then say that it does not fit.
        assert not memory.any()
        if me.rank == 0:
            # The abort that ended the barrier ends it, too, a moment later.
            until(sent.is_completed, 10)
        dist.rebuild_process_group()
        dist.barrier()


@pytest.mark.processes
@pytest.mark.parametrize("nbytes", [1000, 5000, 1 << 20])
def test_a_message_that_does_not_fit_is_written_nowhere(nbytes: int) -> None:
    run_mpi_ranks(2, longer_than_there_is_room_for, nbytes)


def fails(me: Rank) -> None:
    raise LookupError("on purpose")


@pytest.mark.processes
def test_the_harness_shows_errors() -> None:
    with pytest.raises(RankFailure, match="on purpose"):
        run_mpi_ranks(2, fails)
