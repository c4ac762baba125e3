"""The stores: one specification, run over each of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from rankscope.backends.errors import (
    DistNetworkError,
    DistNetworkTimeoutError,
    DistStoreError,
    DistStoreTimeoutError,
)
from rankscope.backends.stores import base, tcp, tcp_client
from rankscope.backends.stores.base import Store
from rankscope.backends.stores.file import FileStore
from rankscope.backends.stores.hash import HashStore
from rankscope.backends.stores.key_table import KeyTable
from rankscope.backends.stores.prefix import PrefixStore
from rankscope.backends.stores.tcp import TCPStore
from rankscope.backends.stores.tcp_keys import curve_keys, shared_key
from tests.backends.stores.sites import KEY, Site


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


# -- what a store is ---------------------------------------------------------


@pytest.mark.processes
def test_set_get(site: Site, store: Store) -> None:
    store.set("a", b"\x00\xff")
    store.set("ключ/β", "текст")
    other = site.open()
    assert other.get("a") == b"\x00\xff"
    assert other.get("ключ/β") == "текст".encode()
    other.set("a", b"")
    assert store.get("a") == b""
    assert store.num_keys() == 2


@pytest.mark.processes
def test_value_of_a_wrong_type(store: Store) -> None:
    with pytest.raises(TypeError, match="bytes or str, not int"):
        store.set("a", 3)  # type: ignore[arg-type]


@pytest.mark.processes
def test_keys_of_a_wrong_type(store: Store) -> None:
    given: Any
    for given in (3, b"a", None):
        with pytest.raises(TypeError, match="a key of a store is a str, not "):
            store.get(given)
    for call in (store.wait, store.check, store.multi_get):
        with pytest.raises(TypeError, match="keys is 'ab', a str; expected a list"):
            call("ab")
    store.wait([])


@pytest.mark.processes
def test_large_value(site: Site, store: Store) -> None:
    value = os.urandom(8 << 20)
    store.set("large", value)
    assert site.open().get("large") == value


@pytest.mark.processes
def test_add(site: Site, store: Store) -> None:
    assert store.add("n", 5) == 5
    assert site.open().add("n", -7) == -2
    assert store.get("n") == b"-2"
    for text in ("abc", "1_2"):
        store.set("word", text)
        with pytest.raises(DistStoreError, match=rf"word.*{text}.*no integer"):
            store.add("word", 1)
    assert store.add("n", 0) == -2


@pytest.mark.processes
def test_compare_set(store: Store) -> None:
    assert store.compare_set("k", "not this", "x") == b"not this"
    assert not store.check(["k"])
    assert store.compare_set("k", b"", "first") == b"first"
    assert store.compare_set("k", "", "second") == b"first"
    assert store.compare_set("k", "first", "second") == b"second"
    assert store.get("k") == b"second"


@pytest.mark.processes
def test_delete(store: Store) -> None:
    store.set("k", "v")
    assert store.delete_key("k")
    assert not store.delete_key("k")
    assert not store.check(["k"])
    assert store.num_keys() == 0
    store.multi_set(["a/1", "a/2", "b"], ["", "", ""])
    PrefixStore("a", store).clear()
    assert store.list_keys() == ["b"]
    store.clear()
    assert store.num_keys() == 0


@pytest.mark.processes
def test_check(store: Store) -> None:
    store.set("a", "1")
    store.set("b", "2")
    assert store.check([])
    assert store.check(["a", "b"])
    assert not store.check(["a", "c"])


# -- waiting -----------------------------------------------------------------


@pytest.mark.processes
def test_wait_times_out_and_names_keys_and_ranks(store: Store) -> None:
    store.set("seat/1", "here")
    start = time.monotonic()
    with pytest.raises(DistStoreTimeoutError) as caught:
        store.wait(["seat/0", "seat/1", "seat/3"], timedelta(seconds=0.2))
    assert 0.2 <= time.monotonic() - start < 10
    message = str(caught.value)
    assert "seat/0'" in message
    assert "seat/1'" not in message
    assert "0.2 s" in message
    assert "ranks 0, 3 did not come" in message


@pytest.mark.processes
def test_get_times_out(store: Store) -> None:
    with pytest.raises(DistStoreTimeoutError, match="absent") as caught:
        store.get("absent", 0.05)
    assert "rank" not in str(caught.value)
    with pytest.raises(DistStoreTimeoutError, match="absent"):
        store.get("absent", 0)


@pytest.mark.processes
def test_store_timeout_is_the_default(store: Store) -> None:
    store.timeout = 0.05
    with pytest.raises(DistStoreTimeoutError, match=r"after 0\.05 s"):
        store.wait(["absent"])


@pytest.mark.processes
def test_wait_ends_when_the_last_key_comes(site: Site, store: Store) -> None:
    other = site.open()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait, ["a", "b", "a"], 10)
        other.set("a", "1")
        assert not waiting.done()
        other.set("b", "2")
        waiting.result(30)
    store.wait([])


@pytest.mark.processes
def test_waits_block_nobody_else(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(store.get, f"late/{i}", 10) for i in range(7)]
        for i in range(7):
            store.set(f"late/{i}", str(i))
            assert waiting[i].result(30) == str(i).encode()


@pytest.mark.processes
def test_many_threads(store: Store) -> None:
    def work(worker: int) -> None:
        for i in range(20):
            store.add("count", 1)
            store.set(f"{worker}/{i}", str(i))
            assert store.get(f"{worker}/{i}") == str(i).encode()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert store.add("count", 0) == 120


# -- watching ----------------------------------------------------------------


@pytest.mark.processes
def test_watch(site: Site, store: Store) -> None:
    called = threading.Event()
    values: list[bytes] = []

    def callback(value: bytes) -> None:
        # A callback may use the store that calls it.
        values.append(value + store.get("present"))
        called.set()

    store.set("present", "!")
    store.watch("w", callback)
    other = site.open()
    assert not called.is_set()
    other.set("w", "v")
    assert called.wait(30)
    other.set("w", "again")
    store.get("w")
    assert values == [b"v!"]


@pytest.mark.processes
def test_a_watch_is_called_at_once(site: Site, store: Store) -> None:
    other, seconds = site.open(), []
    for attempt in range(3):
        called = threading.Event()
        store.watch(f"w{attempt}", lambda _, called=called: called.set())  # type: ignore[misc]
        start = time.monotonic()
        other.set(f"w{attempt}", "v")
        assert called.wait(30)
        seconds.append(time.monotonic() - start)
    # The quickest: what else runs on the machine only adds to a time.
    assert min(seconds) < 1


@pytest.mark.processes
def test_watch_a_present_key_and_cancel(store: Store) -> None:
    store.set("w", "v")
    called = threading.Event()
    cancelled: list[bytes] = []
    store.watch("later", cancelled.append)()
    store.watch("w", lambda value: called.set())()  # too late, or just in time
    store.watch("w", lambda value: called.set())
    assert called.wait(30)
    store.set("later", "x")
    seen = threading.Event()
    store.watch("later", lambda value: seen.set())
    assert seen.wait(30)
    assert cancelled == []


@pytest.mark.processes
def test_a_failing_callback_is_logged(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    called = threading.Event()

    def fail(value: bytes) -> None:
        raise LookupError("on purpose")

    store.set("w", "v")
    store.watch("w", fail)
    store.watch("w", lambda value: called.set())
    assert called.wait(30)
    until(lambda: "on purpose" in caplog.text)


def test_a_callback_that_a_closed_store_fails_is_no_fault(
    master: TCPStore, caplog: pytest.LogCaptureFixture
) -> None:
    called = threading.Event()
    client = TCPStore(master.host, master.port, key=KEY)

    def use(value: bytes) -> None:
        called.set()
        until(lambda: client.lost)
        client.get("v")

    client.watch("w", use)
    master.set("w", "v")
    assert called.wait(30)
    client.close()
    assert "failed" not in caplog.text


def test_what_does_not_end_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(base, "END_WAIT", 0.05)
    release = threading.Event()
    thread = threading.Thread(target=release.wait, daemon=True)
    thread.start()
    base.join(thread, "the server of a store")
    assert "the server of a store has not ended within 0.05 s" in caplog.text
    release.set()
    thread.join(30)


# -- closing -----------------------------------------------------------------


@pytest.mark.processes
def test_close_wakes_waiters(site: Site, store: Store) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(store.get, "never", 30) for _ in range(2)]
        called: list[bytes] = []
        store.watch("w", called.append)
        store.close()
        for future in waiting:
            with pytest.raises(DistStoreError, match="closed"):
                future.result(30)
    with pytest.raises(DistStoreError, match="closed"):
        store.set("a", "1")
    with pytest.raises(DistStoreError, match="closed"):
        store.watch("a", called.append)
    store.close()
    site.open().set("w", "v")
    assert called == []


def test_a_dropped_store_is_closed(tmp_path: Path) -> None:
    before = threading.active_count()
    TCPStore("127.0.0.1", 0, is_master=True, key=KEY)
    FileStore(tmp_path / "f").watch("k", print)
    HashStore().watch("k", print)
    assert threading.active_count() == before


# -- several processes -------------------------------------------------------


@pytest.mark.processes
def test_processes_share_it(far_site: Site) -> None:
    site, store = far_site, far_site.open()
    body = (
        "for _ in range(50): store.add('count', 1)\n"
        "store.set('done', 'x')\n"
        "assert store.get('go', 20) == b'now'"
    )
    processes = [site.run(body) for _ in range(3)]
    for _ in range(50):
        store.add("count", 1)
    store.wait(["done"], 10)
    store.set("go", "now")
    assert [process.wait(20) for process in processes] == [0, 0, 0]
    assert store.add("count", 0) == 200
    for process in processes:
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.processes
def test_a_rank_that_dies_harms_nobody(far_site: Site) -> None:
    site, store = far_site, far_site.open()
    process = site.run(
        "store.set('a', 'kept')\n"
        "import threading\n"
        "threading.Thread(target=store.get, args=('never',), daemon=True).start()\n"
        "while True: store.set('noise', 'x' * 30000)"
    )
    store.wait(["a", "noise"], 10)
    process.kill()
    assert process.wait(30) == -signal.SIGKILL
    assert process.stdout is not None
    process.stdout.close()
    store.set("never", "now")
    assert store.get("a") == b"kept"
    assert site.open().get("noise") == b"x" * 30000


# -- FileStore ---------------------------------------------------------------


def test_file_store_in_a_directory(tmp_path: Path) -> None:
    FileStore(tmp_path).set("k", "v")
    assert (tmp_path / "rankscope-store").exists()
    assert FileStore(tmp_path).get("k") == b"v"
    assert (tmp_path / "rankscope-store").stat().st_mode & 0o077 == 0


def test_file_store_overwrites_what_a_dead_writer_left(tmp_path: Path) -> None:
    path = tmp_path / "store"
    first = FileStore(path)
    first.set("a", "1")
    whole = path.stat().st_size
    first.set("b", "22222222")
    with path.open("r+b") as file:  # the writer of b died in the middle
        file.truncate(whole + 20)
    first.close()
    second = FileStore(path)
    assert not second.check(["b"])
    second.set("c", "3")
    second.close()
    third = FileStore(path)
    assert (third.get("a"), third.get("c"), third.num_keys()) == (b"1", b"3", 2)
    third.close()


def test_file_store_refuses_another_file(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("do not overwrite this text\n")
    with pytest.raises(DistStoreError, match="not a store"):
        FileStore(path)
    assert path.read_text() == "do not overwrite this text\n"
    with pytest.raises(DistStoreError, match="directory must exist"):
        FileStore(tmp_path / "absent" / "store")


@pytest.mark.processes
def test_file_store_discards_what_an_earlier_run_left(tmp_path: Path) -> None:
    path = tmp_path / "store"
    FileStore(path).set("old", "1")
    fresh = FileStore(path, discard_stale=True)
    assert fresh.num_keys() == 0
    fresh.set("new", "2")
    check = (
        "from rankscope.backends.stores.file import FileStore\n"
        f"store = FileStore({str(path)!r}, discard_stale=True)\n"
        "assert store.get('new') == b'2'"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
    fresh.close()


def test_file_store_after_its_file_was_deleted(tmp_path: Path) -> None:
    path = tmp_path / "store"
    old = FileStore(path)
    old.set("a", "old")
    path.unlink()
    new = FileStore(path)
    assert new.num_keys() == 0
    assert old.get("a") == b"old"
    old.close()
    new.set("a", "new")
    assert FileStore(path).get("a") == b"new"
    new.close()


@pytest.mark.processes
def test_file_store_lock_held_by_a_stopped_process(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = FileStore(path, timeout=0.3)
    hold = (
        "from rankscope.backends.stores.file import FileStore\n"
        f"store = FileStore({str(path)!r})\n"
        "with store._file.locked(1e9):\n"
        "    print('ready', flush=True)\n    input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    with pytest.raises(DistStoreTimeoutError, match="held by another process"):
        store.set("a", "1")
    process.communicate(b"\n", 10)
    store.set("a", "1")
    store.close()


@pytest.mark.processes
def test_file_store_of_a_forked_child_is_the_parents(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "import rankscope as dist\n"
        f"path = {str(tmp_path / 'store')!r}\n"
        "store = dist.FileStore(path, 1, temporary=True)\n"
        "store.watch('never', print)\n"
        "if os.fork() == 0:\n"
        "    try:\n        store.set('a', 'b')\n"
        "    except dist.DistStoreError as error:\n        print(error, flush=True)\n"
        "    sys.exit()\n"
        "os.wait()\n"
        "store.set('a', 'c')\n"
        "print(os.path.exists(path), store.get('a'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    refused, kept = done.stdout.splitlines()
    assert "opened before a fork: open it anew" in refused
    assert kept == "True b'c'"
    assert not (tmp_path / "store").exists()


# -- TCPStore ----------------------------------------------------------------


@pytest.fixture
def master() -> Iterator[TCPStore]:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=20, key=KEY)
    yield store
    store.close()


def test_tcp_wrong_key_is_told_at_once(master: TCPStore) -> None:
    start = time.monotonic()
    with pytest.raises(DistNetworkError, match="its key is another one"):
        TCPStore("127.0.0.1", master.port, timeout=30, key=b"wrong")
    assert time.monotonic() - start < 20
    master.set("still", "there")


@pytest.mark.parametrize("security", ["none", "plain", "server key only"])
def test_tcp_strangers_cannot_write(master: TCPStore, security: str) -> None:
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 0
    if security == "plain":
        stranger.plain_username, stranger.plain_password = b"admin", KEY
    elif security == "server key only":
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.curve_serverkey = curve_keys(KEY).server_public
    monitor = stranger.get_monitor_socket()
    stranger.connect(f"tcp://127.0.0.1:{master.port}")
    stranger.send_multipart([bytes(8), b"set", b"k", b"evil"])
    refused = False
    deadline = time.monotonic() + 10
    while not refused and monitor.poll(
        max(0, int(1000 * (deadline - time.monotonic())))
    ):
        event = int.from_bytes(monitor.recv_multipart()[0][:2], sys.byteorder)
        assert event != zmq.Event.HANDSHAKE_SUCCEEDED
        refused = event == zmq.Event.DISCONNECTED or event in (
            zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
            zmq.Event.HANDSHAKE_FAILED_AUTH,
            zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
        )
    assert refused
    assert not master.check(["k"])
    stranger.disable_monitor()
    context.destroy(linger=0)


def test_tcp_garbage_on_the_port(master: TCPStore) -> None:
    for size in (0, 1, 64, 100_000):
        with socket.create_connection(("127.0.0.1", master.port)) as raw:
            try:
                raw.sendall(os.urandom(size))
            except ConnectionError:
                pass  # the server hung up in the middle, as it should
    master.set("k", "v")
    assert master.get("k") == b"v"


def test_tcp_malformed_requests_of_a_client(master: TCPStore) -> None:
    client = TCPStore("127.0.0.1", master.port, timeout=20, key=KEY)
    for op, *args in (
        (b"fly",),
        (b"set", b"only a key"),
        (b"add", b"k", b"one"),
        (b"add", b"\xff", b"1", b"2"),
        (b"delete",),
        (b"swap", b"k"),
    ):
        with pytest.raises(DistStoreError):
            client._call(op, *args)
    client.set("k", "v")
    client.close()


def test_tcp_listens_only_where_it_must(
    master: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert listens_at(master) == ["127.0.0.1"]
    # As on Debian: to other hosts the name of this one is another address.
    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *args, **named: resolve("127.0.1.1", *args)
    )
    for name, found in (("node1.org", "0.0.0.0"), ("node2", "127.0.1.1")):
        store = TCPStore(name, 0, is_master=True, key=KEY)
        assert listens_at(store) == [found]
        store.set("key", "value")
        store.close()


def listens_at(store: TCPStore) -> list[str]:
    """The addresses at which this process listens at the port of a store."""
    return [
        c.laddr.ip
        for c in psutil.Process().net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.port == store.port
    ]


def test_tcp_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(DistNetworkError, match=r"no store answered.*is rank 0 run"):
            TCPStore("127.0.0.1", port, timeout=0.5, key=KEY)
        assert time.monotonic() - start < 20


def test_tcp_client_may_come_first() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(TCPStore, "127.0.0.1", port, timeout=20, key=KEY)
        assert not early.done()
        master = TCPStore("127.0.0.1", port, is_master=True, key=KEY)
        client = early.result(20)
    client.set("k", "v")
    assert master.get("k") == b"v"
    client.close()
    master.close()


def test_tcp_names_rank_0_where_it_ends_as_a_client_connects() -> None:
    """By which `init_process_group` knows the store of the groups of before."""
    master = TCPStore("127.0.0.1", 0, is_master=True, key=KEY)
    client = tcp_client.TCPStoreClient(
        "127.0.0.1", master.port, curve_keys(KEY), base.RANK_0, (0,)
    )
    client.connect(20)
    master.close()
    until(lambda: client.ended)
    with pytest.raises(DistNetworkError, match="was lost") as caught:
        client.connect(20)
    assert caught.value.culprits == (0,)
    client.close()


def test_tcp_port_in_use(master: TCPStore) -> None:
    with pytest.raises(DistNetworkError, match=r"in use.*choose another MASTER_PORT"):
        TCPStore("127.0.0.1", master.port, is_master=True, key=KEY)


@pytest.mark.parametrize(
    ("host", "port", "error", "message"),
    [
        ("127.0.0.1", 0, ValueError, "master only"),
        ("127.0.0.1", 65536, ValueError, "65535"),
        ("no-such-host.invalid", 1, DistNetworkError, "cannot be resolved"),
        ("fe80::1%eth0", 1, DistNetworkError, ": a link-local address"),
        ("fe80::1", 1, DistNetworkError, "name another address of rank"),
    ],
)
def test_tcp_bad_arguments(
    host: str, port: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        TCPStore(host, port, timeout=1, key=KEY)
    with pytest.raises(ValueError, match="non-empty key"):
        TCPStore("127.0.0.1", 0, is_master=True, key=b"")


def test_tcp_store_closes_where_it_cannot_start_a_thread(
    master: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of Python 3.12, while another thread of the process goes on."""

    def refuses(*_: object) -> threading.Thread:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    client = master.clone()
    monkeypatch.setattr(tcp_client, "start_thread", refuses)
    with pytest.raises(RuntimeError, match="at interpreter shutdown"):
        client.watch("key", print)
    client.close()
    assert client.lost


def test_tcp_value_too_large(master: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.backends.stores.tcp_client.MAX_MESSAGE", 8192)
    with pytest.raises(ValueError, match="more than a store takes"):
        master.set("k", bytes(5000))
    master.set("k", bytes(4000))


def serving_process() -> subprocess.Popen[bytes]:
    """Start a process that serves a store, prints its port and ends with its input."""
    program = (
        "import sys\n"
        "from rankscope.backends.stores.tcp import TCPStore\n"
        f"store = TCPStore('127.0.0.1', 0, is_master=True, key={KEY!r})\n"
        "print(store.port, flush=True)\nsys.stdin.read()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


@pytest.mark.processes
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_tcp_death_of_the_master(how: signal.Signals) -> None:
    process = serving_process()
    assert process.stdout is not None
    store = TCPStore("127.0.0.1", int(process.stdout.readline()), timeout=60, key=KEY)
    under = PrefixStore("p", store)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(s.get, "never") for s in (store, under)]
        process.send_signal(how)
        process.communicate(timeout=10)
        for future in waiting:
            with pytest.raises(DistNetworkError, match="rank 0 ended") as raised:
                future.result(10)
            # Not to be asked again.
            assert not isinstance(raised.value, TimeoutError)
    with pytest.raises(DistNetworkError, match="rank 0 ended"):
        store.set("a", "1")
    store.close()


@pytest.mark.processes
def test_a_stopped_server_can_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "_GRACE", 0.2)
    with serving_process() as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        store = TCPStore("127.0.0.1", port, timeout=60, key=KEY)
        store.set_timeout(0.2)
        process.send_signal(signal.SIGSTOP)
        # Until then it may answer.
        state = psutil.Process(process.pid).status
        until(lambda: state() == psutil.STATUS_STOPPED)
        with pytest.raises(DistNetworkTimeoutError, match="does not answer"):
            store.set("a", "1")
        with pytest.raises(DistNetworkTimeoutError, match="does not answer"):
            store.wait(["b"], 0.1)
        assert not store.lost
        process.send_signal(signal.SIGCONT)
        store.set_timeout(60)
        store.set("a", "2")
        assert store.get("a") == b"2"
        store.close()
        process.stdin.close()


@pytest.mark.processes
def test_tcp_store_ends_with_its_process() -> None:
    program = (
        "from rankscope.backends.stores.tcp import TCPStore\n"
        f"store = TCPStore('127.0.0.1', 0, is_master=True, key={KEY!r})\n"
        "store.watch('k', print)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=20, capture_output=True, check=True
    )
    assert done.stderr == b""


# -- the server's table, without a socket --------------------------------------


def test_table_forgets_dropped_requests() -> None:
    answers: list[tuple[tuple[bytes, bytes], bytes, list[bytes]]] = []
    table = KeyTable(lambda *answer: answers.append((*answer[:2], list(answer[2]))))
    first, second = (b"client", b"1"), (b"client", b"2")
    assert table.handle(first, b"get", [b"a", b"b"]) is None
    assert table.handle(second, b"get", [b"a"]) is None
    table.handle((b"client", b"3"), b"drop", [b"1"])
    assert answers == [(first, b"missing", [b"a", b"b"])]
    table.handle((b"x", b"4"), b"set", [b"a", b"A"])
    assert answers[1:] == [(second, b"ok", [b"A"])]
    assert not table._missing
    assert not table._wanted
    assert not table._keys_of


# -- the shared key ------------------------------------------------------------


def test_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKSCOPE_KEY", "secret")
    assert shared_key() == b"secret"


def test_key_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RANKSCOPE_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: shared_key(), range(8)))
    assert len(keys) == 1
    path = tmp_path / ".rankscope" / "key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["key"]

    path.chmod(0o644)
    with pytest.raises(DistNetworkError, match="chmod 600"):
        shared_key()
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(DistNetworkError, match="delete it"):
        shared_key()


def test_key_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RANKSCOPE_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "absent"))
    with pytest.raises(DistNetworkError, match="set RANKSCOPE_KEY"):
        shared_key()


def test_keys_differ_by_side_and_key() -> None:
    keys = [*curve_keys(b"one"), *curve_keys(b"two")]
    assert len(set(keys)) == 8
    assert curve_keys(b"one") == curve_keys(b"one")
