"""Small all_reduces and barriers of the side process: the eager protocol.

A small op spends its time on waking threads and processes. So the rank puts
command and data into an eager buffer in shared memory, every peer has posted a
receive of exactly that size since the op before, and the op is one message per
peer: no rendezvous, and no buffer to make.
"""

from __future__ import annotations

import ctypes
import sys
import time

from .abi import Gloo, UnboundBuffer
from .pipeline import accumulate
from .wire import COMMAND_BYTES, SIGNATURE_BYTES, Command, EagerLayout

__all__ = ["EagerCollectives"]

_SLOT = 0x40 << 56


class EagerCollectives:
    """The eager buffers of one context: those of the rank, and those of the peers.

    `memory` is what rank and side process share (`EagerLayout`), at `address`.
    """

    def __init__(self, gloo: Gloo, memory: memoryview, address: int) -> None:
        layout = EagerLayout(gloo.size)
        self._memory = memory
        self._gloo = gloo
        self._peers = [(gloo.rank + i) % gloo.size for i in range(1, gloo.size)]
        self._size_classes = [
            _SizeClass(gloo, layout, size_class, address, self._peers)
            for size_class in range(len(layout.capacities))
        ]

    def run(self, command: Command) -> None:
        """Run the op in buffer `command.target` of size class `command.segment`."""
        buffers, peers = self._size_classes[command.segment], self._peers
        index = command.target
        source, nbytes, slot = buffers.sources[index], buffers.nbytes, buffers.slot
        for peer in peers:
            source.send(peer, slot, 0, nbytes)
        buffers.target.wait_recvs(len(peers))
        source.wait_sends(len(peers))
        start = buffers.offsets[index]
        signature = bytes(self._memory[start : start + SIGNATURE_BYTES])
        for peer in peers:
            at = peer * nbytes
            if buffers.received[at : at + SIGNATURE_BYTES] != signature:
                _hang(peer)
        if command.length:
            accumulate(
                self._gloo.reduction(command.dtype, command.reduction),
                buffers.results[index],
                buffers.parts[index],
                command.length,
                buffers.spare,
            )

    def post(self, command: Command) -> None:
        """Post the receives for the next op, after the result of this one is out."""
        self._size_classes[command.segment].post()


class _SizeClass:
    """The buffers of one size class: this rank's, and one for each peer's."""

    def __init__(
        self,
        gloo: Gloo,
        layout: EagerLayout,
        size_class: int,
        address: int,
        peers: list[int],
    ) -> None:
        self.nbytes = layout.buffer_bytes[size_class]
        self.slot = _SLOT | size_class
        self._peers = peers
        self._incoming = (ctypes.c_char * (self.nbytes * gloo.size))()
        self.received = memoryview(self._incoming).cast("B")
        base = ctypes.addressof(self._incoming)
        self.target: UnboundBuffer = gloo.buffer(base, self.nbytes * gloo.size)
        indices = range(EagerLayout.BUFFERS)
        self.offsets = [layout.buffer(size_class, index) for index in indices]
        self.results = [address + layout.result(size_class, index) for index in indices]
        self.sources = [
            gloo.buffer(address + offset, self.nbytes) for offset in self.offsets
        ]
        received = [
            base + rank * self.nbytes + COMMAND_BYTES for rank in range(gloo.size)
        ]
        # This rank receives nothing from itself: room for intermediate results.
        self.spare = received[gloo.rank]
        self.parts = [
            [
                address + offset + COMMAND_BYTES
                if rank == gloo.rank
                else received[rank]
                for rank in range(gloo.size)
            ]
            for offset in self.offsets
        ]
        self.post()

    def post(self) -> None:
        for peer in self._peers:
            self.target.recv(peer, self.slot, peer * self.nbytes, self.nbytes)


def _hang(peer: int) -> None:
    """Wait to be killed: `peer` runs another collective.

    As in any collective in which ranks disagree, no rank proceeds, and the
    diagnosis says which rank is in which op.
    """
    print(f"rank {peer} runs another collective", file=sys.stderr, flush=True)
    while True:
        time.sleep(3600)
