"""Random bytes at the TCP store: of strangers, and of clients gone mad."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.backends.errors import DistError, DistStoreError
from rankscope.backends.stores.base import OTHER_KEY
from rankscope.backends.stores.key_table import KeyTable
from rankscope.backends.stores.tcp import TCPStore
from rankscope.backends.stores.tcp_keys import curve_keys

KEY = b"the key of this test"
SECRET = b"nobody else may read this"

OPS = [
    *(b"set", b"get", b"add", b"swap", b"check", b"delete", b"count", b"drop", b"fly"),
    *(b"append", b"sets", b"keys", b"push", b"pop", b"pop now", b"queued"),
]

ANY_OP = st.one_of(st.sampled_from(OPS), st.binary(max_size=8))
#: Few different ones, so that requests meet.
NUMBERS = st.sampled_from([b"", b"1", b"2", bytes(8)])
ARGUMENTS = st.lists(
    st.one_of(
        st.sampled_from([b"a", b"b", b"1", b"2", b"\xff"]), st.binary(max_size=9)
    ),
    max_size=4,
)
REQUESTS = st.lists(
    st.tuples(st.sampled_from([b"x", b"y"]), NUMBERS, ANY_OP, ARGUMENTS), max_size=30
)


@given(REQUESTS)
@settings(deadline=None, max_examples=400)
def test_the_table_survives_any_requests(
    requests: list[tuple[bytes, bytes, bytes, list[bytes]]],
) -> None:
    """Each is answered once or waits; what waits can be dropped, and is forgotten."""
    answered: list[tuple[bytes, bytes]] = []
    table = KeyTable(lambda ticket, status, payload: answered.append(ticket))
    for client, number, op, args in requests:
        try:
            reply = table.handle((client, number), op, list(args))
        except (DistStoreError, ValueError):
            continue
        assert reply is None or reply[0] == b"ok"
    for client, number in [*table._missing, *table._popping]:
        table.handle((client, b"last"), b"drop", [number])
    assert not table._missing
    assert not table._keys_of
    assert not table._wanted
    assert not table._popping
    assert not table._poppers


@pytest.fixture
def master() -> Iterator[TCPStore]:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=20, key=KEY)
    store.set("secret", SECRET)
    yield store
    # Whatever came, it serves on, and nothing was written but that it was refused.
    assert store.get("secret") == SECRET
    assert store.num_keys() == 1 + store.check([OTHER_KEY])
    assert store._server is not None
    assert store._server._thread.is_alive()
    store.close()


@pytest.fixture
def noise() -> random.Random:
    seed = int(os.environ.get("RANKSCOPE_FUZZ_SEED") or time.time_ns() % (1 << 32))
    print(f"RANKSCOPE_FUZZ_SEED={seed}")
    return random.Random(seed)


def greeting(noise: random.Random) -> bytes:
    """The first bytes of ZMTP 3.1, right or not quite, and then anything."""
    mechanism = noise.choice([b"CURVE", b"NULL", b"PLAIN", noise.randbytes(5)])
    real = (
        b"\xff"
        + bytes(8)
        + b"\x7f\x03"
        + noise.choice([b"\x00", b"\x01"])
        + mechanism.ljust(20, b"\0")
        + b"\x00"
        + bytes(31)
    )
    cut = real[: noise.randrange(len(real) + 1)]
    return noise.choice([real, cut, b""]) + noise.randbytes(noise.randrange(2000))


def test_strangers_bytes_are_never_answered(
    master: TCPStore, noise: random.Random
) -> None:
    for _ in range(150):
        with socket.create_connection(("127.0.0.1", master.port)) as raw:
            try:
                raw.sendall(greeting(noise))
                raw.settimeout(0.01)
                heard = raw.recv(1 << 16)
            except OSError:
                continue
            # Its own greeting and handshake commands; none of what it keeps.
            assert SECRET not in heard


def test_strangers_who_speak_zeromq_read_and_write_nothing(
    master: TCPStore, noise: random.Random
) -> None:
    """Without security, with any key, and with the server's public key alone."""
    keys = curve_keys(KEY)
    context = zmq.Context()
    strangers = []
    for number in range(40):
        kind = noise.choice([zmq.DEALER, zmq.REQ, zmq.SUB, zmq.ROUTER, zmq.PUSH])
        stranger = context.socket(kind)
        stranger.linger = 0
        if number % 2:
            public, secret = zmq.curve_keypair()
            stranger.curve_publickey, stranger.curve_secretkey = public, secret
            server = keys.server_public if number % 4 == 1 else zmq.curve_keypair()[0]
            stranger.curve_serverkey = server
        stranger.connect(f"tcp://127.0.0.1:{master.port}")
        strangers.append(stranger)
        op = noise.choice(
            [[b"get", b"secret"], [b"set", b"k", b"evil"], [b"delete", b"secret"]]
        )
        if kind in (zmq.DEALER, zmq.PUSH):
            stranger.send_multipart([bytes(8), *op], zmq.NOBLOCK)
    poller = zmq.Poller()
    for stranger in strangers:
        if stranger.type != zmq.PUSH:
            poller.register(stranger, zmq.POLLIN)
    assert poller.poll(1500) == []
    assert not master.check(["k"])
    context.destroy(linger=0)


def test_a_client_gone_mad_harms_nobody_else(
    master: TCPStore, noise: random.Random
) -> None:
    """It has the key: it may write, but not stop the others from being served."""
    keys = curve_keys(KEY)
    context = zmq.Context()
    mad = context.socket(zmq.DEALER)
    mad.linger = 0
    mad.curve_publickey, mad.curve_secretkey = keys.client_public, keys.client_secret
    mad.curve_serverkey = keys.server_public
    mad.connect(f"tcp://127.0.0.1:{master.port}")
    words = [*OPS, b"a", b"b", b"1", b"", b"9" * 5000, b"\xff\xfe"]
    for _ in range(3000):
        count = noise.randrange(7)
        frames = [noise.choice([*words, noise.randbytes(9)]) for _ in range(count + 1)]
        mad.send_multipart(frames)
    # Its own last request is served after all of those.
    mad.send_multipart([b"the end", b"count"])
    until = time.monotonic() + 20
    last: list[bytes] = []
    while last[:1] != [b"the end"]:
        assert mad.poll(max(0, int(1000 * (until - time.monotonic())))), "no answer"
        last = mad.recv_multipart()
    context.destroy(linger=0)
    assert master.num_keys() < 1000
    other = TCPStore("127.0.0.1", master.port, timeout=20, key=KEY)
    with pytest.raises(DistError, match="still misses 'never'"):
        other.get("never", timeout=0.1)
    for key in ("a", "b", "1", ""):
        other.set(key, "v")
        assert other.get(key) == b"v"
    other.close()
    master._call(b"set", b"secret", SECRET)
    for name in list(_table(master)._values):
        if name != b"secret":
            master._call(b"delete", name)


def _table(master: TCPStore) -> KeyTable:
    assert master._server is not None
    return master._server._table


@given(st.lists(st.binary(max_size=40), max_size=6))
@settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_client_takes_any_answer(client: TCPStore, frames: list[bytes]) -> None:
    """What no request asked for is passed over."""
    assert client._client is not None
    client._client._receive(frames)


@pytest.fixture(scope="module")
def client() -> Iterator[TCPStore]:
    store = TCPStore("127.0.0.1", 0, 1, True, timeout=20, key=KEY)
    yield store
    store.set("k", "v")
    assert store.get("k") == b"v"
    store.close()
