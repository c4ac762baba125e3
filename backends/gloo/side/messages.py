"""Sends and receives of the side process: posted in order, ending in any order.

Every message begins with an envelope of fixed size that holds its length, so
that one that does not fit is an error and not a corruption. A small message
travels in the envelope (eager); of a larger one the data follows, on a slot of
its own, once the receiver has seen that it fits (rendezvous).
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable
from typing import NamedTuple

from .abi import Gloo
from .collectives import post_recv, post_send

__all__ = ["Messages", "Outcome"]

_HEADER = struct.Struct("=QQ")
_ENVELOPE_BYTES = 4096
_EAGER_BYTES = _ENVELOPE_BYTES - _HEADER.size

_ENVELOPE_PREFIX = 0x20 << 56
_DATA_PREFIX = 0x30 << 56


class Outcome(NamedTuple):
    """How a message ended: its sender, and its size if it was not the one expected."""

    peer: int
    wrong_bytes: int | None = None


class Messages:
    """Point-to-point messages over the context `gloo`."""

    def __init__(self, gloo: Gloo) -> None:
        self._gloo = gloo
        self._sent = 0

    def send(
        self, address: int, nbytes: int, peer: int, tag: int
    ) -> Callable[[], Outcome]:
        """Post a send; return a function that waits until it is over."""
        self._sent += 1
        envelope = ctypes.create_string_buffer(_ENVELOPE_BYTES)
        _HEADER.pack_into(envelope, 0, nbytes, self._sent)
        start = ctypes.addressof(envelope)
        head = self._gloo.buffer(start, _ENVELOPE_BYTES)
        if nbytes <= _EAGER_BYTES:
            ctypes.memmove(start + _HEADER.size, address, nbytes)
        head.send(peer, _ENVELOPE_PREFIX | tag, 0, _ENVELOPE_BYTES)
        body, parts = None, 0
        if nbytes > _EAGER_BYTES:
            body = self._gloo.buffer(address, nbytes)
            parts = post_send(body, peer, _DATA_PREFIX | self._sent, nbytes)

        def wait() -> Outcome:
            nonlocal envelope
            head.wait_sends()
            head.free()
            if body is not None:
                body.wait_sends(parts)
                body.free()
            del envelope  # alive until here
            return Outcome(peer)

        return wait

    def recv(
        self, address: int, nbytes: int, peer: int, tag: int
    ) -> Callable[[], Outcome]:
        """Post a receive (`peer` -1: from any rank); return a function that waits."""
        envelope = ctypes.create_string_buffer(_ENVELOPE_BYTES)
        head = self._gloo.buffer(ctypes.addressof(envelope), _ENVELOPE_BYTES)
        if peer < 0:
            head.recv_any(_ENVELOPE_PREFIX | tag, 0, _ENVELOPE_BYTES)
        else:
            head.recv(peer, _ENVELOPE_PREFIX | tag, 0, _ENVELOPE_BYTES)

        def wait() -> Outcome:
            source = head.wait_recv_from()
            head.free()
            sent, number = _HEADER.unpack_from(envelope)
            slot = _DATA_PREFIX | number
            if sent == nbytes:
                if sent <= _EAGER_BYTES:
                    start = ctypes.addressof(envelope) + _HEADER.size
                    ctypes.memmove(address, start, nbytes)
                else:
                    self._receive_data(address, source, slot, nbytes)
                return Outcome(source)
            if sent > _EAGER_BYTES:
                # The sender waits until its data is received: receive and drop it.
                with mmap.mmap(-1, sent) as sink:
                    pin = ctypes.c_char.from_buffer(sink)
                    self._receive_data(ctypes.addressof(pin), source, slot, sent)
                    del pin
            return Outcome(source, sent)

        return wait

    def _receive_data(self, address: int, peer: int, slot: int, nbytes: int) -> None:
        body = self._gloo.buffer(address, nbytes)
        body.wait_recvs(post_recv(body, peer, slot, nbytes))
        body.free()
