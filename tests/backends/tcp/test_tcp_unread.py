"""Ranks over socket pairs in one process: a message that nobody reads is told.

Where all ranks call alike nothing is told, however far apart they are.
"""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.waiting import until
from rankscope.backends.tcp.backend import TCPBackend
from rankscope.backends.tcp.transport import TCPTransport

Call = Callable[[TCPBackend], dist.Work]


class Joined:
    """The connector of a rank whose sockets are there."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self.transport = TCPTransport(sockets, {})

    def connect(self) -> TCPTransport:
        return self.transport

    def cancel(self) -> None: ...


class Group:
    """Backends of all ranks, and what each has told its group."""

    def __init__(self, size: int) -> None:
        sockets: list[dict[int, socket.socket]] = [{} for _ in range(size)]
        for one, other in combinations(range(size), 2):
            sockets[one][other], sockets[other][one] = socket.socketpair()
        self.told: list[list[Any]] = [[] for _ in range(size)]
        self.ranks, self.transports = list[TCPBackend](), list[TCPTransport]()
        for rank, own in enumerate(sockets):
            for sock in own.values():
                sock.setblocking(False)
            store: Any = None
            backend = TCPBackend(store, rank, size)
            joined = Joined(own)
            backend._connector = joined
            backend.global_ranks = range(size)
            backend.on_failure = self.told[rank].append
            backend.prepare()
            until(backend._queue.opened.is_set)
            self.ranks.append(backend)
            self.transports.append(joined.transport)

    def run(self, works: list[dist.Work]) -> None:
        """Have the ranks go on, one after the other, until all works are over."""

        def over() -> bool:
            for backend in self.ranks:
                backend.refresh()
            return all(work.is_completed() for work in works)

        until(over, 60, "the ops")


@pytest.fixture
def group_of() -> Iterator[Callable[[int], Group]]:
    made: list[Group] = []

    def make(size: int) -> Group:
        made.append(Group(size))
        return made[-1]

    yield make
    for group in made:
        for backend in group.ranks:
            backend.abort("the test is over")


def broadcast(root: int) -> Call:
    return lambda backend: backend.broadcast(np.ones(3), root)


def reduce(root: int) -> Call:
    return lambda backend: backend.reduce(np.ones(3), root, np.add)


def scatter(root: int) -> Call:
    return lambda backend: backend.scatter(
        np.ones(3), [np.ones(3)] * backend.size, root
    )


def parts(counts: list[list[int]]) -> Call:
    """Of an all_to_all: how many elements each rank sends to each."""
    return lambda backend: backend.all_to_all(
        [np.ones(row[backend.rank]) for row in counts],
        [np.ones(count) for count in counts[backend.rank]],
    )


def barrier(backend: TCPBackend) -> dist.Work:
    return backend.barrier()


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ([broadcast(0), broadcast(1)], "broadcast: root 0 on rank 0, 1 on rank 1"),
        ([scatter(0), scatter(1)], "scatter: root 0 on rank 0, 1 on rank 1"),
        ([reduce(1), reduce(0)], "reduce: root 1 on rank 0, 0 on rank 1"),
        ([broadcast(0), reduce(0)], "in different orders"),
        (
            [parts([[1, 2], [0, 1]]), parts([[1, 0], [2, 1]])],
            "all_to_all: rank . sent 16 bytes where 0 were expected",
        ),
    ],
    ids=["broadcast", "scatter", "reduce", "two ops", "all_to_all"],
)
def test_ranks_that_all_send_are_told_in_the_next_collective(
    group_of: Callable[[int], Group], calls: list[Call], why: str
) -> None:
    group = group_of(2)
    works = [call(backend) for call, backend in zip(calls, group.ranks, strict=True)]
    group.run(works)
    # Nobody has read anything.
    assert all(work.is_success() for work in works)
    works = [barrier(backend) for backend in group.ranks]
    group.run(works)
    for work, told in zip(works, group.told, strict=True):
        (reason,) = told
        assert re.match(f"the collective before: .*{why}", str(reason)), reason
        with pytest.raises(dist.DistBackendError, match="^barrier.* failed: the coll"):
            work.wait()


def test_a_message_that_came_before_its_collective_is_told_there(
    group_of: Callable[[int], Group],
) -> None:
    group = group_of(2)
    first, second = group.ranks
    sent = broadcast(0)(first)
    # The second rank reads the message while it waits for another one.
    received = second.recv(np.ones(1), 0, 5)
    group.run([sent, first.send(np.ones(1), 1, 5), received])
    assert not any(group.told)
    group.run([broadcast(1)(second)])
    assert [str(one) for one in group.told[1]] == [
        "broadcast: root 0 on rank 0, 1 on rank 1"
    ]


CALLS: list[Callable[[random.Random, int], Call]] = [
    lambda chance, size: broadcast(chance.randrange(size)),
    lambda chance, size: reduce(chance.randrange(size)),
    lambda chance, size: scatter(chance.randrange(size)),
    lambda chance, size: barrier,
    lambda chance, size: parts(
        [[chance.choice([0, 0, 1, 5000]) for _ in range(size)] for _ in range(size)]
    ),
    lambda chance, size: (
        lambda backend: backend.all_gather(
            [np.ones(2) for _ in range(size)], np.ones(2)
        )
    ),
    lambda chance, size: lambda backend: backend.all_reduce(np.ones(50), np.add),
]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("number", [0, (1 << 28) - 40], ids=["few", "begin anew"])
def test_nothing_is_told_where_all_call_alike(
    group_of: Callable[[int], Group], size: int, number: int
) -> None:
    chance = random.Random(size)
    calls = [chance.choice(CALLS)(chance, size) for _ in range(150)]
    group = group_of(size)
    for backend in group.ranks:
        assert backend._signer is not None
        backend._signer._number = number
    ahead, works = [0] * size, list[dist.Work]()
    while min(ahead) < len(calls):
        rank = chance.choice([one for one in range(size) if ahead[one] < len(calls)])
        for call in calls[ahead[rank] :][: chance.randrange(1, 20)]:
            works.append(call(group.ranks[rank]))
            ahead[rank] += 1
            group.ranks[chance.randrange(size)].refresh()
    group.run(works)
    assert all(work.is_success() for work in works)
    assert not any(group.told)
    assert not any(one._matching.signed for one in group.transports)


def test_a_rank_may_be_thousands_of_collectives_ahead(
    group_of: Callable[[int], Group],
) -> None:
    """More than half of the numbers that signatures of other transports have."""
    group, nothing = group_of(2), parts([[0, 0], [0, 0]])
    first, second = group.ranks
    calls = [*[nothing] * 3000, broadcast(0)]
    # While it waits for a message, it reads all others.
    received = second.recv(np.ones(1), 0, 5)
    group.run([call(first) for call in calls])
    works = [call(second) for call in calls]
    group.run([*works, first.send(np.ones(1), 1, 5), received])
    assert all(work.is_success() for work in works)
    assert not any(group.told)
