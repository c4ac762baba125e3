"""Level *exact*, continued: what Rankscope builds on the ops of a CPU backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import rankscope.backends as dist

from ..groups.process_group import ProcessGroup
from . import reference
from .expect import raises, same
from .trial import Rule, Trial, Unclaimed


class Thing:
    """An object with a large buffer, which is pickled out of band."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.data = np.full(100_000 + rank, rank)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and np.array_equal(self.data, other.data)

    def __hash__(self) -> int:
        return self.rank


def objects(group: ProcessGroup) -> None:
    """Each object collective, with objects of different sizes on the ranks."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine: dict[str, Any] = {"rank": rank, "text": "ä" * rank, "thing": Thing(rank)}

    def of(r: int) -> dict[str, Any]:
        return {"rank": r, "text": "ä" * r, "thing": Thing(r)}

    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, mine, group=group)
    assert gathered == [of(r) for r in range(size)]

    for root in range(size):
        some: list[Any] = [of(root), None, root] if rank == root else [0, 0, 0]
        dist.broadcast_object_list(some, src=root, group=group)
        assert some == [of(root), None, root]

        rows: list[Any] | None = [None] * size if rank == root else None
        dist.gather_object(mine, rows, dst=root, group=group)
        assert rows is None or rows == [of(r) for r in range(size)]

        out: list[Any] = [None]
        source = [of(r) for r in range(size)] if rank == root else None
        dist.scatter_object_list(out, source, src=root, group=group)
        assert out == [of(rank)]

    if size > 1 and rank == 0:
        dist.send_object_list([mine, 5], dst=1, group=group)
    elif rank == 1:
        received: list[Any] = [None, None]
        assert dist.recv_object_list(received, src=0, group=group) == 0
        assert received == [of(0), 5]


def sparse(group: ProcessGroup) -> None:
    """all_reduce of coo and csr arrays and matrices, and what it refuses."""
    try:
        import scipy.sparse as sp
    except ImportError:
        raise Unclaimed("scipy is not installed") from None
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def of(r: int) -> Any:
        generator = np.random.default_rng(r)
        dense = generator.integers(0, 3, (7, 5)) * (generator.random((7, 5)) < 0.4)
        return dense.astype(np.float64)

    wanted = np.sum([of(r) for r in range(size)], axis=0)
    for kind in (sp.coo_array, sp.csr_array, sp.coo_matrix, sp.csr_matrix):
        x = kind(of(rank))
        assert dist.all_reduce(x, group=group) is None
        same(x.toarray(), wanted)
    empty = sp.csr_array((7, 5))
    dist.all_reduce(empty, group=group)
    assert empty.nnz == 0
    with raises(ValueError, match="can be summed only"):
        dist.all_reduce(sp.csr_array(of(rank)), dist.ReduceOp.MAX, group=group)
    with raises(TypeError, match="expected 'coo' or 'csr'"):
        dist.all_reduce(sp.dok_array(of(rank)), group=group)

    # In any order of completion, with other ops in between.
    many = [sp.csr_array(of(rank) * n) for n in range(1, 4)]
    dense = np.ones(3)
    works = [dist.all_reduce(x, async_op=True, group=group) for x in many]
    last = dist.all_reduce(dense, async_op=True, group=group)
    for work in (last, *reversed(works)):
        assert work is not None
        assert work.wait()
    same(dense, size)
    for n, x in enumerate(many, 1):
        same(x.toarray(), wanted * n)


def coalesced(group: ProcessGroup) -> None:
    """Each op that can be fused, in a coalescing block and by its function."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for async_ops in (False, True):
        arrays = [np.full(n, float(rank + n)) for n in range(1, 65)]
        with dist.coalescing_manager(group, async_ops=async_ops) as manager:
            for array in arrays:
                dist.all_reduce(array, group=group)
        manager.wait()
        for n, array in enumerate(arrays, 1):
            same(array, sum(r + n for r in range(size)))

    held = [reference.data(r, 50, "int32") for r in range(size)]
    outputs = [np.zeros(50 * size, np.int32), np.zeros(20 * size, np.int32)]
    inputs = [held[rank], held[rank][:20].copy()]
    dist.all_gather_into_tensor_coalesced(outputs, inputs, group=group)
    same(outputs[0], np.concatenate(held))
    same(outputs[1], np.concatenate([h[:20] for h in held]))

    # Sizes that differ from op to op and from rank to rank, one of them too large to be
    # copied, in two dtypes.
    def given(r: int) -> list[Any]:
        lengths = 3 + r, 1, 0 if r else 4, (1 << 17) + r
        floats = [np.full(n, r + n, np.float64) for n in lengths]
        return [*floats, np.arange(r + 2), np.arange(5) * r]

    gathered = [[np.zeros_like(one) for one in given(r)] for r in range(size)]
    dist.all_gather_coalesced(gathered, given(rank), group=group)
    for r, row in enumerate(gathered):
        for got, sent in zip(row, given(r), strict=True):
            same(got, sent)

    wide = [reference.data(r, 6 * size, "float64") for r in range(size)]
    narrow = [np.zeros(6), np.zeros(6)]
    dist.reduce_scatter_tensor_coalesced(
        narrow, [wide[rank], wide[rank] * 2], group=group
    )
    mine = np.sum(wide, axis=0)[rank * 6 : rank * 6 + 6]
    same(narrow[0], mine)
    same(narrow[1], mine * 2)


def batches(group: ProcessGroup) -> None:
    """Batches to and from both neighbours, in another order on every second rank."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return
    up, down = (rank + 1) % size, (rank - 1) % size
    for length in (1, 10, 300_000):
        sent = np.full(length, rank)
        got = [np.zeros(length, sent.dtype) for _ in range(2)]
        ops = [
            dist.P2POp(dist.irecv, got[0], down, group, 1),
            dist.P2POp(dist.isend, sent, up, group, 1),
            dist.P2POp(dist.isend, sent, down, group, 2),
            dist.P2POp(dist.irecv, got[1], up, group, 2),
        ]
        if rank % 2:  # the order within a batch does not matter
            ops.reverse()
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert np.all(got[0] == down)
        assert np.all(got[1] == up)


def _holds(body: Callable[[ProcessGroup], None], trial: Trial) -> None:
    if trial.device != "cpu":
        raise Unclaimed("tried with arrays in host memory only")
    try:
        body(trial.group)
    except NotImplementedError as error:
        # A rank that left now would be the error of the others.
        trial.meet("refused")
        raise Unclaimed(str(error)) from None
    trial.held()


_PROMISES: dict[Callable[..., None], tuple[str, str]] = {
    objects: ("objects", "object collectives carry any picklable object"),
    sparse: ("sparse", "all_reduce of sparse arrays is exact"),
    coalesced: ("coalesced", "coalesced ops give what the single ops give"),
    batches: ("batches", "sends and receives of a batch match in any order"),
}

RULES = [
    Rule("exact", name, promise, partial(_holds, body), made_of_ops=True)
    for body, (name, promise) in _PROMISES.items()
]
