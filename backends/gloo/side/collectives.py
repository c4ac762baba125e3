"""The collectives of the side process, over gloo's transport and reductions.

Large all_reduces run gloo's own algorithms. Every other collective is made of
sends and receives between gloo's unbound buffers: it cuts large arrays so that
copies overlap with communication, and works for every size on every number of
ranks, which gloo's allgatherv and reduce_scatter do not.

A *slot* matches a send with a receive. It holds the number of the collective
and a signature of its arguments, so that ranks that disagree wait for each
other, and the diagnosis finds them, instead of mixing their data.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from .abi import Gloo, UnboundBuffer
from .pipeline import ITEM_BYTES, Chunks, Scratch, Whole, accumulate, pipeline
from .wire import (
    REDUCTIONS,
    Command,
    Kind,
    chunk_bytes,
    eager_bytes,
    ring_bytes,
)

__all__ = ["Collectives", "Region", "post_recv", "post_send"]

_SLOT_PREFIX = 0x10 << 56
# One read or write by the kernel is at most 2 GiB long.
_PART = 1 << 30

#: Address and bytes in this process.
Region = tuple[int, int]


class Collectives:
    """Runs one collective after another on the context `gloo`."""

    def __init__(self, gloo: Gloo) -> None:
        self._gloo = gloo
        self._rank, self._size = gloo.rank, gloo.size
        # Each rank begins with the next one, so that the first peers are all different.
        self._peers = [(self._rank + i) % self._size for i in range(1, self._size)]
        self._scratch = Scratch()

    # -- reductions --------------------------------------------------------

    def reduce(
        self, command: Command, address: int, root: int | None, chunks: Chunks
    ) -> None:
        """Reduce in place at `address`: on `root`, or on every rank (``None``)."""
        item = ITEM_BYTES[command.dtype]
        large = command.length * item > eager_bytes(self._size)
        if root is None and large and command.reduction < len(REDUCTIONS):
            self._reduce_by_gloo(command, address, item, chunks)
        else:
            self._reduce_whole(command, address, item, root, chunks)

    def _reduce_by_gloo(
        self, command: Command, address: int, item: int, chunks: Chunks
    ) -> None:
        """gloo's own algorithms: on the whole array, or chunk by chunk to copy it."""
        step = chunk_bytes(self._size) // item
        total = -(-command.length // step)
        # Larger ones are cut, on all ranks alike, if any rank has to copy. Finding
        # that out takes a small part of the time of such an op.
        if total == 1 or not self._any(command, command.extra > 0):
            step, total = command.length, 1
        slots = command.extra or total
        # gloo's tags have 32 bits: the lowest ones of the slot vary most.
        tag = self._slot(command, command.length) >> 8 & 0xFFFFFFFF
        for chunk in range(total):
            chunks.need(chunk)
            count = min(step, command.length - chunk * step)
            self._gloo.all_reduce(
                address + chunk % slots * step * item,
                count,
                command.dtype,
                command.reduction,
                ring=count * item > ring_bytes(self._size),
                tag=tag,
            )
            if chunk < total - 1:
                chunks.done(chunk)

    def _any(self, command: Command, flag: bool) -> bool:
        """Whether `flag` is set on any rank."""
        slot = self._slot(command, command.length)
        size = self._size
        flags = (ctypes.c_uint8 * (size + 1))()
        flags[size] = flag
        buffer = self._gloo.buffer(ctypes.addressof(flags), size + 1)
        for peer in self._peers:
            buffer.recv(peer, slot, peer, 1)
        for peer in self._peers:
            buffer.send(peer, slot, size, 1)
        buffer.wait_recvs(len(self._peers))
        buffer.wait_sends(len(self._peers))
        buffer.free()
        return any(flags)

    def _reduce_whole(
        self,
        command: Command,
        address: int,
        item: int,
        root: int | None,
        chunks: Chunks,
    ) -> None:
        """Root, or every rank, receives each peer's whole array and reduces it.

        One round, chunk by chunk. For a root no algorithm moves less; for every
        rank it is used in groups too large for eager buffers, and for the bitwise
        reductions, which gloo's algorithms lack.
        """
        peers, me = self._peers, self._rank
        reduction = self._gloo.reduction(command.dtype, command.reduction)
        slot = self._slot(command, command.length)
        step = min(chunk_bytes(self._size) // item, command.length)
        total = -(-command.length // step)
        slots = command.extra or total
        wants = root is None or root == me
        sends = peers if root is None else [] if wants else [root]
        room = step * item
        memory = command.length * item if slots == total else slots * room
        sources = [self._gloo.buffer(address, memory) for _ in range(2)]
        scratch, targets = 0, []
        if wants:
            scratch = self._scratch.reserve(2 * room * self._size)
            targets = [
                self._gloo.buffer(scratch + half * room * self._size, room * self._size)
                for half in range(2)
            ]

        def region(chunk: int) -> tuple[int, int]:
            count = min(step, command.length - chunk * step)
            return chunk % slots * room, count

        def begin(chunk: int) -> None:
            offset, count = region(chunk)
            if wants:
                for peer in peers:
                    targets[chunk % 2].recv(peer, slot, peer * room, count * item)
            for peer in sends:
                sources[chunk % 2].send(peer, slot, offset, count * item)

        def advance(chunk: int) -> None:
            offset, count = region(chunk)
            if wants:
                targets[chunk % 2].wait_recvs(len(peers))
            sources[chunk % 2].wait_sends(len(sends))
            if wants:
                base = scratch + chunk % 2 * room * self._size
                parts = [base + rank * room for rank in range(self._size)]
                spare, parts[me] = parts[me], address + offset
                accumulate(reduction, address + offset, parts, count, spare)

        pipeline(total, chunks, begin, advance)
        for buffer in (*sources, *targets):
            buffer.free()

    def reduce_scatter(
        self, command: Command, inputs: Sequence[Region], output: int
    ) -> None:
        """Reduce every rank's ``inputs[rank]`` (address, elements) into `output`."""
        size, me, peers = self._size, self._rank, self._peers
        reduction = self._gloo.reduction(command.dtype, command.reduction)
        item = ITEM_BYTES[command.dtype]
        slots = [self._slot(command, count) for _, count in inputs]
        step = chunk_bytes(size) // size // item
        room = min(step, max(inputs[me][1], 1)) * item
        scratch = self._scratch.reserve(2 * room * size)
        targets = [
            self._gloo.buffer(scratch + i * room * size, room * size) for i in range(2)
        ]
        sources = [self._gloo.buffer(at, count * item) for at, count in inputs]
        sent = [0] * size

        def length(rank: int, chunk: int) -> int:
            return max(0, min(step, inputs[rank][1] - chunk * step))

        def begin(chunk: int) -> None:
            mine = length(me, chunk) * item
            for peer in peers:
                if mine:
                    targets[chunk % 2].recv(peer, slots[me], peer * room, mine)
            for peer in peers:
                if count := length(peer, chunk):
                    sources[peer].send(
                        peer, slots[peer], chunk * step * item, count * item
                    )
                    sent[peer] += 1

        def advance(chunk: int) -> None:
            if count := length(me, chunk):
                targets[chunk % 2].wait_recvs(len(peers))
                base = scratch + chunk % 2 * room * size
                operands = [base + rank * room for rank in range(size)]
                spare, operands[me] = operands[me], inputs[me][0] + chunk * step * item
                accumulate(
                    reduction, output + chunk * step * item, operands, count, spare
                )

        longest = max(count for _, count in inputs)
        pipeline(-(-longest // step), Whole(), begin, advance)
        for peer, source in enumerate(sources):
            source.wait_sends(sent[peer])
            source.free()
        for target in targets:
            target.free()

    # -- moves -------------------------------------------------------------

    def broadcast(self, command: Command, address: int, chunks: Chunks) -> None:
        """Send `command.length` bytes down a binomial tree from rank `command.peer`."""
        size, root, nbytes = self._size, command.peer, command.length
        slot = self._slot(command, nbytes)
        place = (self._rank - root) % size
        # The parent lacks this rank's lowest bit; a child adds one below it.
        parent = ((place & (place - 1)) + root) % size
        lowest = place & -place if place else 1 << (size - 1).bit_length()
        children = []
        while lowest := lowest >> 1:
            if place + lowest < size:
                children.append((place + lowest + root) % size)
        step = chunk_bytes(size)
        total = -(-nbytes // step)
        slots = command.extra or total
        memory = nbytes if slots == total else slots * step
        buffers = [self._gloo.buffer(address, memory) for _ in range(3)]

        def region(chunk: int) -> tuple[int, int]:
            return chunk % slots * step, min(step, nbytes - chunk * step)

        def begin(chunk: int) -> None:
            if place:
                buffers[chunk % 3].recv(parent, slot, *region(chunk))

        def advance(chunk: int) -> None:
            if place:
                buffers[chunk % 3].wait_recvs()
            for child in children:
                buffers[chunk % 3].send(child, slot, *region(chunk))

        def finish(chunk: int) -> None:
            buffers[chunk % 3].wait_sends(len(children))

        pipeline(total, chunks, begin, advance, finish)
        for buffer in buffers:
            buffer.free()

    def exchange(
        self, command: Command, transfers: Sequence[tuple[int, Region, Region]]
    ) -> None:
        """Send to and receive from each (peer, source, target), all at once."""
        for peer, (source, nbytes), (target, _) in transfers:
            if peer == self._rank:
                ctypes.memmove(target, source, nbytes)
        transfers = [each for each in transfers if each[0] != self._rank]
        posted: list[tuple[UnboundBuffer, int, int]] = []
        for peer, _, (address, nbytes) in transfers:
            if nbytes:
                buffer = self._gloo.buffer(address, nbytes)
                parts = post_recv(buffer, peer, self._slot(command, nbytes), nbytes)
                posted.append((buffer, 0, parts))
        for peer, (address, nbytes), _ in transfers:
            if nbytes:
                buffer = self._gloo.buffer(address, nbytes)
                parts = post_send(buffer, peer, self._slot(command, nbytes), nbytes)
                posted.append((buffer, parts, 0))
        for buffer, sends, recvs in posted:
            buffer.wait_sends(sends)
            buffer.wait_recvs(recvs)
            buffer.free()

    # -- shared ------------------------------------------------------------

    def _slot(self, command: Command, count: int) -> int:
        """Prefix, number of the collective, signature, and 8 bits for its rounds."""
        signature = (command.kind * 16 + command.dtype) * 16 + command.reduction
        signature = signature * 4099 + command.peer
        if command.kind == Kind.EXCHANGE:
            signature = signature * 257 + command.extra
        signature = (signature * 65_537 + count) % 65_521
        return _SLOT_PREFIX | (command.sequence & 0xFFFFFFFF) << 24 | signature << 8


def post_send(buffer: UnboundBuffer, peer: int, slot: int, nbytes: int) -> int:
    """Post sends of the whole buffer; return how many."""
    offsets = range(0, nbytes, _PART)
    for offset in offsets:
        buffer.send(peer, slot, offset, min(_PART, nbytes - offset))
    return len(offsets)


def post_recv(buffer: UnboundBuffer, peer: int, slot: int, nbytes: int) -> int:
    """Post receives of the whole buffer; return how many."""
    offsets = range(0, nbytes, _PART)
    for offset in offsets:
        buffer.recv(peer, slot, offset, min(_PART, nbytes - offset))
    return len(offsets)
