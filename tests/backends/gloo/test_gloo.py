"""The gloo backend by itself: side process, shared memory, messages, its ends."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rankscope.backends.conformance.leaks import lives
from rankscope.backends.conformance.ranks import Rank, Ranks, run_ranks
from rankscope.backends.conformance.waiting import until
from rankscope.backends.devices.shared_memory import empty, heap
from rankscope.backends.errors import DistBackendError, DistError
from rankscope.backends.gloo import backend as gloo
from rankscope.backends.gloo.backend import GlooBackend
from rankscope.backends.gloo.dtypes import arithmetic
from rankscope.backends.gloo.eager import EagerOperation
from rankscope.backends.gloo.library import Library, unavailable
from rankscope.backends.gloo.side.wire import chunk_bytes, eager_bytes, ring_bytes
from rankscope.backends.gloo.side_process import SideProcess
from rankscope.backends.stores.file import FileStore
from rankscope.backends.work.op_type import OpType
from rankscope.backends.work.reduce_op import ReduceOp
from rankscope.backends.work.state import WorkState
from rankscope.backends.work.work import Work

pytestmark = pytest.mark.skipif(
    unavailable() is not None, reason="no gloo library for this Python"
)

SUM = ReduceOp.SUM
#: A file that is no library, and is not tested before it is used.
NOT_GLOO = Library("xoscar", "0", __file__)


def all_reduce(backend: GlooBackend, array: np.ndarray, op: ReduceOp) -> Work:
    """``backend.all_reduce``, with what its `check` makes of `op`."""
    return backend.all_reduce(array, arithmetic(array.dtype, op))


@contextlib.contextmanager
def backend(me: Rank, prefix: str = "gloo") -> Iterator[GlooBackend]:
    with me.store(prefix) as store:
        made = GlooBackend(store, me.rank, me.size)
        try:
            yield made
        finally:
            made.shutdown()


def side_pid(made: GlooBackend) -> int:
    side = made._side
    assert side is not None
    return until(lambda: side.pid) or 0


def refused(size: int) -> GlooBackend:
    """A backend that is only asked: it never starts a process."""
    made = GlooBackend.__new__(GlooBackend)
    made.rank, made.size, made.place = 0, size, "rank 0"
    return made


# -- what it computes ------------------------------------------------------


def sizes(world: int) -> list[int]:
    """Bytes around every threshold at which the way of an all_reduce changes."""
    edges = [4096, eager_bytes(world), ring_bytes(world), chunk_bytes(world)]
    return [8, *(edge + step for edge in edges for step in (-8, 0, 8)), 20 << 20]


def around_thresholds(me: Rank) -> None:
    with backend(me) as made:
        rng = np.random.default_rng(5)
        for turn, nbytes in enumerate(sizes(me.size)):
            data = rng.integers(0, 1000, (me.size, nbytes // 8)).astype(np.float64)
            # Some ranks copy and some do not: they must cut arrays alike.
            make = empty if (turn + me.rank) % 3 else np.empty
            x = make(nbytes // 8, np.float64)
            x[:] = data[me.rank]
            all_reduce(made, x, SUM).wait()
            assert np.array_equal(x, data.sum(0)), nbytes
            root = turn % me.size
            x[:] = data[me.rank]
            made.reduce(x, root, arithmetic(x.dtype, ReduceOp.MAX)).wait()
            mine = data.max(0) if me.rank == root else data[me.rank]
            assert np.array_equal(x, mine), nbytes
            x[:] = data[me.rank]
            made.broadcast(x, root).wait()
            assert np.array_equal(x, data[root]), nbytes
            x[:] = data[me.rank]
            part = data.shape[1] // me.size
            y = make(part, np.float64)
            total = arithmetic(x.dtype, SUM)
            made.reduce_scatter_tensor(y, x[: part * me.size], total).wait()
            mine = data[:, part * me.rank : part * (me.rank + 1)].sum(0)
            assert np.array_equal(y, mine), nbytes
        del x, y
    assert heap.segments == 0


@pytest.mark.parametrize("world", [2, 3, 4])
def test_around_every_threshold_whether_ranks_copy_or_not(world: int) -> None:
    run_ranks(world, around_thresholds, timeout=90)


def flood(me: Rank) -> int:
    with backend(me) as made:
        x = np.full(600_000, 1.0, np.float32)
        small = np.full(3, 1.0)
        if me.rank == 0:
            me.listen()  # rank 1 has issued everything by then
        works = []
        for _ in range(30):
            works += [all_reduce(made, x, SUM), made.barrier()]
            works += [all_reduce(made, small, ReduceOp.MAX) for _ in range(50)]
            works.append(made.broadcast(x, 0))
        for work in works:
            work.detach()
        me.report("issued")
        works[-1].wait()
        assert all(work.is_success() for work in works)
        assert x[0] == x[-1] == 2.0**30
        return heap.segments


def test_a_late_peer_finds_everything_queued_in_bounded_memory() -> None:
    with Ranks(2, flood) as ranks:
        assert ranks.next_report(1) == "issued"
        ranks.tell(0, "go")
        assert max(ranks.wait()) <= 4


def reentrant(me: Rank) -> list[str]:
    """Callbacks that wait for further ops, on whatever thread they run."""
    with backend(me) as made:
        done: list[str] = []

        def again(work: Work) -> None:
            x = np.ones(2)
            all_reduce(made, x, SUM).wait()
            done.append(f"{x[0]:g}")

        for detached in (False, True):
            work = made.barrier()
            work.add_done_callback(again)
            if detached:
                work.detach()
                until(lambda: len(done) == 2)
            else:
                work.wait()
        return done


def test_a_callback_may_wait_for_another_op() -> None:
    assert run_ranks(2, reentrant) == [["2", "2"]] * 2


def many_waiters(me: Rank) -> None:
    with backend(me) as made:
        arrays = [np.full(1000, 1.0) for _ in range(40)]
        works = [all_reduce(made, array, SUM) for array in arrays]
        threads = [threading.Thread(target=work.wait) for work in reversed(works)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert all(work.is_success() for work in works)
        assert all((array == me.size).all() for array in arrays)


def test_many_threads_may_wait_at_once() -> None:
    run_ranks(2, many_waiters)


# -- messages --------------------------------------------------------------


def messages(me: Rank) -> None:
    with backend(me) as made:
        other = 1 - me.rank
        lengths = [1, 4080, 4081, 1_000_000]
        # Posted in another order than they are sent in: tags tell them apart.
        inbox = {n: np.zeros(n, np.uint8) for n in lengths}
        recvs = [made.recv(inbox[n], other, tag=n) for n in reversed(lengths)]
        sends = [
            made.send(np.full(n, me.rank + 1, np.uint8), other, n) for n in lengths
        ]
        total = np.ones(5)
        all_reduce(made, total, SUM).wait()
        assert total.tolist() == [2.0] * 5
        for work in [*sends, *recvs]:
            work.detach()
        for work in recvs:
            work.wait()
            assert work.source_rank() == other
        for work in sends:
            work.wait()
        for n in lengths:
            assert (inbox[n] == other + 1).all()
        # One tag: in the order of sending, and as many as you like at once.
        numbers = [np.zeros(1, np.int64) for _ in range(150)]
        arrivals = [made.recv(each, None, 0) for each in numbers]
        sends = [made.send(np.array([i]), other, 0) for i in range(150)]
        for work in [*arrivals, *sends]:
            work.wait()
        assert [int(each[0]) for each in numbers] == list(range(150))


def test_messages_match_by_tag_and_in_order() -> None:
    run_ranks(2, messages)


def from_anybody(me: Rank) -> list[int]:
    with backend(me) as made:
        if me.rank:
            made.send(np.full(3000, me.rank, np.int32), 0, 7).wait()
            # Whoever ends closes its connections, which fails what others still do.
            me.report("sent")
            me.listen()
            return []
        senders = []
        for _ in range(me.size - 1):
            x = np.zeros(3000, np.int32)
            work = made.recv(x, None, 7)
            work.wait()
            senders.append(work.source_rank())
            assert (x == senders[-1]).all()
        me.report("received")
        me.listen()
        return sorted(senders)


def test_a_recv_from_anybody_tells_who_it_was() -> None:
    with Ranks(4, from_anybody) as ranks:
        for rank in range(4):
            ranks.next_report(rank)
        for rank in range(4):
            ranks.tell(rank, "end")
        assert ranks.wait()[0] == [1, 2, 3]


def wrong_sizes(me: Rank) -> None:
    with backend(me) as made:
        for sent, expected in [
            (8, 16),
            (16, 8),
            (50_000, 8),
            (8, 50_000),
            (9000, 8000),
        ]:
            if me.rank == 0:
                made.send(np.ones(sent, np.uint8), 1, 0).wait()
            else:
                x = np.zeros(expected, np.uint8)
                work = made.recv(x, 0, 0)
                message = f"rank 0 of the group has {sent} bytes.*has {expected}"
                with pytest.raises(DistBackendError, match=message):
                    work.wait()
                assert not x.any()
        y = np.ones(3)
        all_reduce(made, y, SUM).wait()
        assert y[0] == 2


def test_a_message_of_another_size_fails_the_recv_and_nothing_else() -> None:
    run_ranks(2, wrong_sizes)


def pending(me: Rank) -> None:
    with backend(me) as made:
        if me.rank == 0:
            held = made.recv(np.zeros(1), 1, 1)  # sent last of all
            held.detach()
            x = np.zeros(1)
            made.recv(x, 1, 2).wait()
            work = all_reduce(made, np.ones(1), SUM)
            work.detach()
            # The collective waits for rank 1, which waits for this message: it
            # was issued before, and ends meanwhile.
            assert not held.is_completed()
            me.report("in the collective")
            work.wait()
            held.wait()
            me.report("done")
        else:
            made.send(np.zeros(1), 0, 2).wait()
            me.listen()
            made.send(np.zeros(1), 0, 1).wait()
            all_reduce(made, np.ones(1), SUM).wait()
            # Its end closes the connection, which fails what rank 0 still waits for.
            me.listen()


def test_a_pending_collective_holds_up_no_message_issued_before_it() -> None:
    with Ranks(2, pending) as ranks:
        ranks.next_report(0)
        ranks.tell(1, "send")
        ranks.next_report(0)
        ranks.tell(1, "end")
        ranks.wait()


def test_bad_tags_and_messages_to_oneself_are_refused() -> None:
    made = refused(2)
    made._side = None
    for tag in (-1, 1 << 48):
        with pytest.raises(ValueError, match="tag="):
            made.check_message(OpType.SEND, 1, tag)
    with pytest.raises(ValueError, match="with itself"):
        made.check_message(OpType.RECV, 0, 0)


@pytest.mark.parametrize(
    ("dtype", "op", "remedy"),
    [
        ("bool", ReduceOp.AVG, "convert it"),
        ("float32", ReduceOp.BAND, "integers and bool"),
        ("complex64", ReduceOp.PRODUCT, "SUM and AVG are possible"),
        ("complex128", ReduceOp.MIN, "SUM and AVG are possible"),
        ("longdouble", SUM, "astype.*float64"),
        ("clongdouble", SUM, "astype.*complex128"),
    ],
)
def test_a_dishonest_reduction_is_refused(
    dtype: str, op: ReduceOp, remedy: str
) -> None:
    with pytest.raises(TypeError, match=f"gloo cannot compute.*{remedy}") as refused:
        arithmetic(np.dtype(dtype), op)
    computed = str(refused.value).partition("it computes that of ")[2].partition(")")[0]
    assert "int32" in computed.split(", ")
    assert dtype not in computed.split(", ")


# -- disagreement, death, abort --------------------------------------------


def disagreement(made: GlooBackend, attempt: int) -> Work:
    x = np.ones(5 + made.rank, np.float32)
    if attempt == 0:
        return all_reduce(made, x, SUM)
    if attempt == 1:
        return made.broadcast(x, made.rank)
    if attempt == 2:
        return made.barrier() if made.rank else made.broadcast(x, 0)
    return made.all_to_all([x, x + 1], [x + 1, x])


def disagree(me: Rank, attempt: int) -> None:
    with me.store("gloo") as store:
        made = GlooBackend(store, me.rank, me.size)
        work = disagreement(made, attempt)
        work.detach()
        started(made, work)
        me.report("started")
        me.listen()
        # Nobody mixed anything up, nobody died: they wait for each other.
        assert work.state is WorkState.STARTED
        assert psutil.pid_exists(side_pid(made))
        # Over tcp the end of one side process ends the op of the other.
        me.meet("looked")
        made.abort("over")
        made.abort("again")
        made.shutdown()


def started(made: GlooBackend, work: Work) -> None:
    def look() -> bool:
        made.refresh()
        return work.started_ns > 0

    until(look)


@pytest.mark.parametrize("attempt", range(4))
def test_ranks_that_disagree_wait_for_each_other(attempt: int) -> None:
    with Ranks(2, disagree, attempt) as ranks:
        for rank in range(2):
            assert ranks.next_report(rank) == "started"
        time.sleep(0.2)  # the time in which something wrong would happen
        for rank in range(2):
            ranks.tell(rank, "look")
        ranks.wait()


def killed(me: Rank) -> tuple[str, float]:
    with me.store("gloo") as store:
        made = GlooBackend(store, me.rank, me.size)
        reasons: list[str] = []
        made.on_failure = lambda reason: reasons.append(str(reason))
        all_reduce(made, np.ones(3), SUM).wait()
        if me.rank:
            me.listen()
            made.shutdown()
            return "", 0
        work = all_reduce(made, np.ones(3), SUM)  # rank 1 never comes
        pid = side_pid(made)
        timer = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
        timer.start()
        began = time.monotonic()
        with pytest.raises(DistBackendError) as caught:
            work.wait()
        seconds = time.monotonic() - began - 0.2
        assert reasons == [str(caught.value)]
        assert f"of rank 0 (pid {pid}) was killed by SIGKILL" in reasons[0]
        with pytest.raises(DistBackendError, match="killed by SIGKILL"):
            made.barrier().wait()
        made.shutdown()
        assert not psutil.pid_exists(pid)  # reaped
        me.report("done")
        return reasons[0], seconds


@pytest.mark.alone
def test_a_killed_side_process_fails_its_works_at_once() -> None:
    with Ranks(2, killed) as ranks:
        ranks.next_report(0)
        ranks.tell(1, "end")
        # Far below the time of the group: a machine may be busy.
        assert ranks.wait()[0][1] < 5


def bad_interface(me: Rank) -> str:
    os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
    reasons: list[str] = []
    with me.store("gloo") as store:
        made = GlooBackend(store, me.rank, me.size)
        made.on_failure = lambda reason: reasons.append(str(reason))
        with pytest.raises(DistBackendError, match="nowhere0"):
            made.barrier().wait()
        made.shutdown()
    return reasons[0]


def test_a_failing_rendezvous_says_why() -> None:
    for reason in run_ranks(2, bad_interface):
        assert "GLOO_SOCKET_IFNAME names 'nowhere0'" in reason


def bad_library(me: Rank) -> str:
    reasons: list[str | DistError] = []
    with me.store("gloo") as store:
        side = SideProcess(NOT_GLOO, store, me.rank, 2, reasons.append)
        until(lambda: reasons)
        side.close()
    return str(reasons[0])


def test_a_side_process_that_ends_by_itself_leaves_its_last_words() -> None:
    (reason,) = run_ranks(1, bad_library)
    assert "ended with exit code 1: " in reason
    assert "Error" in reason


def torn_down_while_read(me: Rank) -> None:
    """A thread stands still while it reads the reports of a process that died."""
    entered, go = threading.Event(), threading.Event()

    class Stuck(EagerOperation):
        def collect(self, report: Any) -> None:
            super().collect(report)
            entered.set()
            assert go.wait(60)

    with me.store("first") as store:
        first = GlooBackend(store, me.rank, me.size)
        first.barrier().wait()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gloo, "EagerOperation", Stuck)
            work = first.barrier()
        reader = threading.Thread(target=work.wait)
        reader.start()
        assert entered.wait(30)
        first.abort("test")
        with backend(me, "second") as second:
            x = np.ones(3)
            work = all_reduce(second, x, SUM)
            work.detach()
            until(work.is_success, 20)
            assert x[0] == me.size
        go.set()
        reader.join(30)
        assert not reader.is_alive()
        first.shutdown()


def test_a_group_that_is_torn_down_holds_up_no_other() -> None:
    run_ranks(2, torn_down_while_read)


def issued_while_another_ends(me: Rank) -> None:
    """An op finds no room just before the op that gives it back is over."""
    with backend(me) as made:
        made.barrier().wait()
        side = made._side
        assert side is not None
        first = made.barrier()
        if me.rank == 0:
            me.listen()
        ended = threading.Thread(target=first.wait)
        looked = False

        class Unlucky(EagerOperation):
            def has_room(self) -> bool:
                nonlocal looked
                if looked:
                    return super().has_room()
                looked = True
                ended.start()
                ended.join(1)
                return False

        with pytest.MonkeyPatch.context() as patch:
            if me.rank == 0:
                patch.setattr(gloo, "EagerOperation", Unlucky)
            second = made.barrier()
        me.report("issued")
        assert second._block(20)
        assert second.is_success()
        if me.rank == 0:
            ended.join(20)


def test_room_that_is_given_back_is_never_missed() -> None:
    with Ranks(2, issued_while_another_ends) as ranks:
        assert ranks.next_report(1) == "issued"
        ranks.tell(0, "go")
        ranks.wait()


def descriptors() -> Counter[str]:
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
    return found


@contextlib.contextmanager
def spare_descriptors(count: int) -> Iterator[None]:
    """Let this process open `count` more descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit is on the number, so the gaps below it are filled first.
    fillers = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(fillers) + 1, hard))
    try:
        for filler in fillers[:count]:
            os.close(filler)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers[count:]:
            os.close(filler)


def test_a_side_process_that_cannot_be_made_leaves_no_descriptor(
    tmp_path: Path,
) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    before = descriptors()
    for spare in range(64):
        try:
            with spare_descriptors(spare):
                made = SideProcess(NOT_GLOO, store, 0, 2, lambda reason: None)
        except OSError:
            until(lambda: not descriptors() - before, 5, str(descriptors() - before))
        else:
            break
    made.kill()
    made.close()
    assert spare > 8
    until(lambda: not descriptors() - before)


def aborted(me: Rank) -> list[float]:
    seconds = []
    for attempt in range(3):
        with me.store(f"gloo{attempt}") as store:
            made = GlooBackend(store, me.rank, me.size)
            if attempt:
                made.barrier().wait()
            if me.rank == 0:
                work = all_reduce(made, np.ones(1 << 20), SUM)
                if attempt == 2:
                    started(made, work)
                timer = threading.Timer(0.1, made.abort, ("test",))
                timer.start()
                # The dispatcher ends the Works; here, once the process is gone.
                work.add_done_callback(lambda _: None)
                assert not work._block(0.05)
                began = time.monotonic()
                made._side._gone.wait(10)
                seconds.append(time.monotonic() - began)
                assert not work.is_completed()
            else:
                me.listen()
                made.abort("test")
            made.shutdown()
        me.report("next")
    return seconds


@pytest.mark.alone
def test_an_abort_takes_no_time_even_while_the_mesh_is_being_built() -> None:
    with Ranks(2, aborted) as ranks:
        for _ in range(3):
            ranks.next_report(0)
            ranks.tell(1, "next")
        # The quickest: what else runs on the machine only adds to a time.
        assert min(ranks.wait()[0]) < 0.5


def nothing_left(me: Rank) -> None:
    def look() -> tuple[int, list[str], list[int], int]:
        with open("/proc/self/maps") as maps:
            mapped = sum("memfd:rankscope" in line for line in maps)
        return (
            len(os.listdir("/proc/self/fd")),
            sorted(t.name for t in threading.enumerate() if "store" not in t.name),
            [child.pid for child in psutil.Process().children()],
            mapped,
        )

    with me.store("warm-up") as store:
        store.set("a", b"a")
        store.get("a")
        before = look()
        for turn in range(4):
            made = GlooBackend(store, me.rank, me.size)
            x = np.ones(5_000_000, np.float32)
            all_reduce(made, x, SUM).wait()
            made.barrier().wait()
            if turn % 2:
                made.abort("test")
            made.shutdown()
            for rank in range(me.size):
                for key in store_keys(rank, me.size):
                    store.delete_key(key)
            me.report(turn)
            me.listen()
        until(lambda: look() == before, what=f"{before} {look()}")


def store_keys(rank: int, size: int) -> list[str]:
    return [f"host/{rank}", f"mesh/{rank}", f"mesh/rank_{rank}"]


def test_nothing_is_left_after_shutdown_or_abort() -> None:
    with Ranks(2, nothing_left) as ranks:
        for turn in range(4):
            for rank in range(2):
                assert ranks.next_report(rank) == turn
            for rank in range(2):
                ranks.tell(rank, "next")
        ranks.wait()


def test_a_side_process_dies_with_its_rank() -> None:
    with Ranks(1, only_one) as ranks:
        pid = ranks.next_report(0)
        ranks.kill(0)
        until(lambda: not lives(pid))


def only_one(me: Rank) -> None:
    with me.store("gloo") as store:
        made = GlooBackend(store, 0, 2)
        made.barrier()
        me.report(side_pid(made))
        me.listen()


def interrupted(me: Rank) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with backend(me) as made:
        made.barrier().wait()
        x = np.ones(3)
        if me.rank:
            me.listen()
            all_reduce(made, x, SUM).wait()
            return
        work = all_reduce(made, x, SUM)

        def report_and_wait() -> None:
            # The interrupt may come before `report` has returned.
            me.report(os.getpid())
            work.wait()

        with pytest.raises(KeyboardInterrupt):
            report_and_wait()
        assert not work.is_completed()
        me.report("interrupted")
        work.wait()  # it goes on in the background
        assert x.tolist() == [2.0] * 3


def test_an_interrupt_ends_the_wait_and_not_the_op() -> None:
    with Ranks(2, interrupted) as ranks:
        pid = ranks.next_report(0)
        time.sleep(0.1)  # the time in which it comes from `report` to `wait`
        # To the whole process group, as from a terminal.
        os.killpg(pid, signal.SIGINT)
        assert ranks.next_report(0, 30) == "interrupted"
        ranks.tell(1, "come")
        ranks.wait()
