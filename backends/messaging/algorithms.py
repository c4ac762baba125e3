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

from collections.abc import Callable, Iterator, Sequence
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
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_at_once",
    "scatter",
    "split_into_segments",
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


def split_into_segments(size: int, itemsize: int) -> list[slice]:
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
    for segment in split_into_segments(data.size, data.itemsize):
        piece = data[segment]
        if parent is not None:
            yield [(RECV, parent, piece)]
        if children:
            yield [(SEND, child, piece) for child in children]


def broadcast_parts(rank: int, size: int, data: Flat, root: int) -> Schedule:
    """Scatter from `root`, then all-gather: van de Geijn's, for large arrays.

    No rank sends the whole array more than twice.
    """
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
    segments = split_into_segments(data.size, data.itemsize)
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
    segments = split_into_segments(longest, output.itemsize)
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
    """`reduce_scatter` in one stage for each `_PEERS` ranks, for small parts.

    It reduces in the same order, but needs memory for the parts of all these ranks.
    """
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
