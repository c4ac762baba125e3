"""How soon a connection goes on after the network was cut."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from rankscope.backends.resending import resend_each_second


@pytest.mark.skipif(sys.platform != "linux", reason="the option is Linux's")
def test_a_connection_is_tried_each_second_for_as_long_as_before() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as made,
    ):
        resend_each_second(made.fileno())
        gives_up = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        try:
            longest = made.getsockopt(socket.IPPROTO_TCP, 44)
        except OSError:
            # Before Linux 6.15 all is as it was.
            assert gives_up == 0
        else:
            assert (longest, gives_up) == (1000, 924_000)


def test_a_descriptor_that_is_another_file_by_now_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with open(tmp_path / "file", "rb") as file:
        before = os.listdir("/proc/self/fd")
        resend_each_second(file.fileno())
        assert os.listdir("/proc/self/fd") == before
        assert file.read() == b""
    left, right = socket.socketpair()
    number = left.fileno()
    left.close()
    right.close()
    resend_each_second(number)
