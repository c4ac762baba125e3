"""Programs as people write them for ``torch.distributed``, for four ranks.

Each raises where a rank does not hold what it must. Those of `ON_A_GROUP` take their
group and their arrays from the caller, so that they run on every device; those of
`ON_THE_WORLD` make groups of the default one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.device_mesh import init_device_mesh

__all__ = ["ON_A_GROUP", "ON_THE_WORLD", "Place"]

SIZE = 4


class Place:
    """Where a program runs: its group, and functions for arrays of its device."""

    def __init__(
        self,
        group: Any,
        array: Callable[..., Any] = np.array,
        host: Callable[[Any], Any] = np.asarray,
        store: dist.Store | None = None,
    ) -> None:
        self.group, self.array, self.host, self.store = group, array, host, store
        self.rank = dist.get_rank(group)

    def holds(self, array: Any, values: Any) -> None:
        """Raise unless `array` has these values."""
        np.testing.assert_array_equal(self.host(array), values)


# -- on one group ----------------------------------------------------------------


def ring(p: Place) -> None:
    """Pass a token around until every rank has seen all."""
    token, total = p.array([float(p.rank)]), p.rank
    for step in range(1, SIZE):
        came = p.array([-1.0])
        sends = dist.isend(token, (p.rank + 1) % SIZE, group=p.group)
        receives = dist.irecv(came, (p.rank - 1) % SIZE, group=p.group)
        sends.wait()
        receives.wait()
        p.holds(came, [(p.rank - step) % SIZE])
        token, total = came, total + int(p.host(came)[0])
    assert total == sum(range(SIZE))


def exchange_in_a_batch(p: Place) -> None:
    """Send to both neighbours and receive from both, in any order of the ops."""
    left, right = (p.rank - 1) % SIZE, (p.rank + 1) % SIZE
    mine = p.array([10 * p.rank, p.rank], np.int64)
    of_left, of_right = p.array([0, 0], np.int64), p.array([0, 0], np.int64)
    ops = [
        dist.P2POp(dist.isend, mine, right, p.group),
        dist.P2POp(dist.irecv, of_right, right, p.group),
        dist.P2POp(dist.isend, mine, left, p.group),
        dist.P2POp(dist.irecv, of_left, left, p.group),
    ]
    for work in dist.batch_isend_irecv(ops[:: 1 if p.rank % 2 else -1]):
        work.wait()
    p.holds(of_left, [10 * left, left])
    p.holds(of_right, [10 * right, right])


def uneven_rows(p: Place) -> None:
    """Send r rows to rank r, so that one rank gets none."""
    splits: Any = np.arange(SIZE)
    rows = int(splits.sum())
    source = p.array([[100.0 * p.rank + row] * 3 for row in range(rows)])
    target = p.array(np.zeros((SIZE * p.rank, 3)))
    dist.all_to_all_single(target, source, [p.rank] * SIZE, splits, p.group)
    first = int(splits[: p.rank].sum())
    p.holds(
        target,
        np.array(
            [
                [100.0 * rank + first + row] * 3
                for rank in range(SIZE)
                for row in range(p.rank)
            ]
        ).reshape(-1, 3),
    )


def uneven_lists(p: Place) -> None:
    """Exchange arrays of every size, and gather as many numbers as the rank says."""
    outputs = [p.array(np.zeros(p.rank + rank + 1)) for rank in range(SIZE)]
    inputs = [
        p.array(np.full(p.rank + rank + 1, float(p.rank))) for rank in range(SIZE)
    ]
    dist.all_to_all(outputs, inputs, p.group)
    for rank, output in enumerate(outputs):
        p.holds(output, np.full(p.rank + rank + 1, float(rank)))
    gathered = [p.array(np.zeros(rank + 1)) for rank in range(SIZE)]
    dist.all_gather(gathered, p.array(np.full(p.rank + 1, p.rank + 0.5)), p.group)
    for rank, part in enumerate(gathered):
        p.holds(part, np.full(rank + 1, rank + 0.5))


def average_of_gradients(p: Place) -> None:
    """Average as a training step does, by AVG and by a sum and a division."""
    gradients = [p.array(np.full(n, float(p.rank))) for n in (3, 1, 7)]
    works = [
        dist.all_reduce(one, dist.ReduceOp.AVG, group=p.group, async_op=True)
        for one in gradients
    ]
    for work in reversed(works):
        assert work is not None
        work.wait()
    for one in gradients:
        p.holds(one, np.full(one.shape, (SIZE - 1) / 2))


def coalesced_sums(p: Place) -> None:
    """Sum many arrays in one batch that is waited for at the end."""
    arrays = [p.array(np.full(n, p.rank + 1.0)) for n in (1, 5, 2)]
    with dist._coalescing_manager(group=p.group, async_ops=True) as manager:
        for one in arrays:
            dist.all_reduce(one, group=p.group)
    manager.wait()
    for one in arrays:
        p.holds(one, np.full(one.shape, 10.0))


def coalesced_shards(p: Place) -> None:
    """Gather parameters from shards and scatter sums of gradients to them."""
    wholes = [p.array(np.zeros(SIZE * n)) for n in (2, 3)]
    shards = [p.array(np.full(n, float(p.rank))) for n in (2, 3)]
    with dist._coalescing_manager(group=p.group):
        for whole, shard in zip(wholes, shards, strict=True):
            dist.all_gather_single(whole, shard, group=p.group)
    for whole, n in zip(wholes, (2, 3), strict=True):
        p.holds(whole, np.repeat(np.arange(SIZE), n))
    with dist._coalescing_manager(group=p.group):
        for shard, whole in zip(shards, wholes, strict=True):
            dist.reduce_scatter_single(shard, whole, group=p.group)
    for shard in shards:
        p.holds(shard, np.full(shard.shape, SIZE * float(p.rank)))


def coalesced_lists(p: Place) -> None:
    """Gather several arrays of each rank at once."""
    outputs = [[p.array([0.0, 0.0]), p.array([0.0])] for _ in range(SIZE)]
    inputs = [p.array([p.rank, -1.0]), p.array([10.0 * p.rank])]
    dist.all_gather_coalesced(outputs, inputs, p.group)
    for rank, (pair, single) in enumerate(outputs):
        p.holds(pair, [rank, -1.0])
        p.holds(single, [10.0 * rank])


def rows_of_a_product(p: Place) -> None:
    """Multiply a matrix: broadcast one factor, scatter rows of the other, gather."""
    root = np.int64(2)
    left, right = np.arange(16.0).reshape(4, 4), np.eye(4)[::-1].copy()
    factor = p.array(right if p.rank == root else np.zeros((4, 4)))
    dist.broadcast(factor, root, group=p.group)  # type: ignore[arg-type]
    row = p.array(np.zeros(4))
    rows = [p.array(one) for one in left] if p.rank == root else None
    dist.scatter(row, rows, 2, p.group)
    product = p.array(p.host(row) @ p.host(factor))
    parts = [p.array(np.zeros(4)) for _ in range(SIZE)] if p.rank == root else None
    dist.gather(product, parts, 2, p.group)
    for part, wanted in zip(parts or (), left @ right, strict=p.rank == root):
        p.holds(part, wanted)


def objects_of_everybody(p: Place) -> None:
    """Gather and spread settings that are no arrays."""
    everybody: list[Any] = [None] * SIZE
    dist.all_gather_object(everybody, {"rank": p.rank}, p.group)
    assert everybody == [{"rank": rank} for rank in range(SIZE)]
    settings: list[Any] = ["adam", {"lr": 0.1}] if p.rank == 1 else [None, None]
    dist.broadcast_object_list(settings, 1, p.group)
    assert settings == ["adam", {"lr": 0.1}]
    shards = [("shard", rank) for rank in range(SIZE)] if p.rank == 0 else None
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, shards, 0, p.group)
    assert mine == [("shard", p.rank)]
    found = [None] * SIZE if p.rank == 3 else None
    dist.gather_object("x" * p.rank, found, 3, p.group)
    assert found == (["", "x", "xx", "xxx"] if p.rank == 3 else None)


def objects_from_rank_to_rank(p: Place) -> None:
    """Send lists along the ranks, with torch's arguments by position."""
    if p.rank:
        came: list[Any] = [None, None]
        assert (
            dist.recv_object_list(came, p.rank - 1, p.group, None, None) == p.rank - 1
        )
        assert came == ["passed on", p.rank]
    if p.rank < SIZE - 1:
        dist.send_object_list(
            ["passed on", p.rank + 1], None, p.group, None, p.rank + 1, False
        )


def barriers(p: Place) -> None:
    """Meet, in every form of the call."""
    dist.barrier(p.group, timeout=timedelta(seconds=50))
    work = dist.barrier(group=p.group, async_op=True)
    assert work is not None
    assert work.wait(timedelta(seconds=50))


def pipeline(p: Place) -> None:
    """Pass five batches through the ranks; each adds one to them."""
    for batch in range(5):
        x = p.array([float(batch)] * 3)
        if p.rank:
            dist.recv(x, p.rank - 1, group=p.group)
        p.holds(x, [float(batch + p.rank)] * 3)
        x = p.array(p.host(x) + 1)
        if p.rank < SIZE - 1:
            dist.send(x, p.rank + 1, group=p.group)


def sum_up_a_tree(p: Place) -> None:
    """Reduce by hand: pairs add up, then pairs of pairs; and tell all."""
    x, distance = p.array([p.rank + 1.0]), 1
    while distance < SIZE:
        if p.rank % (2 * distance):
            dist.send(x, p.rank - distance, p.group)
            break
        came = p.array([0.0])
        dist.recv(came, p.rank + distance, p.group)
        x = p.array(p.host(x) + p.host(came))
        distance *= 2
    dist.broadcast(x, 0, group=p.group)
    p.holds(x, [10.0])


def sum_in_shards(p: Place) -> None:
    """Sum as ZeRO does: each rank reduces its shard, and all gather the shards."""
    gradients = p.array(np.arange(8.0) + p.rank)
    shard = p.array(np.zeros(2))
    dist.reduce_scatter_tensor(shard, gradients, group=p.group)
    whole = p.array(np.zeros(8))
    dist.all_gather_into_tensor(whole, shard, group=p.group)
    p.holds(whole, SIZE * np.arange(8.0) + 6)


def uneven_shards(p: Place) -> None:
    """Reduce shards of every size."""
    inputs = [p.array(np.full(rank + 1, p.rank + 1.0)) for rank in range(SIZE)]
    shard = p.array(np.zeros(p.rank + 1))
    dist.reduce_scatter(shard, inputs, group=p.group)
    p.holds(shard, np.full(p.rank + 1, 10.0))


def stop_early(p: Place) -> None:
    """Train until one rank is done: all of them leave the loop together."""
    steps = 0
    while True:
        done = p.array([steps == p.rank + 2], np.int32)
        dist.all_reduce(done, dist.ReduceOp.MAX, p.group)
        if p.host(done)[0]:
            break
        steps += 1
    assert steps == 2
    low = p.array([p.rank - 1.5, 1.0])
    dist.all_reduce(low, dist.ReduceOp.MIN, p.group)
    p.holds(low, [-1.5, 1.0])


def coalesced_messages(p: Place) -> None:
    """Exchange with every other rank in one coalescing block."""
    came = [p.array([-1.0]) for _ in range(SIZE)]
    with dist._coalescing_manager(p.group, async_ops=True) as manager:
        for rank in range(SIZE):
            if rank != p.rank:
                dist.isend(p.array([10.0 * p.rank + rank]), rank, p.group)
                dist.irecv(came[rank], rank, p.group)
    manager.wait()
    for rank in range(SIZE):
        p.holds(came[rank], [-1.0 if rank == p.rank else 10.0 * rank + p.rank])


def large_objects(p: Place) -> None:
    """Send arrays, errors and nothing as objects."""
    given = [np.arange(1000 * p.rank), None, ValueError(p.rank)]
    everybody: list[Any] = [None] * SIZE
    dist.all_gather_object(everybody, given, p.group)
    for rank, (array, nothing, error) in enumerate(everybody):
        np.testing.assert_array_equal(array, np.arange(1000 * rank))
        assert nothing is None
        assert error.args == (rank,)


# -- on the world ----------------------------------------------------------------


def _free(*groups: Any) -> None:
    """Destroy groups once all ranks are done with them."""
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)


def pairs(p: Place) -> None:
    """Sum within pairs of neighbours, then within the odd and the even ranks."""
    mine, everyone = dist.new_subgroups(2)
    assert everyone.count(dist.GroupMember.NON_GROUP_MEMBER) == 1
    x = np.array([float(p.rank)])
    dist.all_reduce(x, group=mine)
    p.holds(x, [1.0 if p.rank < 2 else 5.0])
    half, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    assert half is not None
    dist.all_reduce(x, group=half)
    p.holds(x, [6.0])
    _free(mine, half)


def some_ranks_alone(p: Place) -> None:
    """Let two ranks talk, found by the object that stands for no member."""
    group = dist.new_group([1, 3], use_local_synchronization=True, group_desc="two")
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        x = np.array([p.rank])
        dist.all_reduce(x, group=group)
        p.holds(x, [4])
        assert dist.get_process_group_ranks(group) == [1, 3]
        assert dist.get_group_rank(group, 3) == 1
    _free(group)


def ranks_in_another_order(p: Place) -> None:
    """Gather in the order that the caller gave the ranks."""
    group = dist.new_group([2, 0, 3, 1], sort_ranks=False)
    found = np.zeros(SIZE, np.int64)
    dist.all_gather_single(found, np.array([p.rank]), group=group)
    p.holds(found, [2, 0, 3, 1])
    x = np.array([p.rank])
    dist.broadcast(x, group=group, group_src=0)
    p.holds(x, [2])
    _free(group)


def split_by_colour(p: Place) -> None:
    """Split the world into three ranks and one."""
    group = dist.split_group(split_ranks=[[0, 1, 3], [2]], group_desc="colour")
    assert group is not None
    assert group.size() == (1 if p.rank == 2 else 3)
    x = np.array([1.0])
    dist.all_reduce(x, group=group)
    p.holds(x, [group.size()])
    _free(group)


def grid(p: Place) -> None:
    """Sum along rows and columns of a mesh of 2 by 2, and over both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    row, column = mesh.get_coordinate() or (-1, -1)
    assert 2 * row + column == p.rank
    x = np.array([float(p.rank)])
    dist.all_reduce(x, group=mesh["tp"].get_group())
    p.holds(x, [4.0 * row + 1])
    dist.all_reduce(x, group=mesh.get_group("dp"))
    p.holds(x, [6.0])
    both = mesh["dp", "tp"]._flatten("both")
    parts = np.zeros(SIZE)
    dist.all_gather_single(parts, np.array([p.rank + 0.5]), group=both.get_group())
    p.holds(parts, np.arange(SIZE) + 0.5)
    _free(*mesh.get_all_groups(), both.get_group())


def sum_in_two_levels(p: Place) -> None:
    """Reduce to the first rank of each row, sum those, and hand the sum back."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    local, nodes = mesh.get_group("local"), mesh.get_group("node")
    x = np.full(5, p.rank + 1.0)
    dist.reduce(x, group=local, group_dst=0)
    if mesh.get_local_rank("local") == 0:
        dist.all_reduce(x, group=nodes)
    dist.broadcast(x, group=local, group_src=0)
    p.holds(x, np.full(5, 10.0))
    _free(local, nodes)


def work_from_a_queue(p: Place) -> None:
    """Hand out tasks through a store: each is done once, whoever is quick."""
    assert p.store is not None
    store = dist.PrefixStore("tasks", p.store)
    store.set_timeout(timedelta(seconds=50))
    if p.rank == 0:
        for task in range(20):
            store.queue_push("todo", str(task))
        for _ in range(SIZE):
            store.queue_push("todo", "stop")
    done = []
    while (todo := store.queue_pop("todo")) != b"stop":
        done.append(int(todo))
        store.append("log", b".")
    everybody: list[Any] = [None] * SIZE
    dist.all_gather_object(everybody, done)
    assert sorted(itertools.chain(*everybody)) == list(range(20))
    assert store.get("log") == b"." * 20
    assert store.queue_len("todo") == 0
    # A rank may be here before another has read: nothing is deleted until then.
    store.barrier("read", SIZE)
    if p.rank == 0:
        assert store.delete_key("log")
    store.barrier("read", SIZE)
    assert not store.check(["log"])


def addresses_in_a_store(p: Place) -> None:
    """Publish an address each, and read those of all at once."""
    assert p.store is not None
    store = dist.PrefixStore("addresses", p.store.clone())
    store.multi_set([f"host/{p.rank}", f"port/{p.rank}"], [f"h{p.rank}", str(p.rank)])
    keys = [f"host/{rank}" for rank in range(SIZE)]
    store.wait(keys, timedelta(seconds=50))
    assert store.multi_get(keys) == [b"h%d" % rank for rank in range(SIZE)]
    first = store.compare_set("leader", "", str(p.rank))
    assert store.get("leader") == first
    count = store.add("here", 1)
    assert 1 <= count <= SIZE
    store.barrier("all", SIZE, 50)
    assert store.add("here", 0) == SIZE
    store.underlying_store.close()


def cube(p: Place) -> None:
    """Slice a mesh of three dimensions, and use two of them in the other order."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "pp", "tp"))
    part = mesh["tp", "dp"]
    assert part.shape == (2, 2)
    assert part.mesh.T.tolist() == [[0, 1], [2, 3]]
    assert part.get_group("dp") is mesh["dp"].get_group()
    assert mesh.size("pp") == mesh["pp"].size() == 1
    x = np.array([float(p.rank)])
    dist.all_reduce(x, group=mesh["pp"].get_group())
    p.holds(x, [p.rank])
    dist.all_reduce(x, group=part.get_group(1))
    p.holds(x, [2.0 * (p.rank % 2) + 2])
    _free(*mesh.get_all_groups())


def mesh_of_own_groups(p: Place) -> None:
    """Make the groups first, and the mesh of them."""
    row, _ = dist.new_subgroups(2)
    column, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    assert column is not None
    ranks = np.arange(SIZE).reshape(2, 2)
    mesh = dist.DeviceMesh.from_group(
        [column, row], "cpu", ranks, mesh_dim_names=("dp", "tp")
    )
    x = np.array([1.0])
    for group in mesh.get_all_groups():
        dist.all_reduce(x, group=group)
    p.holds(x, [4.0])
    _free(*mesh.get_all_groups())


def groups_that_overlap(p: Place) -> None:
    """Chain groups of neighbours: a rank is in two of them."""
    chain = [dist.new_group([rank, rank + 1]) for rank in range(SIZE - 1)]
    mine = [one for one in chain if one is not dist.GroupMember.NON_GROUP_MEMBER]
    assert len(mine) == (1 if p.rank in (0, SIZE - 1) else 2)
    x = np.array([float(p.rank)])
    for group in mine:
        dist.all_reduce(x, dist.ReduceOp.MAX, group)
    # The largest rank below has come as far as the order of the groups allows.
    p.holds(x, [min(p.rank + 1, SIZE - 1)])
    _free(*chain)


def lock_in_a_store(p: Place) -> None:
    """Guard a value by `compare_set`: every rank adds to it ten times, alone."""
    assert p.store is not None
    store = dist.PrefixStore("lock", p.store)
    store.compare_set("count", "", "0")
    for _ in range(10):
        deadline = time.monotonic() + 50
        while store.compare_set("owner", "", str(p.rank)) != str(p.rank).encode():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        store.set("count", str(int(store.get("count")) + 1))
        store.delete_key("owner")
    store.barrier("done", SIZE, 50)
    assert store.get("count") == b"%d" % (10 * SIZE)


def store_of_its_own(p: Place) -> None:
    """Serve a second store from rank 2, whose port all learn."""
    key, port = b"the key of these ranks", [0]
    if p.rank == 2:
        store = dist.TCPStore("127.0.0.1", 0, SIZE, True, 50, False, key=key)
        port[0] = store.port
    dist.broadcast_object_list(port, 2)
    if p.rank != 2:
        store = dist.TCPStore("127.0.0.1", port[0], SIZE, False, 50, False, key=key)
    store.queue_push("to", str(p.rank))
    store.barrier("here", SIZE)
    if p.rank == 2:
        assert {store.queue_pop("to", block=False) for _ in range(SIZE)} == {
            b"%d" % rank for rank in range(SIZE)
        }
        with pytest.raises(dist.QueueEmptyError):
            store.queue_pop("to", block=False)
    # The master leaves last.
    dist.barrier()
    if p.rank != 2:
        store.close()
    dist.barrier()
    store.close()


ON_A_GROUP = (
    *(ring, exchange_in_a_batch, uneven_rows, uneven_lists, average_of_gradients),
    *(coalesced_sums, coalesced_shards, coalesced_lists, rows_of_a_product),
    *(objects_of_everybody, objects_from_rank_to_rank, barriers, pipeline),
    *(sum_up_a_tree, sum_in_shards, uneven_shards, stop_early, coalesced_messages),
    *(large_objects,),
)
ON_THE_WORLD = (
    *(pairs, some_ranks_alone, ranks_in_another_order, split_by_colour, grid),
    *(sum_in_two_levels, work_from_a_queue, addresses_in_a_store, cube),
    *(mesh_of_own_groups, groups_that_overlap, lock_in_a_store, store_of_its_own),
)
