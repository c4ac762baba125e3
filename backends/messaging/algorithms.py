"""Collectives as schedules of sends and receives, apart from any library.

A schedule is a generator. It yields stages: lists of transfers that may all
run at once. It is resumed when a stage is done, reduces what was received, and
ends when this rank is done with the collective. The runner (`MessageQueue`) posts
the transfers and never blocks, so that a schedule can be abandoned at any point:
a receive that was not matched is cancelled, and nothing more is written to the
caller's arrays. (A collective of MPI's own cannot be cancelled: it would go on
writing to them.)

Arrays are flat numpy arrays. Which of several algorithms runs (`choice`) depends only
on what all ranks agree on: the world size, and the size of arrays that all ranks have.
Between two ranks messages arrive in the order in which they were sent. A rank
sends nothing to itself, and the runner leaves out transfers of empty arrays: a
rank with empty arrays alone may take no part.

The algorithms are the classical ones (Thakur, Rabenseifner and Gropp,
"Optimization of Collective Communication Operations in MPICH", 2005).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

__all__ = [
    "RECV",
    "SEND",
    "Schedule",
    "Transfer",
    "Ufunc",
    "all_gather",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_parts",
    "doubling",
    "gather",
    "halving",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_at_once",
    "ring",
    "scatter",
]

Flat = npt.NDArray[Any]
#: Reduces elementwise: ``ufunc(first, second, out=array)``, as numpy's do.
Ufunc = Callable[..., Any]
#: Returns an uninitialised flat array of a size and dtype, good for one op.
Scratch = Callable[[int, Any], Flat]

SEND: Literal[True] = True
RECV: Literal[False] = False

#: Send or receive, the other rank, the flat array.
Transfer = tuple[bool, int, Flat]
Schedule = Iterator[list[Transfer]]

# Bytes of a segment, in which a rank passes on what it receives: the next rank
# starts while this one is receiving, a segment is still in the cache when it is
# reduced, and little memory is needed. Shorter ones gain nothing within a host, where a
# core copies each message: the next one does not arrive while this one is reduced. With
# 256 KiB an all_reduce of 16 MiB took 1.2 times as long over UCX on two ranks.
_SEGMENT = 1 << 20

# The number of peers with which a rank communicates at once.
_PEERS = 8


def _segments(size: int, itemsize: int) -> list[slice]:
    """Return the slices of an array of `size` elements that go as one message each."""
    step = max(1, _SEGMENT // itemsize)
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def barrier(rank: int, size: int) -> Schedule:
    """Dissemination: a message of step k says that 2**k ranks have entered."""
    sent, received = np.zeros(1, np.uint8), np.empty(1, np.uint8)
    distance = 1
    while distance < size:
        yield [
            (RECV, (rank - distance) % size, received),
            (SEND, (rank + distance) % size, sent),
        ]
        distance *= 2


def broadcast(rank: int, size: int, data: Flat, root: int) -> Schedule:
    """Down a binomial tree, segment by segment."""
    parent, children = _tree(rank, size, root)
    for segment in _segments(data.size, data.itemsize):
        piece = data[segment]
        if parent is not None:
            yield [(RECV, parent, piece)]
        if children:
            yield [(SEND, child, piece) for child in children]


def broadcast_parts(rank: int, size: int, data: Flat, root: int) -> Schedule:
    """Scatter from `root`, then all-gather: van de Geijn's, for large arrays."""
    edges = [part * data.size // size for part in range(size + 1)]
    parts = [data[edges[place] : edges[place + 1]] for place in range(size)]
    if rank == root:
        for batch in _rounds(rank, size):
            yield [(SEND, target, parts[target]) for target, _ in batch]
    else:
        yield [(RECV, root, parts[rank])]
    for batch in _rounds(rank, size):
        yield [
            *((RECV, source, parts[source]) for _, source in batch if rank != root),
            *((SEND, target, parts[rank]) for target, _ in batch if target != root),
        ]


def reduce(
    rank: int, size: int, data: Flat, root: int, ufunc: Ufunc, scratch: Scratch
) -> Schedule:
    """Up a binomial tree into `data` of `root`; elsewhere `data` is only read."""
    parent, children = _tree(rank, size, root)
    segments = _segments(data.size, data.itemsize)
    longest = segments[0].stop
    own = parent is None or not children
    space = scratch(longest if own else 2 * longest, data.dtype)
    for segment in segments:
        total = data[segment]
        length = total.size
        # The nearest children, whose subtrees are the smallest, are done first.
        for place, child in enumerate(reversed(children)):
            received = space[:length]
            yield [(RECV, child, received)]
            if parent is None:
                ufunc(total, received, out=total)
            else:
                kept = space[longest : longest + length]
                ufunc(total if place == 0 else kept, received, out=kept)
                total = kept
        if parent is not None:
            yield [(SEND, parent, total)]


def _tree(rank: int, size: int, root: int) -> tuple[int | None, list[int]]:
    """Return parent and children in the binomial tree, largest subtree first."""
    place = (rank - root) % size
    reach = 1
    while reach < size and not place & reach:
        reach *= 2
    parent = None if place == 0 else (place - reach + root) % size
    children = []
    while reach > 1:
        reach //= 2
        if place + reach < size:
            children.append((place + reach + root) % size)
    return parent, children


def _rounds(rank: int, size: int) -> Iterator[list[tuple[int, int]]]:
    """Yield batches of (rank to send to, rank to receive from), all others in turn."""
    for first in range(1, size, _PEERS):
        steps = range(first, min(first + _PEERS, size))
        yield [((rank + step) % size, (rank - step) % size) for step in steps]


def all_gather(rank: int, size: int, outputs: Sequence[Flat], data: Flat) -> Schedule:
    """Every rank to every other; sizes may differ by rank."""
    outputs[rank][...] = data
    for batch in _rounds(rank, size):
        yield [
            *((RECV, source, outputs[source]) for _, source in batch),
            *((SEND, target, data) for target, _ in batch),
        ]


def all_to_all(
    rank: int, size: int, outputs: Sequence[Flat], inputs: Sequence[Flat]
) -> Schedule:
    """A part from every rank to every other; each part may have its own size."""
    outputs[rank][...] = inputs[rank]
    for batch in _rounds(rank, size):
        yield [
            *((RECV, source, outputs[source]) for _, source in batch),
            *((SEND, target, inputs[target]) for target, _ in batch),
        ]


def gather(
    rank: int, size: int, outputs: Sequence[Flat] | None, data: Flat, root: int
) -> Schedule:
    """Every rank to `root`; sizes may differ by rank."""
    if outputs is None:
        yield [(SEND, root, data)]
        return
    outputs[rank][...] = data
    for batch in _rounds(rank, size):
        yield [(RECV, source, outputs[source]) for _, source in batch]


def scatter(
    rank: int, size: int, output: Flat, inputs: Sequence[Flat] | None, root: int
) -> Schedule:
    """A part from `root` to every rank; sizes may differ by rank."""
    if inputs is None:
        yield [(RECV, root, output)]
        return
    output[...] = inputs[rank]
    for batch in _rounds(rank, size):
        yield [(SEND, target, inputs[target]) for target, _ in batch]


def reduce_scatter(
    rank: int,
    size: int,
    output: Flat,
    inputs: Sequence[Flat],
    ufunc: Ufunc,
    scratch: Scratch,
) -> Schedule:
    """Every rank receives its part of every input and reduces it on arrival.

    Each byte travels once, and parts may differ in size. Parts are reduced
    in order of rank distance, so that only `output` is written.
    """
    output[...] = inputs[rank]
    # The parts of the two peers of a step may be longer or shorter.
    longest = max(part.size for part in inputs)
    segments = _segments(longest, output.itemsize)
    other = scratch(min(output.size, segments[0].stop), output.dtype)
    for step in range(1, size):
        target, source = (rank + step) % size, (rank - step) % size
        for segment in segments:
            mine = output[segment]
            received = other[: mine.size]
            yield [(RECV, source, received), (SEND, target, inputs[target][segment])]
            ufunc(mine, received, out=mine)


def reduce_scatter_at_once(
    rank: int,
    size: int,
    output: Flat,
    inputs: Sequence[Flat],
    ufunc: Ufunc,
    scratch: Scratch,
) -> Schedule:
    """`reduce_scatter` in one stage for each `_PEERS` ranks, for small parts."""
    output[...] = inputs[rank]
    length = output.size
    block = scratch(length * min(size - 1, _PEERS), output.dtype)
    for batch in _rounds(rank, size):
        parts = [block[k * length : (k + 1) * length] for k in range(len(batch))]
        yield [
            *((SEND, target, inputs[target]) for target, _ in batch),
            *((RECV, batch[k][1], part) for k, part in enumerate(parts)),
        ]
        for part in parts:
            ufunc(output, part, out=output)


# The all_reduces. A rank first offers what it sends: a receive that finds its message
# there may copy it at once, and the other rank would wait meanwhile.
#
# Every one of them gives the same bits on all ranks, and in every run: an element is
# reduced once and sent to the others, or by all in the same order of ranks.


def doubling(
    rank: int, size: int, data: Flat, ufunc: Ufunc, scratch: Scratch
) -> Schedule:
    """Recursive doubling: the whole array in each of log2 p steps."""
    other = scratch(data.size, data.dtype)
    power = 1 << (size.bit_length() - 1)
    extra = size - power
    position = rank - extra
    if rank < 2 * extra:
        position = yield from _fold(rank, data, ufunc, other)
        if position < 0:
            return
    distance = 1
    while distance < power:
        peer = _unfolded(position ^ distance, extra)
        yield [(SEND, peer, data), (RECV, peer, other)]
        # Both sides put the lower rank's part first: equal bits on both.
        first, second = (data, other) if rank < peer else (other, data)
        if data.size == 1:
            # In place numpy takes twice as long for one element as for two.
            data[0] = ufunc(first, second)[0]
        else:
            ufunc(first, second, out=data)
        distance *= 2
    if rank < 2 * extra:
        yield [(SEND, rank + 1, data)]


def halving(
    rank: int, size: int, data: Flat, ufunc: Ufunc, scratch: Scratch
) -> Schedule:
    """Rabenseifner: reduce-scatter by recursive halving, all-gather by doubling.

    Each byte is sent twice, as round a ring, in 2 log2 p steps.
    """
    power = 1 << (size.bit_length() - 1)
    extra = size - power
    position = rank - extra
    if rank < 2 * extra:
        position = yield from _fold(rank, data, ufunc, scratch(data.size, data.dtype))
        if position < 0:
            return
    edges = [part * data.size // power for part in range(power + 1)]
    longest = edges[power] - edges[power // 2]
    segment = _segments(longest, data.itemsize)
    other = scratch(min(longest, segment[0].stop), data.dtype)
    # The parts that this rank reduces: half as many after each step.
    first, distance = 0, power // 2
    while distance:
        peer = _unfolded(position ^ distance, extra)
        middle, last = first + distance, first + 2 * distance
        lower = data[edges[first] : edges[middle]]
        upper = data[edges[middle] : edges[last]]
        kept, given = (upper, lower) if position & distance else (lower, upper)
        for piece in segment:
            mine = kept[piece]
            received = other[: mine.size]
            yield [(SEND, peer, given[piece]), (RECV, peer, received)]
            if rank < peer:
                ufunc(mine, received, out=mine)
            else:
                ufunc(received, mine, out=mine)
        if position & distance:
            first = middle
        distance //= 2
    distance = 1
    while distance < power:
        peer = _unfolded(position ^ distance, extra)
        theirs = first ^ distance
        yield [
            (SEND, peer, data[edges[first] : edges[first + distance]]),
            (RECV, peer, data[edges[theirs] : edges[theirs + distance]]),
        ]
        first = min(first, theirs)
        distance *= 2
    if rank < 2 * extra:
        yield [(SEND, rank + 1, data)]


def ring(rank: int, size: int, data: Flat, ufunc: Ufunc, scratch: Scratch) -> Schedule:
    """Reduce-scatter round the ring, then all-gather round it: 2 (p - 1) steps."""
    edges = [part * data.size // size for part in range(size + 1)]
    parts = [data[edges[p] : edges[p + 1]] for p in range(size)]
    up, down = (rank + 1) % size, (rank - 1) % size
    # Parts differ by one element at most, so all ranks see as many segments.
    longest = max(part.size for part in parts)
    segments = _segments(longest, data.itemsize)
    other = scratch(segments[0].stop, data.dtype)
    for step in range(size - 1):
        outgoing, incoming = (
            parts[(rank - step) % size],
            parts[(rank - step - 1) % size],
        )
        for segment in segments:
            mine = incoming[segment]
            received = other[: mine.size]
            yield [(SEND, up, outgoing[segment]), (RECV, down, received)]
            ufunc(mine, received, out=mine)
    for step in range(size - 1):
        outgoing, incoming = (
            parts[(rank + 1 - step) % size],
            parts[(rank - step) % size],
        )
        yield [(SEND, up, outgoing), (RECV, down, incoming)]


def _fold(
    rank: int, data: Flat, ufunc: Ufunc, other: Flat
) -> Generator[list[Transfer], None, int]:
    """Leave a power of two of the ranks: reduce rank 2k + 1 into rank 2k.

    Returns the place among those that are left. A rank that is not gets the result
    here, and -1.
    """
    if rank % 2:
        yield [(SEND, rank - 1, data)]
        yield [(RECV, rank - 1, data)]
        return -1
    yield [(RECV, rank + 1, other)]
    ufunc(data, other, out=data)
    return rank // 2


def _unfolded(position: int, extra: int) -> int:
    """Return the rank at a place among those that `_fold` leaves."""
    return 2 * position if position < extra else position + extra
