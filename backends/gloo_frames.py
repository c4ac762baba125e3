"""Small all_reduces and barriers of the side process, on receives posted ahead.

What costs time in a small op is waking threads and processes. Here the rank has
put command and data into a frame in shared memory, every peer has a receive of
just that size posted since the op before, and one message per peer is all there
is to it: no announcement, no buffer to make.
"""

from __future__ import annotations

import ctypes
import sys
import time

from .gloo_cpp import Gloo, UnboundBuffer
from .gloo_pipeline import accumulate
from .gloo_protocol import COMMAND_BYTES, SIGNATURE_BYTES, Command, Mailbox

__all__ = ["FrameOps"]

_SLOT = 0x40 << 56


class FrameOps:
    """The frames of one context: the rank's in its mailbox, and the peers'."""

    def __init__(self, gloo: Gloo, mailbox: memoryview, address: int) -> None:
        layout = Mailbox(gloo.size)
        self._mailbox = mailbox
        self._gloo = gloo
        self._peers = [(gloo.rank + i) % gloo.size for i in range(1, gloo.size)]
        self._classes = [
            _Class(gloo, layout, kind, address, self._peers)
            for kind in range(len(layout.classes))
        ]

    def run(self, command: Command) -> None:
        """Run the op in frame `command.target` of class `command.segment`."""
        frames, number, peers = (
            self._classes[command.segment],
            command.target,
            self._peers,
        )
        source, size, slot = frames.sources[number], frames.size, frames.slot
        for peer in peers:
            source.send(peer, slot, 0, size)
        frames.target.wait_recvs(len(peers))
        source.wait_sends(len(peers))
        start = frames.offsets[number]
        signature = bytes(self._mailbox[start : start + SIGNATURE_BYTES])
        for peer in peers:
            at = peer * size
            if frames.view[at : at + SIGNATURE_BYTES] != signature:
                _hang(peer)
        if command.length:
            accumulate(
                self._gloo.reduction(command.dtype, command.reduction),
                frames.results[number],
                frames.parts[number],
                command.length,
                frames.spare,
            )

    def post(self, command: Command) -> None:
        """Post the receives for the next op: once the result of this one is out."""
        self._classes[command.segment].post()


class _Class:
    """The frames of one size."""

    def __init__(
        self, gloo: Gloo, layout: Mailbox, kind: int, address: int, peers: list[int]
    ) -> None:
        self.size = layout.classes[kind]
        self.slot = _SLOT | kind
        self._peers = peers
        self._incoming = (ctypes.c_char * (self.size * gloo.size))()
        self.view = memoryview(self._incoming).cast("B")
        base = ctypes.addressof(self._incoming)
        self.target: UnboundBuffer = gloo.buffer(base, self.size * gloo.size)
        numbers = range(Mailbox.FRAMES)
        self.offsets = [layout.frame(kind, number) for number in numbers]
        self.results = [address + layout.result(kind, number) for number in numbers]
        self.sources = [gloo.buffer(address + each, self.size) for each in self.offsets]
        arrived = [base + rank * self.size + COMMAND_BYTES for rank in range(gloo.size)]
        # Nothing arrives from myself: room for what is reduced in between.
        self.spare = arrived[gloo.rank]
        self.parts = [
            [
                address + offset + COMMAND_BYTES if rank == gloo.rank else arrived[rank]
                for rank in range(gloo.size)
            ]
            for offset in self.offsets
        ]
        self.post()

    def post(self) -> None:
        for peer in self._peers:
            self.target.recv(peer, self.slot, peer * self.size, self.size)


def _hang(peer: int) -> None:
    """Wait to be killed: `peer` runs another collective.

    As in any collective in which ranks disagree, nobody gets on, and the
    diagnosis says who is where.
    """
    print(f"rank {peer} runs another collective", file=sys.stderr, flush=True)
    while True:
        time.sleep(3600)
