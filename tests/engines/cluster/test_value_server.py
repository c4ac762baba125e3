"""The connections of large values, with both ends in this process."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.engines.cluster.value_server import ValueServer
from rankscope.engines.wire import value_port
from rankscope.engines.wire.values import pack, unpack

WAIT = 30.0
VALUES = {
    "large": np.arange(5 << 20, dtype=np.uint8),
    "many": [np.arange(n) for n in range(200)],
    "no element": np.empty((0, 3), np.float32),
    "in Fortran's order": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "a view": np.arange(100)[::3],
    "text": "x" * 100,
}


def own_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "rankscope-values"]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert own_threads() == []


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as one:
        yield one


def serve(
    frames: list[Any] | None = None, size: int = 1, encrypted: bool = False
) -> ValueServer:
    found = ValueServer.towards("127.0.0.1", size, encrypted, frames)
    assert found is not None
    return found


@pytest.mark.parametrize("encrypted", [False, True])
def test_values_arrive_on_every_rank(pool: ThreadPoolExecutor, encrypted: bool) -> None:
    frames = pack(VALUES)
    server = serve(frames, 3, encrypted)
    try:
        ranks = [pool.submit(server.port.receive) for _ in range(3)]
        for rank in ranks:
            found = rank.result(WAIT)
            assert found is not None
            np.testing.assert_equal(unpack(found, {}), VALUES)
        until(lambda: server.moved == server.total, WAIT, "the last bytes")
    finally:
        server.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_values_of_every_rank_arrive(pool: ThreadPoolExecutor, encrypted: bool) -> None:
    server = serve(None, 3, encrypted)
    try:
        sent = [pool.submit(server.port.send, pack([n, VALUES])) for n in range(3)]
        for n, one in enumerate(sent):
            number = one.result(WAIT)
            assert number is not None
            found = unpack(server.received[number], {})
            np.testing.assert_equal(found, [n, VALUES])
            assert found[1]["large"].flags.writeable
        assert server.moved == server.total > 3 * (5 << 20)
    finally:
        server.close()


def test_who_lacks_the_key_gets_nothing(pool: ThreadPoolExecutor) -> None:
    server = serve([b"secret"])
    wrong = dataclasses.replace(server.port, key=b"?" * 32)
    try:
        assert wrong.receive() is None
        assert wrong.send([b"x"]) is None
        with socket.create_connection((wrong.host, wrong.port), WAIT) as stranger:
            stranger.sendall(b"GET / HTTP/1.1".ljust(52))
            assert len(stranger.recv(1 << 16)) == 16
            assert stranger.recv(1 << 16) == b""
        assert server.moved == 0
        assert server.received == {}
        # They are in nobody's way.
        assert server.port.receive() == [b"secret"]
    finally:
        server.close()


def test_an_impostor_that_listens_gets_nothing() -> None:
    """Another process has the port by now."""
    port = value_port.ValuePort("127.0.0.1", 0, b"k" * 32, False, [])
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        theirs = dataclasses.replace(port, port=impostor.getsockname()[1])
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(theirs.send, [b"secret"])
            sock, _ = impostor.accept()
            with sock:
                sock.settimeout(WAIT)
                sock.sendall(b"n" * 16)
                said = sock.recv(1000)
                sock.sendall(b"p" * 32)
                while more := sock.recv(1000):
                    said += more
        assert sending.result(WAIT) is None
        assert b"secret" not in said
        assert len(said) == 52


def test_a_port_out_of_reach_leaves_it_to_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = serve([b"x"])
    server.close()
    assert server.port.receive() is None
    assert server.port.send([b"x"]) is None

    # A firewall drops what it does not admit: the next call does not wait for it.
    calls = []

    def silent(address: object, timeout: float) -> Any:
        calls.append((address, timeout))
        raise TimeoutError

    monkeypatch.setattr(value_port, "_silent", {})
    monkeypatch.setattr(socket, "create_connection", silent)
    far = dataclasses.replace(server.port, host="192.0.2.1")
    assert far.receive() is None
    assert far.send([b"x"]) is None
    assert calls == [(("192.0.2.1", far.port), value_port.PATIENCE)]


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("push", [True, False])
def test_the_end_of_the_notebook_amid_a_value_is_an_error(
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    push: bool,
    encrypted: bool,
) -> None:
    here, go_on = threading.Event(), threading.Event()
    server = serve([bytes(64 << 20)] if push else None, 1, encrypted)
    note = server._note

    def wait(count: int) -> None:
        note(count)
        here.set()
        assert go_on.wait(WAIT)

    monkeypatch.setattr(server, "_note", wait)
    work = server.port.receive if push else lambda: server.port.send([bytes(64 << 20)])
    rank = pool.submit(work)
    assert here.wait(WAIT)
    ending = pool.submit(server.close)
    until(lambda: server._closed, WAIT)
    go_on.set()
    ending.result(WAIT)
    with pytest.raises(ConnectionError, match="to the notebook was lost amid the va"):
        rank.result(WAIT)
    assert 0 < server.moved < 64 << 20


def test_an_end_that_stands_still_is_given_up(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(value_port, "STALL", 0.1)
    stop = threading.Event()
    server = serve([bytes(64 << 20)])
    note = server._note

    def stand_still(count: int) -> None:
        note(count)
        assert stop.wait(WAIT)

    monkeypatch.setattr(server, "_note", stand_still)
    with pytest.raises(ConnectionError, match="timed out"):
        pool.submit(server.port.receive).result(WAIT)
    stop.set()
    server.close()


def test_no_memory_for_a_value_is_the_notebooks_error(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr("rankscope.engines.cluster.value_server.receive_value", lacking)
    server = serve()
    try:
        with pytest.raises(ConnectionError):
            pool.submit(server.port.send, [bytes(8 << 20)]).result(WAIT)
        with pytest.raises(MemoryError):
            server.check()
    finally:
        server.close()
