"""The all_reduces, as schedules; `choice` decides which one runs."""

from __future__ import annotations

from collections.abc import Generator

from .algorithms import (
    RECV,
    SEND,
    Flat,
    Schedule,
    Scratch,
    Transfer,
    Ufunc,
    split_into_segments,
)

__all__ = ["alone", "doubling", "halving", "ring"]

# A rank first offers what it sends: a receive that finds its message there may copy it
# at once, and the other rank would wait meanwhile.
#
# Every one of them gives the same bits on all ranks, and in every run: an element is
# reduced once and sent to the others, or by all in the same order of ranks.


def alone(rank: int, size: int, data: Flat, ufunc: Ufunc, scratch: Scratch) -> Schedule:
    """Send nothing: the array of a single rank is its sum."""
    return iter(())


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
        partner = position ^ distance
        peer = 2 * partner if partner < extra else partner + extra
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
    segment = split_into_segments(longest, data.itemsize)
    other = scratch(min(longest, segment[0].stop), data.dtype)
    # The parts that this rank reduces: half as many after each step.
    first, distance = 0, power // 2
    while distance:
        partner = position ^ distance
        peer = 2 * partner if partner < extra else partner + extra
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
        partner = position ^ distance
        peer = 2 * partner if partner < extra else partner + extra
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
    segments = split_into_segments(longest, data.itemsize)
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
