"""The ports of a controller are free, and no connection can get one of them."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

import psutil
import pytest
import zmq

from rankscope.engines import Cluster
from rankscope.engines.launch import ports
from rankscope.engines.launch.clusters import prepare


def test_the_ports_lie_below_those_of_connections() -> None:
    with ports.reserved_ports(24) as found:
        lowest = int(ports.EPHEMERAL.read_text().split()[0])
        assert len(set(found)) == 24
        assert all(ports.FIRST <= port < lowest for port in found)


def test_the_generator_of_the_user_is_left_alone() -> None:
    before = random.getstate()
    with ports.reserved_ports(24):
        assert random.getstate() == before


@pytest.fixture
def one_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Have ten ports to choose from; return one of them, which is free."""
    with ports.reserved_ports(1) as (port,):
        pass
    (tmp_path / "range").write_text(f"{port + 10}\t60999\n")
    monkeypatch.setattr(ports, "EPHEMERAL", tmp_path / "range")
    monkeypatch.setattr(ports, "FIRST", port)
    return port


def test_a_port_that_is_taken_is_left_out(one_port: int) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", one_port))
        listener.listen()
        for _ in range(20):
            with ports.reserved_ports(1) as found:
                assert found != [one_port]


def test_a_reserved_port_is_left_out_until_the_end(one_port: int) -> None:
    with contextlib.ExitStack() as stack:
        reserved = [
            port
            for _ in range(20)
            for port in stack.enter_context(ports.reserved_ports(1))
        ]
        assert len(reserved) == len(set(reserved))
        assert one_port in reserved
    with socket.socket() as free:
        free.bind(("", one_port))


def test_a_server_listens_at_a_reserved_port() -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as server:
        with ports.reserved_ports(1) as (port,):
            server.bind(f"tcp://127.0.0.1:{port}")
        with context.socket(zmq.PUSH) as client:
            client.connect(f"tcp://127.0.0.1:{port}")
            client.send(b"arrives")
            assert server.poll(10_000)
            assert server.recv() == b"arrives"


@pytest.mark.processes
def test_clusters_that_start_at_the_same_time_have_ports_of_their_own() -> None:
    """Each is prepared before the controller of the other listens."""
    clusters = [prepare("local", None, None, keep=False) for _ in range(2)]
    try:
        chosen = [
            set(argument.split("=")[1].split(","))
            for one in clusters
            for argument in one.cluster.controller_args
            if "ports" in argument
        ]
        assert len(chosen) == 2
        for port in map(int, chosen[0] | chosen[1]):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("", port))
        assert not chosen[0] & chosen[1]
    finally:
        for one in clusters:
            one.close()
    for port in map(int, chosen[0] | chosen[1]):
        with socket.socket() as other:
            other.bind(("", port))


def test_where_there_is_no_room_the_controller_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "EPHEMERAL", tmp_path / "range")
    with ports.reserved_ports(24) as found:
        assert found == []


@pytest.mark.processes
def test_the_controller_listens_at_them() -> None:
    with Cluster.start(1) as cluster:
        assert cluster._launched is not None
        pid = cluster._launched.controller_pid
        assert pid is not None
        lowest = int(ports.EPHEMERAL.read_text().split()[0])
        controller = psutil.Process(pid)
        held = psutil.Process().net_connections("tcp")
        assert not [one for one in held if one.laddr.port < lowest and not one.raddr]
        listening = {
            one.laddr.port
            for process in (controller, *controller.children(recursive=True))
            for one in process.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN
        }
    assert len(listening) > 5
    assert max(listening) < lowest
