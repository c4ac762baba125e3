"""What torch's stores have besides set, get, add and wait: one test for each store."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankscope.backends.conformance.ranks import reserve_port
from rankscope.backends.errors import (
    DistStoreError,
    DistStoreTimeoutError,
    QueueEmptyError,
)
from rankscope.backends.stores.base import Store
from rankscope.backends.stores.file import FileStore
from rankscope.backends.stores.key_table import KeyTable
from rankscope.backends.stores.tcp import TCPStore
from tests.backends.stores.sites import KEY, Site


@pytest.mark.processes
def test_append(site: Site, store: Store) -> None:
    store.append("log", "a")
    site.open().append("log", b"\x00b")
    assert store.get("log") == b"a\x00b"
    store.set("log", "")
    store.append("log", "c")
    assert store.get("log") == b"c"
    assert store.num_keys() == 1
    assert store.has_extended_api()


@pytest.mark.processes
def test_append_ends_a_wait(site: Site, store: Store) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "late", 20)
        site.open().append("late", "come")
        assert waiting.result(30) == b"come"


@pytest.mark.processes
def test_many_keys_at_once(site: Site, store: Store) -> None:
    store.multi_set(["a", "b"], ["1", b"2"])
    store.multi_set([], [])
    assert site.open().multi_get(["b", "a", "b"], 10) == [b"2", b"1", b"2"]
    assert store.multi_get([]) == []
    assert sorted(store.list_keys()) == ["a", "b"]
    with pytest.raises(ValueError, match="2 keys and 1 values"):
        store.multi_set(["c", "d"], ["3"])
    with pytest.raises(TypeError, match="bytes or str, not int"):
        store.multi_set(["c", "d"], ["3", 4])  # type: ignore[list-item]
    assert not store.check(["c"])
    with pytest.raises(DistStoreTimeoutError, match="misses 'p?/?c'"):
        store.multi_get(["a", "c"], timedelta(0))


@pytest.mark.processes
def test_a_queue_gives_each_value_once_and_in_order(site: Site, store: Store) -> None:
    other = site.open()
    for value in ("1", b"2", ""):
        store.queue_push("q", value)
    assert other.queue_len("q") == 3
    assert (other.queue_pop("q"), store.queue_pop("q")) == (b"1", b"2")
    assert other.queue_pop("q", block=False) == b""
    assert store.queue_len("q") == store.queue_len("other") == 0
    with pytest.raises(QueueEmptyError, match="'p?/?q' is empty"):
        store.queue_pop("q", block=False)
    # A queue is no key.
    store.queue_push("q", "4")
    assert store.num_keys() == 0
    assert not store.check(["q"])


@pytest.mark.processes
def test_a_queue_is_waited_for_within_the_timeout(site: Site, store: Store) -> None:
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(DistStoreTimeoutError, match=r"0\.05 s .*'p?/?q' is still"):
        store.queue_pop("q")
    with pytest.raises(DistStoreTimeoutError, match="after 0 s"):
        store.queue_pop("q", timeout=0)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(store.queue_pop, "q", True, 20) for _ in range(3)]
        other = site.open()
        for number in range(3):
            other.queue_push("q", str(number))
        assert {one.result(30) for one in waiting} == {b"0", b"1", b"2"}
    assert other.queue_len("q") == 0


@pytest.mark.processes
def test_close_ends_a_wait_for_a_queue(site: Site, store: Store) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.queue_pop, "q", True, 30)
        store.queue_push("begun", "")
        store.close()
        with pytest.raises(DistStoreError, match="closed"):
            waiting.result(20)
    # What comes afterwards is for the others.
    other = site.open()
    other.queue_push("q", "left")
    assert other.queue_pop("q", timeout=10) == b"left"


@pytest.mark.processes
def test_the_timeout_of_a_store(store: Store) -> None:
    assert store.timeout == timedelta(seconds=20)
    half: Any = np.float32(0.5)
    store.set_timeout(half)
    assert store.timeout == timedelta(seconds=0.5)
    store.timeout = timedelta(0)
    with pytest.raises(DistStoreTimeoutError, match="after 0 s"):
        store.get("absent")
    with pytest.raises(ValueError, match="timeout=-1; expected at least 0"):
        store.set_timeout(-1)
    with pytest.raises(TypeError, match="timeout .*is a str; expected seconds"):
        store.get("absent", "soon")  # type: ignore[arg-type]


@pytest.mark.processes
def test_a_clone_has_the_same_keys_and_an_end_of_its_own(store: Store) -> None:
    store.set_timeout(7)
    other = store.clone()
    assert type(other) is type(store)
    assert other.timeout == timedelta(seconds=7)
    other.set("k", "v")
    assert store.get("k") == b"v"
    other.close()
    with pytest.raises(DistStoreError, match="closed"):
        other.get("k")
    assert store.get("k") == b"v"


@pytest.mark.processes
def test_a_barrier_holds_back_until_all_have_come(site: Site, store: Store) -> None:
    stores = [store, site.open(), site.open()]
    order: list[int] = []

    def come(place: int) -> None:
        for _ in range(3):
            order.append(place)
            stores[place].barrier("b", 3, 20)

    with ThreadPoolExecutor(3) as pool:
        for one in [pool.submit(come, place) for place in range(3)]:
            one.result(30)
    assert [sorted(order[start : start + 3]) for start in (0, 3, 6)] == [[0, 1, 2]] * 3
    with pytest.raises(DistStoreTimeoutError):
        store.barrier("b", 3, 0.05)
    with pytest.raises(ValueError, match="world_size=0"):
        store.barrier("b", 0)


@pytest.mark.processes
def test_add_takes_numpys_integers_and_no_floats(store: Store) -> None:
    amount: Any = np.int64(2)
    assert store.add("n", amount) == 2
    with pytest.raises(TypeError, match=r"add: amount is 1\.5, a float"):
        store.add("n", 1.5)  # type: ignore[arg-type]


def test_a_value_is_not_given_to_a_client_that_died() -> None:
    given: list[tuple[bytes, bytes]] = []

    def answer(ticket: tuple[bytes, bytes], status: bytes, payload: Any) -> bool:
        given.append(ticket)
        return ticket[0] != b"dead"

    table = KeyTable(answer)
    assert table.handle((b"dead", b"1"), b"pop", [b"q"]) is None
    assert table.handle((b"alive", b"1"), b"pop", [b"q"]) is None
    table.handle((b"x", b"1"), b"push", [b"q", b"v"])
    assert given == [(b"dead", b"1"), (b"alive", b"1")]
    assert table.handle((b"dead", b"2"), b"pop", [b"q"]) is None
    table.handle((b"x", b"2"), b"push", [b"q", b"w"])
    assert table.handle((b"alive", b"2"), b"pop", [b"q"]) == (b"ok", [b"w"])


def test_the_master_waits_for_the_workers(tmp_path: Path) -> None:
    def worker(rank: int) -> TCPStore:
        return TCPStore("127.0.0.1", port, 3, rank == 0, timeout=20, key=KEY)

    with reserve_port() as reserved, ThreadPoolExecutor(3) as pool:
        port = reserved.getsockname()[1]
        first = pool.submit(worker, 0)
        others = [pool.submit(worker, rank) for rank in (1, 2)]
        stores = [one.result(30) for one in (first, *others)]
    assert stores[0].num_keys() == 0
    for store in reversed(stores):
        store.close()
    with pytest.raises(DistStoreTimeoutError, match=r"1 of 2 processes .*0\.1 s"):
        TCPStore("127.0.0.1", 0, 2, True, timeout=0.1, key=KEY)


@pytest.mark.processes
def test_the_last_to_leave_removes_a_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    first = FileStore(path, 2, temporary=True)
    first.close()
    assert path.exists()  # the other one has not come yet
    first = FileStore(path, 2, temporary=True)
    program = (
        "from rankscope.backends.stores.file import FileStore\n"
        f"store = FileStore({str(path)!r}, 2, temporary=True)\n"
        "print(store.num_keys(), flush=True)\ninput()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "0\n"
    first.close()
    assert path.exists()  # the other one has it open
    other.communicate("\n", timeout=30)
    assert other.returncode == 0
    assert not path.exists()


def test_the_arguments_of_torchs_stores(tmp_path: Path) -> None:
    port: Any = np.int64(0)
    store = TCPStore("127.0.0.1", port, None, True, 30, True, False, None, False)
    store.set("a", "b")
    assert store.get("a") == b"b"
    store.close()
    with pytest.raises(ValueError, match="multi_tenant is True; .* PrefixStore"):
        TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True)
    with pytest.raises(ValueError, match="master_listen_fd is 3; expected None"):
        TCPStore("127.0.0.1", 0, is_master=True, master_listen_fd=3)
    one = FileStore(file_name=str(tmp_path / "keys"), world_size=1)
    assert one.path == tmp_path / "keys"
    one.close()
