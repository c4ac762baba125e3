"""The ports of a controller are free, and no connection can get one of them."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import psutil
import pytest

from rankscope.engines import Cluster
from rankscope.engines.cluster import ports


def test_free_ports_lie_below_those_of_connections() -> None:
    found = ports.free_ports(24)
    lowest = int(ports.EPHEMERAL.read_text().split()[0])
    assert len(set(found)) == 24
    assert all(ports.FIRST <= port < lowest for port in found)


def test_programs_with_one_seed_choose_other_ports() -> None:
    random.seed(0)
    before, first = random.getstate(), ports.free_ports(24)
    assert random.getstate() == before
    random.seed(0)
    assert ports.free_ports(24) != first


def test_a_port_that_is_taken_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (taken,) = ports.free_ports(1)
    (tmp_path / "range").write_text(f"{taken + 10}\t60999\n")
    monkeypatch.setattr(ports, "EPHEMERAL", tmp_path / "range")
    monkeypatch.setattr(ports, "FIRST", taken)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", taken))
        listener.listen()
        for _ in range(20):
            assert ports.free_ports(1) != [taken]


def test_where_there_is_no_room_the_controller_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "EPHEMERAL", tmp_path / "range")
    assert ports.free_ports(24) == []


def test_the_controller_listens_at_them() -> None:
    with Cluster.start(1) as cluster:
        assert cluster._launched is not None
        pid = cluster._launched.controller_pid
        assert pid is not None
        controller = psutil.Process(pid)
        listening = {
            one.laddr.port
            for process in (controller, *controller.children(recursive=True))
            for one in process.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN
        }
    lowest = int(ports.EPHEMERAL.read_text().split()[0])
    assert len(listening) > 5
    assert max(listening) < lowest
