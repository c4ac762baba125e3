"""Every op, and what Rankscope builds on ops, on this rank: nothing may be refused."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

import rankscope.backends as dist
from rankscope.backends.conformance import exact, reference, surface
from rankscope.backends.conformance.checker import Checker
from rankscope.backends.conformance.expect import raises, same
from rankscope.backends.groups.world import world

__all__ = ["SIZES", "built_on_ops", "check_everything", "staged"]

SIZES = [0, 1, 7, 1009, (1 << 20) + 3]


def check_everything(
    checker: Checker,
    sizes: Sequence[int] = SIZES,
    reducible: Sequence[str] = reference.REDUCIBLE,
    movable: Sequence[str] = reference.MOVABLE,
    lacking: Collection[str] = (),
) -> int:
    """Check every case of every op, but for the ops `lacking`; return how many."""
    count = 0
    for size in sizes:
        for name in (*exact.WITHOUT_REDUCE_OP, *exact.WITH_REDUCE_OP):
            if name in lacking:
                continue
            dtypes = movable if name in exact.WITHOUT_REDUCE_OP else reducible
            for arguments in exact.cases_of(name, [size], dtypes):
                exact.check(checker, name, arguments)
                count += 1
    dist.barrier(group=checker.group)
    return count


def built_on_ops() -> None:
    """What the suite tries of Rankscope's own over the default group, and errors."""
    group = world.get_group()
    surface.objects(group)
    object_errors()
    surface.sparse(group)
    surface.coalesced(group)
    surface.batches(group)
    dist.barrier()


def object_errors() -> None:
    """What the object collectives refuse; the group stays usable."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with raises(TypeError, match="obj cannot be pickled"):
        dist.all_gather_object([None] * size, threading.Lock())
    unpicklable_on_one_rank(rank, size)
    with raises(ValueError, match=f"expected {size}"):
        dist.all_gather_object([None] * (size + 1), 1)
    with raises(ValueError, match="at least one entry"):
        dist.broadcast_object_list([], 0)
    no_list: Any = None
    with raises(TypeError, match="at least one entry"):
        dist.broadcast_object_list(no_list, 0)
    dist.refuse_pickles()
    try:
        if size > 1:
            with raises(dist.DistError, match="this rank refuses"):
                dist.all_gather_object([None] * size, rank)
    finally:
        dist.refuse_pickles(False)
    values = [None] * size
    dist.all_gather_object(values, rank)
    assert values == list(range(size))


def unpicklable_on_one_rank(rank: int, size: int) -> None:
    """What rank 0 cannot pickle ends the op on all ranks, with the reason on each."""
    obj = threading.Lock() if rank == 0 else rank

    def told() -> AbstractContextManager[None]:
        if rank == 0:
            return raises(TypeError, match="cannot be pickled: .*_thread.lock")
        return raises(dist.DistError, match="rank 0 has nothing to send: .*_thread")

    with told():
        dist.broadcast_object_list([obj], src=0)
    with told():
        dist.scatter_object_list([None], [rank] * (size - 1) + [obj], src=0)
    values: list[Any] = ["unchanged"] * size
    with told():
        dist.all_gather_object(values, obj)
    assert values == ["unchanged"] * size
    if rank == 0:
        with told():
            dist.gather_object(obj, [None] * size, dst=0)
        if size > 1:
            with told():
                dist.send_object_list([obj], dst=1)
    else:
        dist.gather_object(obj, dst=0)
        if rank == 1:
            with told():
                dist.recv_object_list([None], src=0)


class Elsewhere:
    """An array of device type ``ext``, whose content the host gets as a copy."""

    def __init__(self, data: Any) -> None:
        self.data = np.array(data)

    shape = property(lambda self: self.data.shape)
    dtype = property(lambda self: self.data.dtype)
    size = property(lambda self: self.data.size)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 12, 0


class ElsewhereArrays:
    """Arrays of device type ``ext``, as the suite makes, writes and reads them."""

    wait_blocks_host = True

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        return Elsewhere(np.empty(shape, dtype))

    def write(self, array: Any, values: npt.ArrayLike) -> None:
        array.data[...] = values

    def read(self, array: Any) -> npt.NDArray[Any]:
        return array.data


def staged() -> None:
    """Each op on ``ext`` arrays, staged for a backend of host memory.

    The config of the default group names ``ext``.
    """
    dist.register_staging(
        "ext",
        lambda array: array.data.copy(),
        lambda host, array: np.copyto(array.data, host),
    )
    checker = Checker(ElsewhereArrays())
    for name in (*exact.WITHOUT_REDUCE_OP, *exact.WITH_REDUCE_OP):
        for arguments in exact.cases_of(name, [6], ["int64", "float32"]):
            # These arrays have no arithmetic, which an average needs.
            if dist.ReduceOp.AVG not in arguments:
                exact.check(checker, name, arguments)
    rank, size = dist.get_rank(), dist.get_world_size()
    held = [reference.data(r, 6 * size, "int64") for r in range(size)]
    total = np.sum(held, axis=0)
    mine = slice(rank * 6, rank * 6 + 6)

    many = [Elsewhere(held[rank][:n]) for n in (1, 3, 6)]
    dist.all_reduce_coalesced(many)
    for one in many:
        same(one.data, total[: one.size])
    whole = Elsewhere(np.zeros(6 * size * size, np.int64))
    dist.all_gather_into_tensor_coalesced([whole], [Elsewhere(held[rank])])
    same(whole.data, np.concatenate(held))
    lists = [[Elsewhere(np.zeros(n, np.int64)) for n in (6, 2)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [Elsewhere(held[rank][:n]) for n in (6, 2)])
    for sent, (six, two) in zip(held, lists, strict=True):
        same(six.data, sent[:6])
        same(two.data, sent[:2])
    small = Elsewhere(np.zeros(6, np.int64))
    dist.reduce_scatter_tensor_coalesced([small], [Elsewhere(held[rank])])
    same(small.data, total[mine])
    dist.barrier(device="ext")
