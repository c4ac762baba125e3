"""Transports over socket pairs in one process: frames, bounds, memory, losses."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.errors import ConnectionLostError
from rankscope.backends.messaging.transport import ANY_SOURCE, Received
from rankscope.backends.tcp.connection import EAGER, OVERHEAD, WINDOW
from rankscope.backends.tcp.matching import Request, TruncationError
from rankscope.backends.tcp.peer_memory import PIECE, PeerMemory, Probe
from rankscope.backends.tcp.transport import TCPTransport

Pair = tuple[TCPTransport, TCPTransport]


def own_memory() -> PeerMemory | None:
    probe = Probe(True)
    return Probe.memory(probe.message, os.getpid())


readable = pytest.mark.skipif(
    own_memory() is None, reason="process_vm_readv is not allowed here"
)


def connected(memory: PeerMemory | None = None) -> Pair:
    one, other = socket.socketpair()
    for sock in (one, other):
        sock.setblocking(False)
    memories = {} if memory is None else {1: memory}
    back = {} if memory is None else {0: memory}
    return TCPTransport({1: one}, memories), TCPTransport({0: other}, back)


@pytest.fixture(params=["memory", "socket"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two transports, which read each other's memory or send everything."""
    memory = own_memory() if request.param == "memory" else None
    if memory is None and request.param == "memory":
        pytest.skip("process_vm_readv is not allowed here")
    made = connected(memory)
    yield made
    for transport in made:
        transport.abandon([])


def finish(pair: Pair, *requests: tuple[TCPTransport, Request | None]) -> None:
    """Advance both sides until the requests are over; raise their errors."""

    def over() -> bool:
        for transport in pair:
            transport._advance()
        return all(
            request is None or transport.test(request)
            for transport, request in requests
        )

    until(over, 20, "the requests")


def numbers(nbytes: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("early", [True, False], ids=["sent first", "posted first"])
@pytest.mark.parametrize(
    "nbytes", [0, 1, 100, EAGER - 1, EAGER, EAGER + 1, 1 << 20, PIECE + 5]
)
def test_a_message_arrives(pair: Pair, nbytes: int, early: bool) -> None:
    sender, receiver = pair
    sent, received = numbers(nbytes), np.zeros(nbytes, np.uint8)
    if early:
        send = sender.send(sent, 1, 7)
        receiver._advance()
        receive = receiver.receive(received, 0, 7)
    else:
        receive = receiver.receive(received, 0, 7)
        send = sender.send(sent, 1, 7)
    finish(pair, (sender, send), (receiver, receive))
    assert (received == sent).all()
    if receive is not None:
        assert receiver.fits(receive, nbytes, 7)
        assert receiver.received(receive) == Received(0, nbytes, 7)


def test_messages_of_all_sizes_arrive_in_order(pair: Pair) -> None:
    sender, receiver = pair
    sizes = np.random.default_rng(2).choice([0, 3, 1000, EAGER, EAGER + 1, 300_000], 60)
    sends = [(sender, sender.send(numbers(n, n + 1), 1, 7)) for n in sizes]
    arrays = [np.zeros(n, np.uint8) for n in sizes]
    receives = [(receiver, receiver.receive(array, 0, 7)) for array in arrays]
    finish(pair, *sends, *receives)
    for array in arrays:
        assert (array == numbers(array.size, array.size + 1)).all()


def test_both_send_at_once_more_than_the_sockets_hold(pair: Pair) -> None:
    requests, arrays = [], []
    for one, other in (pair, pair[::-1]):
        peer = 1 if one is pair[0] else 0
        for _ in range(300):
            requests.append((one, one.send(numbers(EAGER), peer, 7)))
        for _ in range(300):
            arrays.append(np.zeros(EAGER, np.uint8))
            requests.append((other, other.receive(arrays[-1], 1 - peer, 7)))
    finish(pair, *requests)
    assert all((array == numbers(EAGER)).all() for array in arrays)


def test_memory_for_messages_that_nobody_asks_for_is_bounded(pair: Pair) -> None:
    sender, receiver = pair
    count = 5 * WINDOW // EAGER
    sent = numbers(EAGER)
    sends = [(sender, sender.send(sent, 1, 7)) for _ in range(count)]
    for _ in range(50):
        sender._advance()
        receiver._advance()
    kept = [one for found in receiver._matching._early.values() for one in found]
    assert len(kept) == count
    assert sum(len(one.data) for one in kept) <= WINDOW
    # Of a message beside the flood, too; and all of them arrive.
    sends.append((sender, sender.send(sent, 1, 8)))
    array = np.zeros(EAGER, np.uint8)
    finish(pair, (receiver, receiver.receive(array, 0, 8)))
    arrays = [np.zeros(EAGER, np.uint8) for _ in range(count)]
    finish(pair, *sends, *[(receiver, receiver.receive(one, 0, 7)) for one in arrays])
    assert all((one == sent).all() for one in [*arrays, array])


def test_the_window_opens_again(pair: Pair) -> None:
    sender, receiver = pair
    sent, array = numbers(EAGER), np.zeros(EAGER, np.uint8)
    for _ in range(5 * WINDOW // EAGER):
        send = sender.send(sent, 1, 7)
        finish(pair, (sender, send), (receiver, receiver.receive(array, 0, 7)))
    # Credit comes for a quarter of the window at a time: one message may be beyond it.
    limit = WINDOW // 4 + EAGER + OVERHEAD
    assert 0 <= sender._connections[1]._unconsumed <= limit


@pytest.mark.parametrize("nbytes", [100, EAGER + 1])
@pytest.mark.parametrize("early", [True, False])
def test_a_message_that_is_too_long_is_told(
    pair: Pair, nbytes: int, early: bool
) -> None:
    sender, receiver = pair
    array = np.full(nbytes - 1, 9, np.uint8)
    if early:
        sender.send(numbers(nbytes), 1, 7)
        receiver._advance()
    receive = receiver.receive(array, 0, 7)
    if not early:
        sender.send(numbers(nbytes), 1, 7)
    with pytest.raises(TruncationError) as caught:
        finish(pair, (receiver, receive))
    assert receiver.too_long(caught.value) == Received(0, nbytes, 7)
    assert (array == 9).all()


def test_a_receive_from_any_rank_tells_the_source(pair: Pair) -> None:
    sender, receiver = pair
    array = np.zeros(10, np.uint8)
    receive = receiver.receive(array, ANY_SOURCE, 7)
    sender.send(numbers(5), 1, 7)
    finish(pair, (receiver, receive))
    assert receive is not None
    assert receiver.received(receive) == Received(0, 5, 7)


def test_a_rank_that_leaves_ends_what_it_was_to_bring(pair: Pair) -> None:
    left, other = pair
    arrived = numbers(100)
    left.send(arrived, 1, 6)
    array = np.zeros(1 << 20, np.uint8)
    receive, send = other.receive(array, 0, 7), other.send(array, 0, 7)
    left.abandon([])
    for request in (receive, send):
        with pytest.raises(ConnectionLostError, match="closed|reset|pipe") as caught:
            finish((other, other), (other, request))
        assert caught.value.peer == 0
    with pytest.raises(ConnectionLostError):
        other.send(array, 0, 7)
    # What it had sent before is there.
    last = np.zeros(100, np.uint8)
    assert other.receive(last, 0, 6) is None
    assert (last == arrived).all()
    with pytest.raises(ConnectionLostError):
        other.receive(last, 0, 6)


@readable
def test_memory_that_is_abandoned_is_not_taken_for_the_message() -> None:
    """The sender aborts, and writes to its array, while it is read."""
    sent = numbers(3 * PIECE)
    memory = own_memory()
    assert memory is not None
    pair = sender, receiver = connected(memory)
    array = np.zeros(3 * PIECE, np.uint8)
    receive = receiver.receive(array, 0, 7)
    sender.send(sent, 1, 7)

    def begun() -> bool:
        receiver._advance()
        return bool(array[0] == sent[0])

    until(begun, 20)
    sender.abandon([])
    sent[:] = 0
    with pytest.raises(ConnectionLostError):
        finish((receiver, receiver), (receiver, receive))
    for transport in pair:
        transport.abandon([])


@readable
def test_reads_that_are_forbidden_later_go_over_the_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = own_memory()
    assert memory is not None
    pair = sender, receiver = connected(memory)
    assert receiver.kinds() == {0: ("unix", "cma")}

    def forbidden(own: int, other: int, nbytes: int) -> int:
        raise OSError(errno.EFAULT, "Bad address")

    monkeypatch.setattr(memory, "read", forbidden)
    array = np.zeros(1 << 20, np.uint8)
    receive = receiver.receive(array, 0, 7)
    send = sender.send(numbers(1 << 20), 1, 7)
    finish(pair, (sender, send), (receiver, receive))
    assert (array == numbers(1 << 20)).all()
    assert receiver.kinds() == {0: ("unix",)}
    for transport in pair:
        transport.abandon([])


def test_memory_is_read_only_with_the_right_number() -> None:
    probe, closed = Probe(True), Probe(False)
    message = bytearray(probe.message)
    message[-1] ^= 1
    assert Probe.memory(bytes(message), os.getpid()) is None
    assert Probe.memory(closed.message, os.getpid()) is None
    # Of a process that is not there.
    assert Probe.memory(probe.message, 2**22 + 1) is None


def test_what_was_sent_before_a_close_arrives() -> None:
    sender, receiver = connected()
    sent = numbers(EAGER)
    assert sender.send(sent, 1, 7) is None
    sender.close()
    array = np.zeros(EAGER, np.uint8)
    finish((receiver, receiver), (receiver, receiver.receive(array, 0, 7)))
    assert (array == sent).all()
    receiver.close()


@pytest.mark.usefixtures("high_descriptors")
def test_descriptors_above_1024_are_no_limit() -> None:
    pair = sender, receiver = connected()
    array = np.zeros(10, np.uint8)
    receive = receiver.receive(array, 0, 7)
    assert receiver.arm()
    sender.send(numbers(10), 1, 7)
    receiver.sleep(30, 0)
    finish(pair, (receiver, receive))
    assert (array == numbers(10)).all()
    for transport in pair:
        transport.abandon([])


def test_small_messages_are_counted_with_the_memory_that_they_need(pair: Pair) -> None:
    sender, receiver = pair
    count = 3 * WINDOW // OVERHEAD
    empty = np.zeros(0, np.uint8)
    sends = [(sender, sender.send(empty, 1, 7)) for _ in range(count)]
    eager = sum(request is None for _, request in sends)
    assert eager <= WINDOW // OVERHEAD + 1
    receives = [(receiver, receiver.receive(empty, 0, 7)) for _ in range(count)]
    finish(pair, *sends, *receives)


def test_a_receive_from_any_rank_after_all_have_left_is_an_error(pair: Pair) -> None:
    left, other = pair
    left.abandon([])
    other._advance()
    with pytest.raises(ConnectionLostError):
        other.receive(np.zeros(3, np.uint8), ANY_SOURCE, 7)


def test_what_the_other_rank_took_before_it_left_was_sent() -> None:
    """The answer to a large send is there, beside the end, and a send is refused."""
    sender, receiver = connected(own_memory())
    sent, array = numbers(1 << 20), np.zeros(1 << 20, np.uint8)
    send, receive = sender.send(sent, 1, 7), receiver.receive(array, 0, 7)
    assert send is not None

    def over() -> bool:
        # The sender reads nothing meanwhile; over the socket it has to send.
        receiver._advance()
        if receiver.kinds() == {0: ("unix",)}:
            sender._advance()
        return receive is None or receive.done

    until(over, 20)
    receiver.close()
    with pytest.raises(ConnectionLostError):
        sender.send(numbers(3), 1, 8)
    finish((sender, sender), (sender, send))
    sender.abandon([])


@pytest.mark.parametrize("where", ["read", "parse", "flush"])
def test_an_interrupt_in_the_midst_of_a_message_ends_the_connection(
    pair: Pair, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = pair
    connection = receiver._connections[0]

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    name = {"read": "_receive_into", "parse": "_begin", "flush": "_send_some"}[where]
    receive = receiver.receive(np.zeros(3, np.uint8), 0, 7)
    sender.send(numbers(3), 1, 7)
    monkeypatch.setattr(connection, name, interrupted)
    advance: Callable[[], object] = receiver._advance
    if where == "flush":
        advance = partial(receiver.send, numbers(EAGER + 1), 0, 7)
    with pytest.raises(KeyboardInterrupt):
        advance()
    with pytest.raises(ConnectionLostError, match="KeyboardInterrupt in the midst"):
        finish((receiver, receiver), (receiver, receive))


@pytest.mark.parametrize(
    "frame",
    [
        (9 << 60, 0, 0),
        (3 << 60, 5, 17),
        (4 << 60, 0, 17),
        (2 << 60, 0, 17),
        (7, EAGER + 1, 0),
    ],
    ids=["kind", "data", "taken", "grant", "too large"],
)
def test_what_is_no_frame_ends_the_connection(frame: tuple[int, int, int]) -> None:
    one, other = socket.socketpair()
    other.setblocking(False)
    receiver = TCPTransport({0: other}, {})
    receive = receiver.receive(np.zeros(3, np.uint8), 0, 7)
    with one:
        one.sendall(struct.pack("<QQQ", *frame))
        with pytest.raises(ConnectionLostError, match="no frame"):
            finish((receiver, receiver), (receiver, receive))
    receiver.abandon([])
