"""Worker: two of them in one process, over shared memory."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rankscope.backends.ucx import library
from rankscope.backends.ucx.library import UCXError
from rankscope.backends.ucx.worker import Request, TruncationError, Worker

pytestmark = pytest.mark.skipif(
    library.unavailable_reason() is not None, reason="needs UCX: pip install -e .[ucx]"
)

_ALL = (1 << 64) - 1
_WAIT = 30.0


@contextlib.contextmanager
def pair() -> Iterator[tuple[Worker, Worker]]:
    """Two workers that know each other."""
    one, other = Worker(2), Worker(2)
    try:
        addresses = [one.address, other.address]
        one.connect(addresses)
        other.connect(addresses)
        yield one, other
    finally:
        one.destroy()
        other.destroy()


def until(condition: Callable[[], bool], *workers: Worker) -> None:
    """Make progress on `workers` until `condition` holds."""
    deadline = time.monotonic() + _WAIT
    while not condition():
        for worker in workers:
            worker.progress()
        assert time.monotonic() < deadline, "nothing has come"


def over(worker: Worker, request: Request | None) -> Callable[[], bool]:
    return lambda: request is None or worker.test(request)


@pytest.mark.parametrize("nbytes", [0, 1, 8192, 1 << 20])
@pytest.mark.parametrize("late", [False, True], ids=["expected", "unexpected"])
def test_a_message_arrives(nbytes: int, late: bool) -> None:
    sent = np.arange(nbytes, dtype=np.uint8)
    received = np.zeros(nbytes + 8, np.uint8)
    with pair() as (one, other):
        incoming = None if late else other.receive(received, 7, _ALL)
        outgoing = one.send(sent, 1, 7)
        if incoming is None:
            for _ in range(100):
                one.progress(), other.progress()
            incoming = other.receive(received, 7, _ALL)
        until(over(other, incoming), one, other)
        until(over(one, outgoing), one, other)
        assert (incoming.tag, incoming.nbytes) == (7, nbytes)
        # Over, and it stays so: an interrupt may have lost the first answer.
        assert other.test(incoming)
    assert (received[:nbytes] == sent).all()
    assert not received[nbytes:].any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.arange(6, dtype=np.float16)[2:],
        lambda: np.arange(6).astype("complex128")[1:3],
        lambda: np.frombuffer(b"read-only", np.uint8),
        lambda: np.array(["2026-01-01"], "datetime64[s]"),
        lambda: np.zeros((2, 3), "float32"),
    ],
    ids=["offset", "complex", "read-only", "datetime", "matrix"],
)
def test_the_elements_of_any_array_are_found(make: Callable[[], Any]) -> None:
    sent = make()
    received = np.empty_like(sent)
    with pair() as (one, other):
        incoming = other.receive(received, 1, _ALL)
        outgoing = one.send(sent, 1, 1)
        until(over(other, incoming), one, other)
        until(over(one, outgoing), one, other)
    assert received.tobytes() == sent.tobytes()


def test_a_tag_is_matched_under_the_mask() -> None:
    first, second = np.zeros(1), np.zeros(1)
    with pair() as (one, other):
        exact = other.receive(first, 0x0A0001, _ALL)
        any_source = other.receive(second, 0x0002, 0xFFFF)
        one.send(np.full(1, 2.0), 1, 0x0B0002)
        one.send(np.full(1, 1.0), 1, 0x0A0001)
        until(over(other, any_source), one, other)
        until(over(other, exact), one, other)
        assert any_source.tag == 0x0B0002
    assert (first[0], second[0]) == (1.0, 2.0)


@pytest.mark.parametrize("nbytes", [0, 8, 64])
def test_a_small_message_that_is_there_needs_no_request(nbytes: int) -> None:
    received = np.zeros(64, np.uint8)
    with pair() as (one, other):
        one.send(np.ones(nbytes, np.uint8), 1, 0x0A0007)
        # The first receive finds it once it has crossed the shared memory.
        requests: list[Request] = []

        def crossed() -> bool:
            requests.append(other.receive(received, 1, _ALL))
            return other.moved

        until(crossed)
        incoming = other.receive(received, 0x0007, 0xFFFF)
        assert incoming.pointer is None
        assert (incoming.tag, incoming.nbytes) == (0x0A0007, nbytes)
        assert other.test(incoming)
        assert other.settle([*requests, incoming])
    assert received.sum() == nbytes


def test_a_message_that_is_there_and_too_long_is_an_error() -> None:
    received = np.zeros(64, np.uint8)
    with pair() as (one, other):
        one.send(np.ones(32, np.uint8), 1, 5)
        one.send(np.ones(1, np.uint8), 1, 6)
        # They arrive in order: where the second is there, so is the first.
        until(over(other, other.receive(received[63:], 6, _ALL)), one, other)
        with pytest.raises(UCXError, match="truncated"):
            other.receive(received[:16], 5, _ALL)
    assert not received[16:63].any()


@pytest.mark.parametrize("nbytes", [64, 1 << 20])
def test_a_message_that_is_too_long_is_an_error(nbytes: int) -> None:
    sent = np.ones(nbytes + 8, np.uint8)
    received = np.zeros(nbytes + 16, np.uint8)
    with pair() as (one, other):
        incoming = other.receive(received[:nbytes], 1, _ALL)
        one.send(sent, 1, 1)
        with pytest.raises(TruncationError) as caught:
            until(over(other, incoming), one, other)
        assert (caught.value.tag, caught.value.nbytes) == (1, nbytes + 8)
        assert other.test(incoming)
    assert not received[nbytes:].any()


@pytest.mark.parametrize("nbytes", [64, 1 << 22])
def test_nothing_is_written_once_the_worker_is_destroyed(nbytes: int) -> None:
    sent = np.ones(nbytes, np.uint8)
    received = np.zeros(nbytes, np.uint8)
    with pair() as (one, other):
        other.receive(received, 1, _ALL)
        one.send(sent, 1, 1)
        # It may have begun to arrive, and even be there.
        one.progress()
        other.progress()
        other.destroy()
        before = received.copy()
        for _ in range(1000):
            one.progress()
        assert (received == before).all()


def test_the_descriptor_tells_of_a_message() -> None:
    received = np.zeros(1)
    with pair() as (one, other):
        incoming = other.receive(received, 1, _ALL)
        until(other.arm, other)
        poll = select.poll()
        poll.register(other.descriptor, select.POLLIN)
        assert not poll.poll(20)
        sent = np.ones(1)
        sender = threading.Thread(target=one.send, args=(sent, 1, 1))
        sender.start()
        assert poll.poll(_WAIT * 1000)
        sender.join()
        until(over(other, incoming), other, one)
        assert other.transports() == {}
        assert {*one.transports()[1]} <= {"self", "sysv", "posix", "cma"}


def test_a_flush_ends() -> None:
    sent, received = np.ones(1 << 16), np.zeros(1 << 16)
    with pair() as (one, other):
        incoming = other.receive(received, 1, _ALL)
        one.send(sent, 1, 1)
        flushed = one.flush()
        until(over(one, flushed), one, other)
        until(over(other, incoming), one, other)


def test_destroyed_workers_leave_nothing() -> None:
    sent, received = np.ones(1 << 16), np.zeros(1 << 16)

    def cycle() -> None:
        with pair() as (one, other):
            other.receive(received, 1, _ALL)
            for _ in range(50):
                one.send(sent, 1, 2)
            for _ in range(10):
                one.progress(), other.progress()

    def held() -> tuple[int, int, int]:
        gc.collect()
        return (
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            sum(f"/{os.getpid()}" in name for name in os.listdir("/dev/shm")),
        )

    cycle()
    before = held()
    for _ in range(5):
        cycle()
    assert held() == before


def test_an_unusable_setting_is_an_error_that_names_it() -> None:
    with pytest.raises(UCXError, match=r"UCX_NO_SUCH_THING=1"):
        Worker(2, {"NO_SUCH_THING": "1"})
