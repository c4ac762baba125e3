"""The command socket: its sender never blocks, and messages keep their order."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.gloo.channel import Channel
from rankscope.backends.gloo.fd_poller import FdPoller

MESSAGES = [b"%08d" % number + bytes(8000) for number in range(200)]


class Ends:
    """A channel that a poller watches, and the other end of its socket."""

    def __init__(self) -> None:
        near, self.far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.poller = FdPoller()
        self.channel = Channel(near, self.poller)
        self.sending = threading.Lock()
        self.readable = threading.Event()
        self.gone = threading.Event()
        self.poller.call(lambda: self.channel.watch(self._on_event))

    def send(self, message: bytes) -> None:
        with self.sending:
            self.channel.send(message)

    def _on_event(self, events: int) -> None:
        if events & (select.EPOLLOUT | select.EPOLLHUP):
            with self.sending:
                self.channel.flush()
        if events & select.EPOLLHUP:
            self.channel.unwatch()
            self.gone.set()
        elif events & select.EPOLLIN:
            self.channel.want_input(False)
            self.readable.set()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.far.close()
    assert made.gone.wait(5)
    made.channel.close()


def test_what_a_full_socket_does_not_take_is_sent_later_in_order(ends: Ends) -> None:
    for message in MESSAGES:
        ends.send(message)
    assert ends.channel._unsent
    ends.far.settimeout(5)
    assert [ends.far.recv(1 << 16) for _ in MESSAGES] == MESSAGES
    until(lambda: not ends.channel._events)


def test_messages_to_a_process_that_has_ended_are_dropped(ends: Ends) -> None:
    for message in MESSAGES:
        ends.send(message)
    ends.far.close()
    assert ends.gone.wait(5)
    ends.send(b"late")
    assert not ends.channel._unsent


def test_the_end_is_seen_with_commands_unread(ends: Ends) -> None:
    ends.send(b"unread")
    ends.far.close()
    assert ends.channel.receive_into(bytearray(8)) == 0


def test_input_is_reported_only_where_it_is_wanted(ends: Ends) -> None:
    assert not ends.channel.readable(0.01)
    ends.far.send(b"report")
    assert ends.channel.readable(5)
    assert not ends.readable.is_set()
    ends.channel.want_input(True)
    assert ends.readable.wait(5)
