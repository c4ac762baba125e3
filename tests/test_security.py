"""What docs/security.md says of ports, files and shared memory, on one host."""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

import rankscope as dist
from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.stores.tcp_keys import shared_key
from rankscope.engines import Cluster


def listeners(*processes: psutil.Process) -> set[tuple[str, int]]:
    """Return address and port at which the processes, or their children, listen."""
    found = set()
    for one in processes:
        for process in (one, *one.children(recursive=True)):
            # One that ends meanwhile listens no more.
            try:
                connections = process.net_connections("tcp")
            except psutil.NoSuchProcess:
                continue
            found |= {
                (connection.laddr.ip, connection.laddr.port)
                for connection in connections
                if connection.status == psutil.CONN_LISTEN
            }
    return found


def elsewhere(found: set[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the addresses at which other hosts could connect."""
    return [one for one in found if not ipaddress.ip_address(one[0]).is_loopback]


def seen(me: Rank, backend: str) -> tuple[set[tuple[str, int]], list[str]]:
    """Return where a connected rank listens, and its shared memory with a name."""
    dist.init_process_group(backend, timeout=60)
    for size in (1, 1 << 18):
        x = np.ones(size)
        dist.all_reduce(x)
        assert (x == me.size).all()
    mine = psutil.Process()
    found = listeners(mine)
    named = [one.path for one in mine.memory_maps() if "SYSV" in one.path]
    named += [
        one.path
        for one in mine.memory_maps()
        if one.path.startswith("/dev/shm/") and Path(one.path).exists()
    ]
    dist.barrier()
    dist.destroy_process_group()
    return found, named


@pytest.mark.processes
def test_the_default_has_no_port_where_all_ranks_share_a_host() -> None:
    zero, one = run_ranks(2, seen, "cpu:tcp")
    assert zero[0]  # the store
    assert elsewhere(zero[0]) == []
    assert one[0] == set()
    assert (zero[1], one[1]) == ([], [])


@pytest.mark.processes
@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_gloo_listens_on_loopback_where_all_ranks_share_a_host() -> None:
    for found, named in run_ranks(2, seen, "cpu:gloo"):
        assert found  # the side process of each rank
        assert elsewhere(found) == []
        assert named == []


@pytest.mark.processes
def test_ucx_listens_on_loopback_where_all_ranks_share_a_host() -> None:
    for found, _ in run_ranks(2, seen, "cpu:ucx"):
        assert found
        assert elsewhere(found) == []


@pytest.mark.processes
def test_ucx_without_tcp_and_sysv_opens_no_port_and_names_no_memory() -> None:
    (host, named), (other, _) = run_ranks(
        2, seen, "cpu:ucx", env={"UCX_TLS": "^sysv,tcp"}
    )
    # That of rank 0 is the store's.
    assert len(host) == 1
    assert elsewhere(host) == []
    assert other == set()
    assert named == []


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two ranks of a user without any configuration, whose files others may read."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("IPYTHONDIR", str(home / ".ipython"))
        before = os.umask(0o022)
        try:
            with Cluster.start(2) as started:
                yield started
        finally:
            os.umask(before)


@pytest.mark.processes
def test_a_cluster_listens_on_loopback(cluster: Cluster) -> None:
    cluster.execute("x = np.ones(1 << 18)\ndist.all_reduce(x)").result(60)
    found = listeners(psutil.Process())
    # The controller's channels, and the store of the ranks.
    assert len(found) > 10
    assert elsewhere(found) == []


@pytest.mark.processes
def test_the_controller_takes_only_clients_with_its_key(cluster: Cluster) -> None:
    security = Path(os.environ["IPYTHONDIR"], "profile_default", "security")
    assert security.stat().st_mode & 0o077 == 0
    files = sorted(security.glob("ipcontroller-*.json"))
    assert len(files) == 2  # for clients, and for engines
    for file in files:
        assert file.stat().st_mode & 0o777 == 0o600
        assert json.loads(file.read_text())["curve_serverkey"]


def test_the_folder_of_the_key_is_its_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANKSCOPE_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    shared_key()
    assert (tmp_path / ".rankscope").stat().st_mode & 0o777 == 0o700
