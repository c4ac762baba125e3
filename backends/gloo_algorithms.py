"""The collectives of the side process, over gloo's transport and reductions.

Every collective is a schedule of sends and receives between gloo's unbound
buffers. That takes fewer rounds than the algorithms pygloo exposes (2 ranks, up
to 64 KiB: half the time of BCUBE, a third of RING; large arrays: as RING), cuts
arrays so that copies overlap with communication, and works for every size on
every number of ranks, which pygloo's reduce-scatter does not.

A *slot* matches a send with a receive. It holds the number of the collective
and a signature of its arguments, so that ranks which disagree wait for each
other, and the diagnosis finds them, instead of mixing their data.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Protocol

from .gloo_cpp import Gloo, Reduction, UnboundBuffer
from .gloo_protocol import (
    DTYPES,
    Command,
    Kind,
    chunk_bytes,
    latency_bytes,
    ring_bytes,
)

__all__ = [
    "ITEM_BYTES",
    "Chunks",
    "Collectives",
    "Region",
    "Whole",
    "accumulate",
    "post_recv",
    "post_send",
]

#: Element sizes in the order of the protocol's DTYPES.
ITEM_BYTES = (1, 1, 4, 4, 8, 8, 2, 4, 8)

# gloo's own algorithms write over old values, which float16 does not bear.
_FLOAT16 = DTYPES.index("float16")

_SLOT_PREFIX = 0x10 << 56
# One read or write of the kernel's is never longer than 2 GiB.
_PART = 1 << 30

#: Address and bytes in this process.
Region = tuple[int, int]


class Chunks(Protocol):
    """Whether the rank has made room for a chunk of the op under way."""

    def ready(self, chunk: int) -> bool:
        """Whether `chunk` may be used now."""

    def need(self, chunk: int) -> None:
        """Wait until `chunk` may be used."""

    def done(self, chunk: int) -> None:
        """Tell the rank that `chunk` is over."""


class Collectives:
    """Runs one collective after another on the context `gloo`."""

    def __init__(self, gloo: Gloo) -> None:
        self._gloo = gloo
        self._rank, self._size = gloo.rank, gloo.size
        # Everyone begins with the next rank, so that nobody is everybody's first.
        self._peers = [(self._rank + i) % self._size for i in range(1, self._size)]
        self._scratch_map: mmap.mmap | None = None
        self._scratch_pin: object = None
        self._scratch_address = 0
        self._scratch_bytes = 0

    # -- reductions --------------------------------------------------------

    def reduce(
        self, command: Command, address: int, root: int | None, chunks: Chunks
    ) -> None:
        """Reduce in place at `address`: on `root`, or on every rank (``None``)."""
        item = ITEM_BYTES[command.dtype]
        if root is None and command.dtype != _FLOAT16:
            self._reduce_by_gloo(command, address, item, chunks)
            return
        reduction = self._gloo.reduction(command.dtype, command.reduction)
        slot = self._slot(command, command.length)
        if command.length * item <= latency_bytes(self._size):
            self._reduce_at_once(slot, reduction, address, command.length, item, root)
        else:
            self._reduce_chunks(slot, reduction, address, command, item, root, chunks)

    def _reduce_by_gloo(
        self, command: Command, address: int, item: int, chunks: Chunks
    ) -> None:
        """gloo's own algorithms: on the whole array, or chunk by chunk to copy it."""
        step = chunk_bytes(self._size) // item
        total = -(-command.length // step)
        # Larger ones are cut, on all ranks alike, if one rank has to copy. To
        # ask takes a small part of the time of such an op.
        if total == 1 or not self._any(command, command.extra > 0):
            step, total = command.length, 1
        slots = command.extra or total
        # gloo's tags have 32 bits, of which the lowest ones of our slot tell most.
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

    def _reduce_at_once(
        self,
        slot: int,
        reduction: Reduction,
        address: int,
        count: int,
        item: int,
        root: int | None,
    ) -> None:
        """One round: whoever wants the result gets every array, whole."""
        nbytes = count * item
        wants = root is None or root == self._rank
        sends = self._peers if root is None else [] if wants else [root]
        scratch = self._scratch(nbytes * self._size)
        source = self._gloo.buffer(address, nbytes)
        target = self._gloo.buffer(scratch, nbytes * self._size)
        if wants:
            for peer in self._peers:
                target.recv(peer, slot, peer * nbytes, nbytes)
        for peer in sends:
            source.send(peer, slot, 0, nbytes)
        if wants:
            target.wait_recvs(len(self._peers))
        source.wait_sends(len(sends))
        if wants:
            parts = [scratch + rank * nbytes for rank in range(self._size)]
            spare, parts[self._rank] = parts[self._rank], address
            accumulate(reduction, address, parts, count, spare)
        source.free()
        target.free()

    def _reduce_chunks(
        self,
        slot: int,
        reduction: Reduction,
        address: int,
        command: Command,
        item: int,
        root: int | None,
        chunks: Chunks,
    ) -> None:
        """Chunk by chunk: reduce-scatter, then gather; the next one on its way.

        Rank r reduces the r-th part of each chunk. Chunks lie one after another,
        or in turn in `slots` slots.
        """
        size, me, peers = self._size, self._rank, self._peers
        step = chunk_bytes(size) // item
        total = -(-command.length // step)
        slots = command.extra or total
        room = -(-step // size) * item
        # A non-root sends its part on out of the scratch space.
        halves = 2 if root is None else 3
        scratch = self._scratch(halves * room * size)
        memory = (command.length if slots == total else slots * step) * item
        sources = [self._gloo.buffer(address, memory) for _ in range(3)]
        gathers = [self._gloo.buffer(address, memory) for _ in range(2)]
        targets = [
            self._gloo.buffer(scratch + i * room * size, room * size)
            for i in range(halves)
        ]
        gather_slot = slot + 1

        def parts(chunk: int) -> list[tuple[int, int]]:
            """Offset and elements of each rank's part of `chunk`."""
            length = min(step, command.length - chunk * step)
            share = -(-length // size)
            start = chunk % slots * step
            return [
                (
                    (start + min(rank * share, length)) * item,
                    max(0, min(share, length - rank * share)),
                )
                for rank in range(size)
            ]

        def begin(chunk: int) -> None:
            cut, mine = parts(chunk), parts(chunk)[me][1] * item
            for peer in peers:
                if mine:
                    targets[chunk % halves].recv(peer, slot, peer * room, mine)
            for peer in peers:
                offset, count = cut[peer]
                if count:
                    sources[chunk % 3].send(peer, slot, offset, count * item)

        def advance(chunk: int) -> None:
            cut = parts(chunk)
            offset, count = cut[me]
            gather, half = gathers[chunk % 2], chunk % halves
            if count:
                targets[half].wait_recvs(len(peers))
                base = scratch + half * room * size
                operands = [base + rank * room for rank in range(size)]
                spare, operands[me] = operands[me], address + offset
                result = address + offset if root in (None, me) else spare
                accumulate(reduction, result, operands, count, spare)
            if root in (None, me):
                for peer in peers:
                    if cut[peer][1]:
                        gather.recv(
                            peer, gather_slot, cut[peer][0], cut[peer][1] * item
                        )
            if not count:
                return
            if root is None:
                for peer in peers:
                    gather.send(peer, gather_slot, offset, count * item)
            elif root != me:
                targets[half].send(root, gather_slot, me * room, count * item)

        def finish(chunk: int) -> None:
            cut, gather = parts(chunk), gathers[chunk % 2]
            filled = sum(1 for peer in peers if cut[peer][1])
            sources[chunk % 3].wait_sends(filled)
            if root in (None, me):
                gather.wait_recvs(filled)
            if cut[me][1] and root is None:
                gather.wait_sends(len(peers))
            elif cut[me][1] and root != me:
                targets[chunk % halves].wait_sends(1)

        _pipeline(total, chunks, begin, advance, finish)
        for buffer in (*sources, *gathers, *targets):
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
        scratch = self._scratch(2 * room * size)
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
        _pipeline(-(-longest // step), Whole(), begin, advance, lambda _: None)
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
        # My parent lacks my lowest bit; my children add one below it.
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

        _pipeline(total, chunks, begin, advance, finish)
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

    def _scratch(self, nbytes: int) -> int:
        """The address of `nbytes` of this process's own memory, kept warm."""
        if nbytes > self._scratch_bytes:
            size = max(1 << 16, 1 << (nbytes - 1).bit_length())
            self._scratch_pin = None
            if self._scratch_map is not None:
                self._scratch_map.close()
            self._scratch_map = mmap.mmap(-1, size)
            pin = ctypes.c_char.from_buffer(self._scratch_map)
            self._scratch_pin = pin
            self._scratch_address = ctypes.addressof(pin)
            self._scratch_bytes = size
        return self._scratch_address


class Whole:
    """The chunks of an op that passes through no slots."""

    def ready(self, chunk: int) -> bool:
        return True

    def need(self, chunk: int) -> None: ...

    def done(self, chunk: int) -> None: ...


def _pipeline(
    total: int,
    chunks: Chunks,
    begin: Callable[[int], None],
    advance: Callable[[int], None],
    finish: Callable[[int], None],
) -> None:
    """Run the three steps of each chunk; the next has begun while one advances.

    A chunk is waited for only after all but the last one before it are
    finished, so two slots are enough.
    """
    begun = 0
    for chunk in range(total):
        if begun == chunk:
            chunks.need(chunk)
            begin(chunk)
            begun += 1
        if begun < total and chunks.ready(begun):
            begin(begun)
            begun += 1
        advance(chunk)
        if chunk:
            finish(chunk - 1)
            chunks.done(chunk - 1)
    finish(total - 1)


def accumulate(
    reduction: Reduction, result: int, parts: Sequence[int], count: int, spare: int
) -> None:
    """Reduce `parts` in the order of the ranks: the same bits on every rank.

    `result` may be one of `parts`: it is written last. `spare` is none of them.
    """
    *heads, last = parts
    so_far = heads[0]
    for part in heads[1:]:
        reduction(spare, so_far, part, count)
        so_far = spare
    reduction(result, so_far, last, count)


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
