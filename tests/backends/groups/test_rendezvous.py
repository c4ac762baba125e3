"""Rendezvous: every form of init_method, and every way to get it wrong."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

import rankscope as dist
from rankscope.backends.conformance.ranks import reserve_port
from rankscope.backends.errors import DistError, DistStoreTimeoutError
from rankscope.backends.groups import rendezvous as rendezvous_module
from rankscope.backends.groups.arrival import announce_end
from rankscope.backends.groups.rendezvous import rendezvous
from rankscope.backends.stores.base import Store

KEY = b"the key of this test"

_VARIABLES = [
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
]


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def port() -> Iterator[int]:
    with reserve_port() as reserved:
        yield reserved.getsockname()[1]


def meet(init_method: str, world_size: int = 3) -> None:
    """All ranks, as threads, meet and see each other's keys."""
    # The server ends with the store of rank 0, which is closed last.
    done = threading.Barrier(world_size, timeout=20)

    def run(rank: int) -> list[bytes]:
        store, *numbers = rendezvous(init_method, rank, world_size, 20, KEY)
        assert numbers == [rank, world_size]
        store.set(f"rank/{rank}", str(rank))
        values = [store.get(f"rank/{r}") for r in range(world_size)]
        if rank:
            store.close()
            done.wait()
            return values
        done.wait()
        for other in range(1, world_size):
            values[other] = store.get(f"rank/{other}")
        store.close()
        return values

    with ThreadPoolExecutor(world_size) as pool:
        for values in pool.map(run, range(world_size)):
            assert values == [b"0", b"1", b"2"][:world_size]


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "a name with spaces"
    meet(f"file://{str(path).replace(' ', '%20')}")
    assert not path.exists()
    path.write_bytes(b"rankscope store 2\n")  # what a run left that was killed
    meet(f"file://{path}?world_size=3")
    assert not path.exists()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("names", "values"),
    [
        (("RANK", "WORLD_SIZE"), {}),
        (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), {}),
        (("PMI_RANK", "PMI_SIZE"), {}),
        (("RANK", "WORLD_SIZE"), {"PMI_RANK": "7", "PMI_SIZE": "9"}),
    ],
)
def test_env_in_real_processes(
    port: int, names: tuple[str, str], values: dict[str, str]
) -> None:
    program = (
        "from rankscope.backends.groups.rendezvous import rendezvous\n"
        "store, rank, size = rendezvous(None, -1, -1, 20)\n"
        "store.set(f'rank/{rank}', 'x')\n"
        "store.wait([f'rank/{r}' for r in range(size)])\n"
        "store.add('out', 1)\n"
        "print(rank, size)\n"
        "if rank == 0:\n"
        "    while store.add('out', 0) < size: pass\n"
    )
    shared = dict(os.environ, MASTER_ADDR="localhost", MASTER_PORT=str(port))
    shared |= {"RANKSCOPE_KEY": "secret"} | values
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=shared | {names[0]: str(rank), names[1]: "2"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=30)[0] for process in processes]
    assert outputs == ["0 2\n", "1 2\n"]


def test_env_names_everything_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DistError) as caught:
        rendezvous("env://", -1, -1, 1, KEY)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        assert name in str(caught.value)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(DistError, match=r": MASTER_PORT, WORLD_SIZE\. "):
        rendezvous(None, -1, -1, 1, KEY)


def test_env_bad_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "zero")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1234")
    with pytest.raises(DistError, match="RANK is 'zero'"):
        rendezvous("env://", -1, 2, 1, KEY)


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(_VARIABLES, ("5", "9", "127.0.0.1", "0"), strict=False):
        monkeypatch.setenv(name, value)
    store, rank, size = rendezvous("env://", 0, 1, 5, KEY)
    assert (rank, size) == (0, 1)
    store.close()


def test_file_takes_the_rank_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    store, *place = rendezvous(f"file://{tmp_path}/s", -1, -1, 5, KEY)
    assert place == [1, 2]
    store.close()


def test_tcp(port: int) -> None:
    meet(f"tcp://127.0.0.1:{port}", 2)


def test_a_rank_that_waits_for_the_end_of_earlier_groups_says_so(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others may go on in them, where the rank alone was started again."""
    monkeypatch.setattr(rendezvous_module, "_SILENT", 0.0)
    place = f"tcp://127.0.0.1:{port}"
    with closing(rendezvous(place, 0, 2, 5, KEY)[0]) as store:
        announce_end(store, 1)
        with closing(rendezvous(place, 1, 2, 0.2, KEY)[0]):
            (said,) = caplog.messages
    assert said.startswith("init_process_group on rank 1: a process of this rank, or")
    assert f"has left the groups at 127.0.0.1:{port}" in said


def test_timeout_is_the_stores(tmp_path: Path) -> None:
    store, *_ = rendezvous(f"file://{tmp_path}/s", 0, 2, 0.05)
    with pytest.raises(DistStoreTimeoutError, match="rank 1 did not come"):
        store.wait(["rank/1"])
    store.close()


@pytest.mark.parametrize(
    ("init_method", "rank", "world_size", "message"),
    [
        ("ftp://host:1", 0, 1, "expected env://"),
        ("nonsense", 0, 1, "expected env://"),
        ("tcp://host", 0, 1, "expected tcp://host:port"),
        ("tcp://:1234", 0, 1, "expected tcp://host:port"),
        ("tcp://host:99999", 0, 1, "tcp://host:99999"),
        ("file://relative/path", 0, 1, "absolute path"),
        ("file:///", 0, 1, "absolute path"),
        ("file:///tmp/x", 2, 2, "rank 2: expected 0 to 1"),
        ("file:///tmp/x", -1, 2, "rank -1"),
        ("file:///tmp/x", 0, -1, "world_size -1"),
        ("file:///tmp/x?rank=one", -1, 2, "rank='one'"),
        ("file:///tmp/x?rank=1", 0, 2, "rank=1, the argument 0"),
    ],
)
def test_bad_init_method(
    init_method: str, rank: int, world_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rendezvous(init_method, rank, world_size, 1, KEY)


# -- what backends do at init --------------------------------------------------


def test_a_registered_backend_acts_at_init_and_its_launcher_gives_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a group that has another backend, too."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    called: list[str] = []

    def create(store: dist.Store, rank: int, size: int, timeout: float) -> dist.Backend:
        return dist.Backend(rank, size)

    def launcher(timeout: float, key: bytes | None) -> tuple[dist.Store, int, int]:
        called.append("rendezvous")
        return store, 0, 1

    monkeypatch.setattr(dist.Backend, "registry", dict(dist.Backend.registry))
    dist.Backend.register_backend(
        "launched",
        create,
        devices="cpu",
        rendezvous=launcher,
        on_init=lambda: called.append("on_init"),
    )
    dist.Backend.register_backend("other", create, devices="cpu")
    dist.init_process_group("cpu:other", timeout=10)
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        assert called == ["rendezvous", "on_init"]
    finally:
        dist.destroy_process_group()
        store.close()


@pytest.mark.processes
def test_init_imports_no_backend_that_has_nothing_to_do() -> None:
    script = (
        "import sys, tempfile, rankscope as dist\n"
        "dist.Backend.register_backend('mine', dist.Backend, devices='cpu')\n"
        "store = dist.FileStore(tempfile.mkdtemp() + '/store', 1)\n"
        "dist.init_process_group('cpu:mine', store=store, rank=0, world_size=1)\n"
        "print([n for n in ('tcp', 'gloo', 'nccl')\n"
        "       if f'rankscope.backends.{n}.backend' in sys.modules])\n"
        "dist.destroy_process_group(); store.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_a_port_at_which_torchrun_listens_itself(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    # The store is 1009 away from the agent's port: at the one that is reserved.
    monkeypatch.setenv("MASTER_PORT", str(port - 1009))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store, rank, size = rendezvous("env://", 0, 1, 5, KEY)
    assert isinstance(store, dist.TCPStore)
    with closing(store):
        assert (rank, size) == (0, 1)
        assert store.port == port
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    store, _, _ = rendezvous("env://", 0, 1, 5, KEY)
    assert isinstance(store, dist.TCPStore)
    with closing(store):
        assert store.port == port


def test_ranks_of_another_step_of_slurm_are_no_peers(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of two jobs may lead to one port."""
    monkeypatch.setattr(rendezvous_module, "_SILENT", 0.0)

    def come(step: str, rank: int) -> Store:
        monkeypatch.setattr(rendezvous_module, "meeting_step", lambda: step)
        return rendezvous(f"tcp://127.0.0.1:{port}", rank, 2, 20, KEY)[0]

    with (
        closing(come("100.31", 0)),
        closing(come("100.31", 1)),
        pytest.raises(dist.DistNetworkError, match=r"ranks of Slurm's step 100\.31"),
    ):
        come("101.0", 1)


def test_rank_0_of_another_step_of_slurm_says_that_its_port_is_taken(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_module, "why_port_is_taken", lambda: "it is taken")
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(dist.DistNetworkError, match="^it is taken$"),
    ):
        rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, 20, KEY)
