"""How ranks connect: who is let in, over what, encrypted, with few descriptors."""

from __future__ import annotations

import os
import resource
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.leaks import Snapshot
from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.conformance.waiting import until
from rankscope.backends.errors import ConnectionLostError, DistBackendError
from rankscope.backends.tcp import connector, encryption, peer_memory
from rankscope.backends.tcp.connector import ENCRYPT, TRANSPORTS, TCPConnector
from rankscope.backends.tcp.handshake import KEY_SIZE, Accepting, greet
from rankscope.backends.tcp.transport import TCPTransport

CAN_READ = (
    peer_memory.Probe.memory((_probe := peer_memory.Probe(True)).message, os.getpid())
    is not None
)
WITHIN_A_HOST = ("unix", "cma") if CAN_READ else ("unix",)


# -- the handshake -----------------------------------------------------------------


def shaken(own: bytes, theirs: bytes) -> tuple[int | None, list[BaseException]]:
    """Return the rank that a listener with key `own` takes a caller for, and errors."""
    one, other = socket.socketpair()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            other.settimeout(20)
            greet(other, 3, theirs)
        except OSError as error:
            errors.append(error)

    with one, other:
        accepting, found = Accepting(one, own), None
        thread = threading.Thread(target=call)
        thread.start()
        try:
            while found is None:
                found = accepting.advance()
        except OSError as error:
            errors.append(error)
            one.close()
        thread.join(30)
    return found, errors


def test_a_rank_with_the_key_is_let_in() -> None:
    key = secrets.token_bytes(KEY_SIZE)
    assert shaken(key, key) == (3, [])


def test_another_key_is_refused_on_both_sides() -> None:
    found, errors = shaken(secrets.token_bytes(KEY_SIZE), secrets.token_bytes(KEY_SIZE))
    assert found is None
    assert any("does not have the group's key" in str(error) for error in errors)
    assert len(errors) == 2


# -- groups ------------------------------------------------------------------------


def transport(group: dist.ProcessGroup) -> TCPTransport:
    backend: Any = group.built_backend("cpu")
    found = backend._tcp.transport
    assert isinstance(found, TCPTransport)
    return found


def program(me: Rank) -> None:
    """Small and large arrays, collectives and messages."""
    for count in (1, 1000, 1 << 18, 3 << 20):
        x = np.full(count, me.rank + 1.0)
        dist.all_reduce(x)
        assert (x == me.size * (me.size + 1) / 2).all()
    parts = [np.zeros(1 << 16) for _ in range(me.size)]
    dist.all_gather(parts, np.full(1 << 16, float(me.rank)))
    assert [part[-1] for part in parts] == [*range(me.size)]
    if me.rank == 0:
        dist.send(np.arange(100_000.0), 1)
    elif me.rank == 1:
        x = np.zeros(100_000)
        dist.recv(x, 0)
        assert (x == np.arange(100_000.0)).all()


def over(me: Rank, environment: dict[str, str], hosts: list[str] | None) -> Any:
    """Return what this rank is connected to the others by, after a program."""
    os.environ.update(environment)
    if hosts is not None:
        connector._host = lambda: hosts[me.rank]
    dist.init_process_group("tcp", timeout=60)
    group = dist.group.WORLD
    assert group is not None
    program(me)
    kinds = transport(group).kinds()
    me.meet("done")
    dist.abort_process_group(reason="a test")
    dist.rebuild_process_group()
    program(me)
    dist.destroy_process_group()
    return kinds


@pytest.mark.processes
@pytest.mark.parametrize(
    ("chosen", "expected"),
    [("", WITHIN_A_HOST), ("unix", ("unix",)), ("tcp", ("tcp",))],
)
def test_transports_within_a_host(chosen: str, expected: tuple[str, ...]) -> None:
    found = run_ranks(3, over, {TRANSPORTS: chosen}, None)
    assert all({*kinds.values()} == {expected} for kinds in found)


@pytest.mark.processes
@pytest.mark.parametrize("encrypted", ["0", "1"])
def test_ranks_of_two_hosts_are_connected_by_tcp(encrypted: str) -> None:
    """Two hosts by name alone: the ranks take every connection between them for TCP."""
    environment = {ENCRYPT: encrypted, "GLOO_SOCKET_IFNAME": "lo"}
    found = run_ranks(3, over, environment, ["a", "a", "b"])
    between = ("tls",) if encrypted == "1" else ("tcp",)
    assert found[0] == {1: WITHIN_A_HOST, 2: between}
    assert found[2] == {0: between, 1: between}


class _Unbindable(socket.socket):
    def bind(self, address: Any) -> None:
        if isinstance(address, str):
            raise PermissionError("forbidden by a policy")
        super().bind(address)


def refused(me: Rank) -> Any:
    """Unix sockets are forbidden on rank 1."""
    if me.rank == 1:
        module: Any = socket
        module.socket = _Unbindable
    return over(me, {}, None)


@pytest.mark.processes
def test_a_rank_without_unix_sockets_is_connected_by_tcp() -> None:
    first, second, third = run_ranks(3, refused)
    assert first == {1: ("tcp",), 2: WITHIN_A_HOST}
    assert second == {0: ("tcp",), 2: ("tcp",)}
    assert third == {0: WITHIN_A_HOST, 1: ("tcp",)}


@pytest.mark.parametrize(
    ("name", "value"), [(TRANSPORTS, "unix,shm"), (ENCRYPT, "yes")]
)
def test_a_wrong_setting_is_named(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    made = TCPConnector(dist.HashStore(), 0, 2, str)
    with pytest.raises(DistBackendError, match=f"{name} is '{value}'"):
        made.connect()


def test_a_peer_that_refuses_may_have_been_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The group waits for that cause, as where a connection is lost later."""

    def refuse(*args: object) -> None:
        raise ConnectionRefusedError(111, "refused")

    monkeypatch.setattr("rankscope.backends.tcp.connector.greet", refuse)
    store = dist.HashStore()
    first, second = (TCPConnector(store, rank, 2, str) for rank in range(2))
    accepting = threading.Thread(target=first.connect)
    accepting.start()
    with pytest.raises(ConnectionLostError, match="could not connect to ") as caught:
        second.connect()
    error = caught.value
    assert (error.peer, error.reason) == (0, str(error))
    first.cancel()
    accepting.join(60)
    assert not accepting.is_alive()


# -- strangers ---------------------------------------------------------------------


def connect_all(size: int, before: Callable[[TCPConnector], None]) -> list[Any]:
    """Return the transports of `size` ranks of this process."""
    store, made = dist.HashStore(), dict[int, Any]()
    connectors = [TCPConnector(store, rank, size, str) for rank in range(size)]

    def connect(rank: int) -> None:
        if rank == size - 1:
            before(connectors[0])
        made[rank] = connectors[rank].connect()

    threads = [threading.Thread(target=connect, args=[rank]) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [made[rank] for rank in range(size)]


@pytest.mark.parametrize("transports", ["unix", "tcp"])
def test_strangers_get_nothing_and_hold_up_nobody(
    transports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They connect before the last rank does: some are silent, some say nonsense."""
    monkeypatch.setenv(TRANSPORTS, transports)
    strangers: list[socket.socket] = []
    before_all = Snapshot.take()

    def intrude(first: TCPConnector) -> None:
        # The listener for TCP is there once all ranks have met, so not before.
        until(lambda: bool(first._listeners), 20)
        listener = first._listeners[0]
        for number in range(20):
            sock = socket.socket(listener.family)
            sock.settimeout(20)
            sock.connect(listener.getsockname())
            if number % 2:
                sock.sendall(secrets.token_bytes(100))
            strangers.append(sock)
        for _ in range(5):
            # One that leaves before it is accepted.
            with socket.socket(listener.family) as sock:
                sock.settimeout(20)
                sock.connect(listener.getsockname())

    if transports == "unix":
        made = connect_all(3, intrude)
    else:
        # All ranks are needed for the addresses: the strangers come beside the last.
        store = dist.HashStore()
        connectors = [TCPConnector(store, rank, 3, str) for rank in range(3)]
        found = dict[int, Any]()
        call = connectors[2]._call

        def late(*args: Any) -> Any:
            if not strangers:
                intrude(connectors[0])
            return call(*args)

        monkeypatch.setattr(connectors[2], "_call", late)

        def connect(rank: int) -> None:
            found[rank] = connectors[rank].connect()

        threads = [threading.Thread(target=connect, args=[rank]) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        made = [found[rank] for rank in range(3)]
    assert all(isinstance(one, TCPTransport) for one in made)
    assert len(strangers) == 20
    for one in made:
        one.abandon([])
    for sock in strangers:
        # The number of the listener, and the end.
        received = b""
        with sock:
            try:
                while part := sock.recv(4096):
                    received += part
            except ConnectionResetError:
                pass
        assert len(received) <= 16
    until(lambda: not Snapshot.take().surplus(before_all), 20)


def test_somebody_between_two_ends_is_found_out() -> None:
    """Each end shares a channel with somebody else: the bindings differ."""
    keys, ends, errors = secrets.token_bytes(KEY_SIZE), [], list[OSError]()

    def end(sock: socket.socket, accepted: bool, key: bytes) -> None:
        try:
            sock.settimeout(20)
            ends.append(encryption.encrypt(sock, accepted, key))
        except OSError as error:
            errors.append(error)

    pairs = [socket.socketpair(), socket.socketpair()]
    # The one in the middle knows no key.
    wrong = secrets.token_bytes(KEY_SIZE)
    calls = [
        (pairs[0][0], True, keys),
        (pairs[0][1], False, wrong),
        (pairs[1][0], True, wrong),
        (pairs[1][1], False, keys),
    ]
    threads = [threading.Thread(target=end, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not ends
    assert sum("between the two ends" in str(error) for error in errors) >= 2
    for pair in pairs:
        for sock in pair:
            sock.close()


# -- descriptors -------------------------------------------------------------------


def few(me: Rank, hard: int) -> str:
    """Make groups until the descriptors run out, unless the limit can be raised."""
    dist.init_process_group("tcp", timeout=60)
    dist.barrier()
    held = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + 3, held + hard))
    said, made = "", []
    try:
        for _ in range(12):
            made.append(dist.new_group())
            dist.barrier(group=made[-1])
    except dist.DistError as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + hard, held + hard))
    for group in made[:-1]:
        # All ranks have used it, and the next meeting needs descriptors.
        dist.destroy_process_group(group)
    me.meet("over")
    dist.destroy_process_group()
    return said


@pytest.mark.processes
def test_a_low_limit_of_descriptors_is_raised() -> None:
    assert run_ranks(3, few, 200) == ["", "", ""]


@pytest.mark.processes
def test_an_exhausted_limit_is_told_with_what_to_set() -> None:
    for said in run_ranks(3, few, 20):
        assert "file descriptors" in said
        assert "ulimit -n" in said
