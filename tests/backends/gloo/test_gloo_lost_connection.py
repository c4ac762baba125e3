"""A connection that a peer closed: gloo's words, and the rank that they mean."""

from __future__ import annotations

import os
import re
import signal
import socket
import struct

import numpy as np
import pytest

from rankscope.backends.conformance.ranks import Rank, Ranks
from rankscope.backends.conformance.waiting import until
from rankscope.backends.errors import ConnectionLostError, DistError
from rankscope.backends.gloo.backend import GlooBackend
from rankscope.backends.gloo.dtypes import arithmetic
from rankscope.backends.gloo.library import gloo_options, installed
from rankscope.backends.gloo.lost_connection import connection_lost
from rankscope.backends.work.reduce_op import ReduceOp


def words(host: str, port: int) -> str:
    return (
        "the side process of rank 0 (pid 7) ended with SIGABRT: terminate called after "
        "throwing an instance of 'gloo::IoException' |   what():  "
        f"[/project/gloo/transport/tcp/pair.cc:561] Connection closed by peer [{host}]:"
        f"{port}. This is typically caused by a remote worker crashing. GLHF!"
    )


def published(family: int, host: str, port: bytes) -> bytes:
    flow = bytes(4) if family == socket.AF_INET6 else b""
    address = port + flow + socket.inet_pton(family, host)
    return b"count, name" + struct.pack("=H", family) + address + bytes(9)


@pytest.mark.parametrize("order", ["=", "!"])
@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "10.0.0.2"), (socket.AF_INET6, "fe80::2")]
)
def test_the_address_tells_the_peer(order: str, family: int, host: str) -> None:
    ports = {1: 4321, 2: 4322, 3: 4323}
    addresses = {
        rank: published(family, host, struct.pack(f"{order}H", port))
        for rank, port in ports.items()
    }
    error = connection_lost(words(host, 4322), addresses)
    assert error is not None
    assert error.peer == 2
    assert str(error) == f"gloo: Connection closed by peer [{host}]:4322"
    unknown = connection_lost(words(host, 9), addresses)
    assert unknown is not None
    assert unknown.peer is None


@pytest.mark.parametrize(
    "said",
    [
        "Read error [10.0.0.2]:4322: Connection reset by peer",
        "writev [10.0.0.2]:4322: Broken pipe",
        "Socket unexpectedly closed [10.0.0.2]:4322",
        "Pair is not connected ([10.0.0.1]:4321 <--> [10.0.0.2]:4322)",
    ],
)
def test_what_the_system_says_is_kept(said: str) -> None:
    end = f"[/project/gloo/transport/tcp/pair.cc:561] {said}. GLHF! | Aborted"
    address = published(socket.AF_INET, "10.0.0.2", struct.pack("!H", 4322))
    error = connection_lost(end, {1: address})
    assert error is not None
    assert str(error) == f"gloo: {said}"
    assert error.peer == 1


@pytest.mark.parametrize(
    "end",
    [
        "the side process of rank 0 (pid 7) was killed by SIGKILL",
        "the side process of rank 0 (pid 7) ended with exit code 1: no output",
    ],
)
def test_another_end_is_no_lost_connection(end: str) -> None:
    assert connection_lost(end, {}) is None


def survivor(me: Rank) -> tuple[str, int | None]:
    """Rank 1's side process is killed while rank 0 waits for it, over tcp."""
    causes: list[str | DistError] = []
    with me.store("gloo") as store, gloo_options(library="xoscar"):
        made = GlooBackend(store, me.rank, me.size)
        made.on_failure = causes.append
        made.barrier().wait()
        side = made._side
        assert side is not None
        if me.rank:
            assert side.pid
            os.kill(side.pid, signal.SIGKILL)
            until(lambda: causes)
            made.shutdown()
            return str(causes[0]), None
        total = arithmetic(np.dtype(np.float64), ReduceOp.SUM)
        work = made.all_reduce(np.ones(1 << 20), total)
        until(lambda: causes and work.is_completed())
        with pytest.raises(ConnectionLostError):
            work.wait()
        with pytest.raises(ConnectionLostError):
            made.barrier().wait()
        made.shutdown()
        assert isinstance(causes[0], ConnectionLostError)
        return str(causes[0]), causes[0].peer


@pytest.mark.skipif("xoscar" not in installed(), reason="xoscar is not installed")
def test_a_closed_socket_is_reported_with_its_peer() -> None:
    with Ranks(2, survivor) as ranks:
        (zero, peer), (one, none) = ranks.wait()
    # A reset where bytes were on their way to the killed process.
    assert re.search("Connection (closed|reset) by peer", zero), zero
    assert "GLHF" not in zero
    assert "typically" not in zero
    assert peer == 1
    # The end of a killed side process is no lost connection.
    assert "was killed by SIGKILL" in one
    assert none is None
