"""Small all_reduces and barriers of the side process, on receives posted ahead.

What costs time in a small op is waking threads and processes. Here the command
with its data is read straight into the buffer that goes to the peers, every
peer has a receive of that size posted since the op before, and the result goes
back in the report: one message per peer, no announcement, no shared memory.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import time

from .gloo_algorithms import ITEM_BYTES, accumulate
from .gloo_cpp import Gloo
from .gloo_protocol import (
    COMMAND_BYTES,
    INLINE_BYTES,
    MESSAGE_BYTES,
    SIGNATURE_BYTES,
    inline_bytes,
)

__all__ = ["InlineOps"]

_SLOT = 0x40 << 56
_FRAME = COMMAND_BYTES + INLINE_BYTES
_LENGTH = struct.Struct("=xxxxxxxxQ")


class InlineOps:
    """The frames of one context: two to send from in turn, one per peer."""

    def __init__(self, gloo: Gloo, result: int) -> None:
        self._gloo = gloo
        self._rank, self._size = gloo.rank, gloo.size
        self._result = result
        self._peers = [(self._rank + i) % self._size for i in range(1, self._size)]
        # A command of any kind is read into a frame; only inline ones are sent.
        self._outgoing = [ctypes.create_string_buffer(MESSAGE_BYTES) for _ in range(2)]
        self._views = [memoryview(frame).cast("B") for frame in self._outgoing]
        self._sources = [
            gloo.buffer(ctypes.addressof(frame), _FRAME) for frame in self._outgoing
        ]
        self._unsent = [0, 0]
        self._turn = 0
        self._incoming = (ctypes.c_char * (_FRAME * self._size))()
        self._incoming_view = memoryview(self._incoming).cast("B")
        base = ctypes.addressof(self._incoming)
        self._target = gloo.buffer(base, _FRAME * self._size)
        # The data of each rank; my own changes with the frame, and its place
        # among the incoming is free for what is reduced in between.
        self._parts = [base + r * _FRAME + COMMAND_BYTES for r in range(self._size)]
        self._spare = self._parts[self._rank]
        if inline_bytes(self._size) >= 0:
            self._post()

    def frame(self) -> memoryview:
        """The buffer that the next command is to be read into."""
        turn = self._turn
        if self._unsent[turn]:
            self._sources[turn].wait_sends(self._unsent[turn])
            self._unsent[turn] = 0
        return self._views[turn]

    def run(self) -> int:
        """Run the command in `frame()`; return how many bytes of result there are."""
        turn, peers = self._turn, self._peers
        source, view = self._sources[turn], self._views[turn]
        for peer in peers:
            source.send(peer, _SLOT, 0, _FRAME)
        self._unsent[turn] = len(peers)
        self._turn = 1 - turn
        self._target.wait_recvs(len(peers))
        self._compare(bytes(view[:SIGNATURE_BYTES]))
        dtype, reduction = view[1], view[2]
        (count,) = _LENGTH.unpack_from(view)
        if count:
            parts = self._parts
            parts[self._rank] = ctypes.addressof(self._outgoing[turn]) + COMMAND_BYTES
            accumulate(
                self._gloo.reduction(dtype, reduction),
                self._result,
                parts,
                count,
                self._spare,
            )
        self._post()
        return count * ITEM_BYTES[dtype]

    def _post(self) -> None:
        for peer in self._peers:
            self._target.recv(peer, _SLOT, peer * _FRAME, _FRAME)

    def _compare(self, signature: bytes) -> None:
        for peer in self._peers:
            start = peer * _FRAME
            if self._incoming_view[start : start + SIGNATURE_BYTES] != signature:
                # As with any other collective in which ranks disagree: nobody
                # gets on, and the diagnosis says who is where. We get killed.
                print(f"rank {peer} runs another collective", file=sys.stderr)
                while True:
                    time.sleep(3600)
