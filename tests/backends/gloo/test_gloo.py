"""The gloo backend by itself: side process, shared memory, messages, its ends."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

import rankscope as dist
from rankscope.backends.conformance.leaks import lives
from rankscope.backends.conformance.ranks import Rank, Ranks, run_ranks
from rankscope.backends.conformance.waiting import until
from rankscope.backends.errors import DistBackendError, DistError
from rankscope.backends.gloo import backend as gloo_backend
from rankscope.backends.gloo.backend import GlooBackend, Reduction
from rankscope.backends.gloo.library import Library, unavailable
from rankscope.backends.gloo.side_process import MEMORY_BYTES, SideProcess
from rankscope.backends.rank_sets import name_ranks
from rankscope.backends.stores.file import FileStore
from rankscope.backends.stores.prefix import PrefixStore
from rankscope.backends.work.op_type import OpType
from rankscope.backends.work.reduce_op import ReduceOp
from rankscope.backends.work.state import WorkState
from rankscope.backends.work.work import Work

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        unavailable() is not None, reason="no gloo library for this Python"
    ),
]

SUM = ReduceOp.SUM
MAX = ReduceOp.MAX
#: A file that is no library.
NOT_GLOO = Library("xoscar", "0", __file__)


def all_reduce(backend: GlooBackend, array: np.ndarray, op: ReduceOp) -> Work:
    """``backend.all_reduce``, with what its `check` makes of `op`."""
    return backend.all_reduce(array, checked(backend, array, op))


def checked(backend: GlooBackend, array: np.ndarray, op: ReduceOp) -> Reduction:
    reduction = backend.check(OpType.ALL_REDUCE, array.dtype, op)
    assert reduction is not None
    return reduction


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


# -- what it computes ------------------------------------------------------


def in_pieces(me: Rank, memory: int, sizes: Sequence[int]) -> None:
    """The shared memory of `memory` bytes holds one piece of an array, or a few."""
    with pytest.MonkeyPatch.context() as patch, backend(me) as made:
        patch.setattr(gloo_backend, "MEMORY_BYTES", memory)
        rng = np.random.default_rng(5)
        for turn, size in enumerate(sizes):
            data = rng.integers(0, 1000, (me.size, size)).astype(np.float64)
            mine, root = data[me.rank], turn % me.size
            x = mine.copy()
            all_reduce(made, x, SUM).wait()
            assert np.array_equal(x, data.sum(0)), size
            x[:] = mine
            made.reduce(x, root, checked(made, x, ReduceOp.PRODUCT)).wait()
            assert np.array_equal(x, data.prod(0) if me.rank == root else mine), size
            n = mine.astype(np.int64)
            made.reduce(n, root, checked(made, n, MAX)).wait()
            assert np.array_equal(n, data.max(0) if me.rank == root else mine), size
            x[:] = mine
            made.broadcast(x, root).wait()
            assert np.array_equal(x, data[root]), size
            outputs = [np.zeros(size) for _ in range(me.size)]
            made.all_gather(outputs, mine).wait()
            assert np.array_equal(outputs, data), size


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_arrays_go_piece_by_piece_through_the_shared_memory(world: int) -> None:
    whole = ((1 << 16) - 64) // 8
    edges = [whole // 2, whole // 2 + 1, whole - 1, whole, whole + 1, 3 * whole]
    run_ranks(world, in_pieces, 1 << 16, [1, 5, *edges], timeout=90)


def test_arrays_larger_than_the_shared_memory() -> None:
    run_ranks(2, in_pieces, MEMORY_BYTES, [MEMORY_BYTES // 8 + 1], timeout=90)


def floats(op: ReduceOp, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Values of a rank with NaN, infinities and zeros of both signs at any place."""
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -2.0]
    return rng.choice(special, 300).astype(dtype)


def as_numpy_has_it(me: Rank) -> None:
    ufuncs = {
        SUM: np.add,
        ReduceOp.PRODUCT: np.multiply,
        ReduceOp.MIN: np.minimum,
        MAX: np.maximum,
    }
    with backend(me) as made, np.errstate(invalid="ignore"):
        for dtype in ("float16", "float32", "float64"):
            for op, ufunc in ufuncs.items():
                held = [
                    floats(op, dtype, np.random.default_rng([r, 7]))
                    for r in range(me.size)
                ]
                wanted = held[0]
                for other in held[1:]:
                    wanted = ufunc(wanted, other)
                x = held[me.rank].copy()
                all_reduce(made, x, op).wait()
                np.testing.assert_array_equal(x, wanted)
                # Of equal zeros numpy's MIN and MAX give back either one.
                if op in (SUM, ReduceOp.PRODUCT):
                    numbers = ~np.isnan(wanted)
                    signs = np.signbit(x) == np.signbit(wanted)
                    assert signs[numbers].all(), (dtype, op)
                outputs = [np.zeros_like(x) for _ in held]
                made.all_gather(outputs, x).wait()
                bits = {one.tobytes() for one in outputs}
                assert len(bits) == 1, (dtype, op)


@pytest.mark.parametrize("world", [2, 3])
def test_nan_infinities_and_zeros_are_numpys_and_the_same_everywhere(
    world: int,
) -> None:
    run_ranks(world, as_numpy_has_it)


def lost_maxima(me: Rank) -> None:
    values = np.array([1.0, 2.0, 9.0, np.nan])
    with backend(me) as made:
        x = np.full(200_000, values[me.rank])
        all_reduce(made, x, MAX).wait()
        assert np.isnan(x).all()


def test_a_nan_of_one_rank_is_the_maximum_on_all() -> None:
    run_ranks(4, lost_maxima)


def both_ways(me: Rank) -> None:
    """Ops of gloo and of the host engine on one array: each needs the one before."""
    with backend(me) as made:
        x = np.full(1000, me.rank + 1.0)
        works: list[Work] = []
        for turn in range(30):
            works += [
                all_reduce(made, x, SUM),
                all_reduce(made, x, MAX),
                made.broadcast(x, turn % me.size),
            ]
            out = np.zeros(1000 // me.size)
            part = x[: out.size * me.size]
            total = checked(made, x, MAX)
            works.append(made.reduce_scatter_tensor(out, part, total))
        for work in works:
            work.detach()
        for work in works:
            work.wait()
        wanted = me.size * (me.size + 1) / 2 * float(me.size) ** 29
        assert (x == wanted).all()
        assert (out == wanted).all()


@pytest.mark.parametrize("world", [2, 3])
def test_ops_of_gloo_and_of_the_host_engine_run_in_the_order_of_issue(
    world: int,
) -> None:
    run_ranks(world, both_ways)


def flood(me: Rank) -> None:
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


def test_a_late_peer_finds_everything_queued() -> None:
    with Ranks(2, flood) as ranks:
        assert ranks.next_report(1) == "issued"
        ranks.tell(0, "go")
        ranks.wait()


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


def impatient_sockets(me: Rank) -> None:
    """The program has given each new socket a timeout of its own."""
    socket.setdefaulttimeout(0.1)
    with backend(me) as made:
        x = np.ones(3)
        assert all_reduce(made, x, SUM).wait()
        if me.rank:
            me.meet("later")
        work = all_reduce(made, x, SUM)
        if not me.rank:
            assert not work.is_completed()
            me.meet("later")
        assert work.wait()
        assert x.tolist() == [4.0] * 3


def test_a_default_timeout_of_sockets_ends_no_op() -> None:
    run_ranks(2, impatient_sockets)


# -- messages --------------------------------------------------------------


def messages(me: Rank) -> None:
    with backend(me) as made:
        other = 1 - me.rank
        lengths = [1, 4080, 4081, 1_000_000]
        # Posted in another order than they are sent in: tags tell them apart.
        inbox = {n: np.zeros(n, np.uint8) for n in lengths}
        tags = {n: tag for tag, n in enumerate(lengths)}
        recvs = [made.recv(inbox[n], other, tags[n]) for n in reversed(lengths)]
        sends = [
            made.send(np.full(n, me.rank + 1, np.uint8), other, tags[n])
            for n in lengths
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


def wrong_size(me: Rank, sent: int, expected: int) -> None:
    with backend(me) as made:
        reasons: list[str | DistError] = []
        made.on_failure = reasons.append
        if me.rank == 0:
            made.send(np.ones(sent, np.uint8), 1, 0).detach()
        else:
            message = f"rank 0 sent {sent} bytes where {expected} were"
            with pytest.raises(DistBackendError, match=message):
                made.recv(np.zeros(expected, np.uint8), 0, 0).wait()
            assert message in str(reasons[0])
        me.meet("seen")
        made.abort("over")


@pytest.mark.parametrize(("sent", "expected"), [(8, 16), (50_000, 8)])
def test_a_message_of_another_size_fails_the_group(sent: int, expected: int) -> None:
    run_ranks(2, wrong_size, sent, expected)


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


def refuser(me: Rank) -> None:
    with backend(me) as made:
        for tag in (-1, 32000):
            with pytest.raises(ValueError, match=f"tag={tag}; the gloo backend has"):
                made.check_message(OpType.SEND, 1, tag)
        for dtype, op in [
            ("float32", ReduceOp.BAND),
            ("complex64", MAX),
            ("complex128", ReduceOp.MIN),
        ]:
            with pytest.raises(TypeError, match=f"{op.name}.*{dtype}; convert them"):
                made.check(OpType.REDUCE, np.dtype(dtype), op)


def test_bad_tags_and_dishonest_reductions_are_refused() -> None:
    run_ranks(1, refuser)


# -- disagreement, death, abort --------------------------------------------


def disagreement(made: GlooBackend, attempt: int) -> Work:
    x = np.ones(5 + made.rank, np.float32)
    if attempt == 0:
        return all_reduce(made, x, SUM)
    if attempt == 1:
        return made.broadcast(x, made.rank)
    return made.barrier() if made.rank else made.broadcast(x, 0)


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


def parts_that_differ(me: Rank) -> None:
    with backend(me) as made:
        x = np.ones(5 + me.rank, np.float32)
        with pytest.raises(DistBackendError, match="the arrays' sizes differ"):
            made.all_to_all([x, x + 1], [x + 1, x]).wait()
        me.meet("both")
        made.abort("over")


def dtypes_that_differ(me: Rank) -> list[str]:
    dist.init_process_group("cpu:gloo", timeout=1.5)
    x = np.ones(4, "f4" if me.rank else "i4")
    said = []
    for call in (
        lambda: dist.all_reduce(x),
        lambda: dist.broadcast(x, 0),
        lambda: dist.all_gather([np.empty_like(x) for _ in range(2)], x),
    ):
        dist.barrier()
        with pytest.raises(DistError) as caught:
            call()
        said.append(str(caught.value))
        dist.rebuild_process_group()
    assert (x == 1).all()
    dist.destroy_process_group()
    return said


def test_ranks_whose_dtypes_differ_wait_and_are_told_so() -> None:
    ops = "all_reduce", "broadcast", "all_gather"
    for said in run_ranks(2, dtypes_that_differ):
        for op, text in zip(ops, said, strict=True):
            issued = rf"rank 0 issued {op} #\d+ .*"
            assert re.search(
                issued + r"with dtype int32, rank 1 with dtype float32", text
            )


def test_ranks_whose_parts_differ_are_told_so() -> None:
    run_ranks(2, parts_that_differ)


def started(made: GlooBackend, work: Work) -> None:
    def look() -> bool:
        made.refresh()
        return work.started_ns > 0

    until(look)


@pytest.mark.parametrize("attempt", range(3))
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
        made.global_ranks = [5, 7]
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
        assert f"of rank 5 (pid {pid}) was killed by SIGKILL" in reasons[0]
        with pytest.raises(DistBackendError, match="killed by SIGKILL"):
            made.barrier().wait()
        made.shutdown()
        assert not psutil.pid_exists(pid)  # reaped
        me.report("done")
        return reasons[0], seconds


def test_a_killed_side_process_fails_its_works_at_once() -> None:
    with Ranks(2, killed) as ranks:
        ranks.next_report(0)
        ranks.tell(1, "end")
        # Far below the time of the group: a machine may be busy.
        assert ranks.wait()[0][1] < 15


def bad_interface(me: Rank) -> list[str]:
    os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
    reasons: list[str] = []
    with me.store("gloo") as store:
        made = GlooBackend(store, me.rank, me.size)
        made.on_failure = lambda reason: reasons.append(str(reason))
        with pytest.raises(DistBackendError, match="nowhere0"):
            made.barrier().wait()
        made.shutdown()
    return reasons


def test_a_failing_rendezvous_says_why() -> None:
    for reasons in run_ranks(2, bad_interface):
        # The host engine may lose the other rank before.
        assert any("GLOO_SOCKET_IFNAME names 'nowhere0'" in one for one in reasons)


def bad_library(me: Rank) -> str:
    reasons: list[str | DistError] = []
    with me.store("gloo") as store:
        side = SideProcess(NOT_GLOO, store, 0, 2, name_ranks, reasons.append)
        side.start()
        until(lambda: reasons)
        side.close()
    return str(reasons[0])


def test_a_side_process_that_ends_by_itself_leaves_its_last_words() -> None:
    (reason,) = run_ranks(1, bad_library)
    assert "the side process of rank 0 (pid " in reason
    assert ") ended with exit code 1: " in reason
    assert "ImportError" in reason


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
                made = SideProcess(
                    NOT_GLOO, store, 0, 2, name_ranks, lambda reason: None
                )
        except OSError:
            until(lambda: not descriptors() - before, 5, str(descriptors() - before))
        else:
            break
    made.kill()
    made.close()
    assert spare > 5
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
                assert not work._block(0.05)
                began = time.monotonic()
                side = made._side
                assert side is not None
                until(partial(getattr, side, "_released"), 10)
                seconds.append(time.monotonic() - began)
                assert work._block(10)
                assert not work.is_success()
            else:
                me.listen()
                made.abort("test")
            made.shutdown()
        me.report("next")
    return seconds


def test_an_abort_takes_no_time_even_while_the_mesh_is_being_built() -> None:
    with Ranks(2, aborted) as ranks:
        for _ in range(3):
            ranks.next_report(0)
            ranks.tell(1, "next")
        # The quickest: what else runs on the machine only adds to a time.
        assert min(ranks.wait()[0]) < 2


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

    with me.store("warm-up") as warm:
        warm.set("a", b"a")
        warm.get("a")
        before = look()
        for turn in range(4):
            store = PrefixStore(f"turn {turn}", warm)
            made = GlooBackend(store, me.rank, me.size)
            x = np.ones(5_000_000, np.float32)
            all_reduce(made, x, SUM).wait()
            all_reduce(made, x, MAX).wait()
            made.barrier().wait()
            me.report(turn)
            me.listen()
            if turn % 2:
                made.abort("test")
            made.shutdown()
            del made
        until(lambda: look() == before, what=f"{before} {look()}")


def test_nothing_is_left_after_shutdown_or_abort() -> None:
    with Ranks(2, nothing_left) as ranks:
        for turn in range(4):
            for rank in range(2):
                assert ranks.next_report(rank) == turn
            for rank in range(2):
                ranks.tell(rank, "next")
        ranks.wait()


def test_a_side_process_dies_with_its_rank() -> None:
    with Ranks(2, one_dies) as ranks:
        pid = ranks.next_report(0)
        assert lives(pid)
        ranks.kill(0)
        until(lambda: not lives(pid))


def one_dies(me: Rank) -> None:
    with backend(me) as made:
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
