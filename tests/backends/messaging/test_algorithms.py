"""The schedules of sends and receives, run in one process on a model network."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.backends.messaging import algorithms as schedules
from rankscope.backends.messaging import choice
from rankscope.backends.messaging.algorithms import RECV, SEND, Schedule
from rankscope.backends.messaging.backend import MessagingBackend

Array = npt.NDArray[Any]

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 17]


class Unconnected:
    """The connector of a backend that sends nothing."""

    def connect(self) -> None: ...
    def cancel(self) -> None: ...


def backend_of(size: int) -> MessagingBackend:
    return MessagingBackend(0, size, Unconnected())


class Network:
    """Delivers messages between schedules, in random order but for each pair FIFO.

    With `eager`, a send is done when it was posted; else when it was received,
    as with large messages.
    """

    def __init__(self, seed: int, eager: bool) -> None:
        self.random = random.Random(seed)
        self.eager = eager
        self.wires: dict[tuple[int, int], collections.deque[Array]] = (
            collections.defaultdict(collections.deque)
        )

    def run(self, make: Callable[[int], Schedule], size: int) -> None:
        waiting: dict[int, list[tuple[bool, int, Array]]] = {}
        running = {}
        for rank in range(size):
            running[rank] = make(rank)
            waiting[rank] = []
        while running:
            ranks = list(running)
            self.random.shuffle(ranks)
            if not any([self.turn(rank, running, waiting) for rank in ranks]):
                raise AssertionError(f"deadlock: {waiting}")
        assert not any(self.wires.values()), "somebody sent what nobody received"

    def turn(
        self,
        rank: int,
        running: dict[int, Schedule],
        waiting: dict[int, list[tuple[bool, int, Array]]],
    ) -> bool:
        pending: list[tuple[bool, int, Array]] = []
        moved = False
        for kind, peer, data in waiting[rank]:
            if kind is SEND:
                # Present on the wire until received.
                if any(data is sent for sent in self.wires[rank, peer]):
                    pending.append((kind, peer, data))
                    continue
            elif self.wires[peer, rank] and not any(
                # Receives from one rank are matched in order.
                other is RECV and source == peer
                for other, source, _ in pending
            ):
                sent = self.wires[peer, rank].popleft()
                assert sent.nbytes == data.nbytes
                data[...] = sent
            else:
                pending.append((kind, peer, data))
                continue
            moved = True
        waiting[rank] = pending
        if pending:
            return moved
        try:
            stage = next(running[rank])
        except StopIteration:
            del running[rank]
            return True
        stage = [transfer for transfer in stage if transfer[2].size]
        for kind, peer, data in stage:
            assert peer != rank
            if kind is SEND:
                self.wires[rank, peer].append(data.copy() if self.eager else data)
        waiting[rank] = [t for t in stage if t[0] is RECV or not self.eager]
        return True


def held(rank: int, count: int, salt: int = 0) -> Array:
    return np.random.default_rng([rank, count, salt]).integers(-9, 9, count)


@pytest.fixture(params=[False, True], ids=["rendezvous", "eager"])
def network(request: pytest.FixtureRequest) -> Network:
    return Network(1, request.param)


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "_SEGMENT", 80)
    monkeypatch.setattr(schedules, "_PEERS", 3)


ALL_REDUCES = [
    schedules.doubling,
    schedules.halving,
    schedules.ring,
]


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("count", [1, 5, 25, 26, 101])
def test_all_reduce(
    network: Network, algorithm: Callable[..., Schedule], size: int, count: int
) -> None:
    data = [held(rank, count) for rank in range(size)]
    wanted = sum(data)
    network.run(lambda r: algorithm(r, size, data[r], np.add, np.empty), size)
    for array in data:
        np.testing.assert_array_equal(array, wanted)


@pytest.mark.parametrize(
    "table", [choice.ALL_REDUCE, choice.BROADCAST, choice.REDUCE_SCATTER]
)
@pytest.mark.parametrize("size", range(1, 40))
def test_every_size_has_an_algorithm(table: Sequence[choice.Row], size: int) -> None:
    """The rows of a group ascend, and the last one takes arrays of any size."""
    rows = choice.fitting(table, size)
    limits = [limit for limit, _ in rows]
    assert limits == sorted(limits)
    assert limits[-1] > 1 << 60
    backend = backend_of(size)
    for limit, algorithm in rows[:-1]:
        assert backend._choose(rows, np.empty(limit, "u1")) is algorithm
        assert backend._choose(rows, np.empty(limit + 1, "u1")) is not algorithm


@pytest.mark.parametrize("size", range(3, 40))
def test_halving_is_for_powers_of_two(size: int) -> None:
    algorithms = [algorithm for _, algorithm in choice.fitting(choice.ALL_REDUCE, size)]
    assert (schedules.halving in algorithms) == (size in (4, 8, 16, 32))


def test_an_array_of_fewer_elements_than_ranks_is_not_cut() -> None:
    huge = np.empty(3, np.dtype((np.void, 1 << 20)))
    for size, algorithm in ((9, schedules.doubling), (3, schedules.ring)):
        backend = backend_of(size)
        assert backend._choose(backend._all_reduces, huge) is algorithm


def _rooted_at(
    algorithm: Callable[..., Schedule],
    size: int,
    data: Sequence[Array],
    root: int,
    rank: int,
) -> Schedule:
    return algorithm(rank, size, data[rank], root)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 10, 33])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_rooted(network: Network, size: int, count: int, place: str) -> None:
    root = {"first": 0, "middle": size // 2, "last": size - 1}[place]
    data = [held(rank, count) for rank in range(size)]
    before = [array.copy() for array in data]
    network.run(
        lambda r: schedules.reduce(r, size, data[r], root, np.add, np.empty), size
    )
    np.testing.assert_array_equal(data[root], sum(before))
    for rank in set(range(size)) - {root}:
        np.testing.assert_array_equal(data[rank], before[rank])

    for algorithm in (schedules.broadcast, schedules.broadcast_parts):
        for rank in set(range(size)) - {root}:
            data[rank][...] = -1
        network.run(partial(_rooted_at, algorithm, size, data, root), size)
        for array in data:
            np.testing.assert_array_equal(array, sum(before))

    parts = [held(root, count + rank, rank) for rank in range(size)]
    outputs = [np.zeros_like(part) for part in parts]

    def scatter(r: int) -> Schedule:
        return schedules.scatter(
            r, size, outputs[r], parts if r == root else None, root
        )

    network.run(scatter, size)
    gathered = [np.zeros_like(part) for part in parts]

    def gather(r: int) -> Schedule:
        return schedules.gather(
            r, size, gathered if r == root else None, outputs[r], root
        )

    network.run(gather, size)
    for part, output, array in zip(parts, outputs, gathered, strict=True):
        np.testing.assert_array_equal(output, part)
        np.testing.assert_array_equal(array, part)


@pytest.mark.parametrize("size", SIZES)
def test_unrooted_with_uneven_parts(network: Network, size: int) -> None:
    lengths = [(7 * rank) % 5 * 9 for rank in range(size)]
    if not any(lengths):
        lengths[0] = 3

    outputs = [[np.zeros(n, int) for n in lengths] for _ in range(size)]
    data = [held(rank, n) for rank, n in enumerate(lengths)]
    network.run(lambda r: schedules.all_gather(r, size, outputs[r], data[r]), size)
    for rows in outputs:
        for row, wanted in zip(rows, data, strict=True):
            np.testing.assert_array_equal(row, wanted)

    inputs = [[held(r, n, q) for q, n in enumerate(lengths)] for r in range(size)]
    received = [[np.zeros(lengths[q], int) for _ in range(size)] for q in range(size)]
    network.run(lambda r: schedules.all_to_all(r, size, received[r], inputs[r]), size)
    for q in range(size):
        for r in range(size):
            np.testing.assert_array_equal(received[q][r], inputs[r][q])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("longest", [9, 36])
def test_both_reduce_scatters_give_the_same_bits(
    network: Network, size: int, longest: int
) -> None:
    lengths = [(7 * rank) % 5 * longest // 4 for rank in range(size)]
    lengths[0] = 3
    inputs = [[held(r, n, q) / 7 for q, n in enumerate(lengths)] for r in range(size)]
    results = []
    for algorithm in (schedules.reduce_scatter, schedules.reduce_scatter_at_once):
        outputs = [np.zeros(n) for n in lengths]
        network.run(partial(_reduce_scatter, algorithm, size, outputs, inputs), size)
        for rank, output in enumerate(outputs):
            wanted = sum(rows[rank] for rows in inputs)
            np.testing.assert_allclose(output, wanted, atol=1e-12)
        results.append([output.tobytes() for output in outputs])
    assert results[0] == results[1]


def _reduce_scatter(
    algorithm: Callable[..., Schedule],
    size: int,
    outputs: Sequence[Array],
    inputs: Sequence[Sequence[Array]],
    rank: int,
) -> Schedule:
    return algorithm(rank, size, outputs[rank], inputs[rank], np.add, np.empty)


@pytest.mark.parametrize("size", SIZES)
def test_barrier_waits_for_everybody(size: int) -> None:
    """Nobody leaves before the last one has entered."""
    for late in {0, size // 2, size - 1} if size > 1 else set():
        network = Network(late, eager=True)
        running = {r: schedules.barrier(r, size) for r in range(size) if r != late}
        waiting: dict[int, list[tuple[bool, int, Array]]] = {r: [] for r in running}
        while any([network.turn(rank, running, waiting) for rank in list(running)]):
            assert len(running) == size - 1
        running[late], waiting[late] = schedules.barrier(late, size), []
        while any([network.turn(rank, running, waiting) for rank in list(running)]):
            pass
        assert not running


@settings(max_examples=200, deadline=None)
@given(
    algorithm=st.sampled_from(ALL_REDUCES),
    size=st.integers(2, 9),
    count=st.integers(1, 70),
    seed=st.integers(0, 1 << 30),
    eager=st.booleans(),
)
def test_all_reduce_gives_the_same_bits_everywhere(
    algorithm: Callable[..., Schedule], size: int, count: int, seed: int, eager: bool
) -> None:
    generator = np.random.default_rng(seed)
    held = [generator.standard_normal(count).astype("f4") for _ in range(size)]
    wanted = np.sum(np.array(held, "f8"), axis=0)
    data = [array.copy() for array in held]
    Network(seed, eager).run(
        lambda r: algorithm(r, size, data[r], np.add, np.empty), size
    )
    np.testing.assert_allclose(data[0], wanted, rtol=1e-4, atol=1e-5)
    for array in data[1:]:
        assert array.tobytes() == data[0].tobytes()
    # Nor do they depend on when the messages come.
    again = [array.copy() for array in held]
    Network(seed + 1, not eager).run(
        lambda r: algorithm(r, size, again[r], np.add, np.empty), size
    )
    assert again[0].tobytes() == data[0].tobytes()
