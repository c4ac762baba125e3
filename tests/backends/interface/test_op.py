"""Op: a reduction is checked once, and what `check` returned reaches the method."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends import OpType, ReduceOp, Store, Work
from rankscope.backends.interface.base import Backend
from rankscope.backends.interface.op import Op, fuse
from tools import support_table


def ended(kind: OpType) -> Work:
    work = Work(kind)
    work.mark_started()
    work.mark_completed()
    return work


class Translating(Backend):
    """Keeps what it is asked: `check` translates a reduction into a word."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.checked: list[tuple[str, str, ReduceOp | None]] = []
        self.called: list[tuple[str, Any]] = []

    def check(self, op: OpType, dtype: Any, reduce_op: ReduceOp | None) -> Any:
        super().check(op, dtype, reduce_op)
        self.checked.append((op.value, dtype.name, reduce_op))
        return None if reduce_op is None else f"{reduce_op.value} of {dtype.name}"

    def all_reduce(self, tensor: Any, op: Any) -> Work:
        self.called.append(("all_reduce", op))
        return ended(OpType.ALL_REDUCE)

    def reduce(self, tensor: Any, dst: int, op: Any) -> Work:
        self.called.append(("reduce", op))
        return ended(OpType.REDUCE)

    def broadcast(self, tensor: Any, src: int) -> Work:
        self.called.append(("broadcast", src))
        return ended(OpType.BROADCAST)


class Plain(Translating):
    """A backend that does not translate the reduction, as the base class."""

    def check(self, op: OpType, dtype: Any, reduce_op: ReduceOp | None) -> Any:
        self.checked.append((op.value, dtype.name, reduce_op))
        return Backend.check(self, op, dtype, reduce_op)


class Forgetful(Backend):
    """A backend whose `check` returns nothing."""

    def check(self, op: OpType, dtype: Any, reduce_op: ReduceOp | None) -> None:
        super().check(op, dtype, reduce_op)


@pytest.fixture(params=[Translating, Plain])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Translating]:
    made: list[Translating] = []

    def create(store: Store, rank: int, size: int, timeout: float) -> Backend:
        made.append(request.param(rank, size))
        return made[-1]

    Backend.register_backend("asked", create, devices="cpu")
    dist.init_process_group(
        "cpu:asked", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    dist.broadcast(np.ones(1), 0)
    (backend,) = made
    backend.checked.clear()
    backend.called.clear()
    yield backend
    dist.destroy_process_group()
    del Backend.registry["asked"]


def given(backend: Translating, op: ReduceOp, dtype: str) -> Any:
    """What the method of `backend` is given for `op`."""
    return op if isinstance(backend, Plain) else f"{op.value} of {dtype}"


def test_the_method_gets_what_the_one_check_returned(backend: Translating) -> None:
    dist.all_reduce(np.ones(3, "int32"), ReduceOp.MAX)
    assert backend.checked == [("all_reduce", "int32", ReduceOp.MAX)]
    assert backend.called == [("all_reduce", given(backend, ReduceOp.MAX, "int32"))]


def test_an_average_that_the_backend_lacks_is_checked_as_a_sum(
    backend: Translating,
) -> None:
    x = np.full(3, 8.0)
    dist.reduce(x, 0, ReduceOp.AVG)
    assert backend.checked == [("reduce", "float64", ReduceOp.SUM)]
    assert backend.called == [("reduce", given(backend, ReduceOp.SUM, "float64"))]


def test_an_op_that_moves_gets_no_reduction(backend: Translating) -> None:
    dist.broadcast(np.ones(3), 0)
    assert backend.checked == [("broadcast", "float64", None)]
    assert backend.called == [("broadcast", 0)]


def test_fused_arrays_get_the_reduction_of_their_dtype(backend: Translating) -> None:
    arrays = [np.ones(2, "int32"), np.ones(2), np.ones(3, "int32")]
    dist.all_reduce_coalesced(arrays)
    assert backend.called == [
        ("all_reduce", given(backend, ReduceOp.SUM, dtype))
        for dtype in ("int32", "float64")
    ]


def test_a_captured_ops_result_is_its_own_array(backend: Translating) -> None:
    arrays = [np.ones(2), np.ones(3)]
    with dist.coalescing_manager():
        works = [dist.all_reduce(one, async_op=True) for one in arrays]
    for work, array in zip(works, arrays, strict=True):
        assert work is not None
        assert work.result()[0] is array


# -- without a group -----------------------------------------------------------


def reducing(op: ReduceOp, dtype: str = "float64", size: int = 3) -> Op:
    array = np.full(size, 9).astype(dtype)
    return Op(OpType.ALL_REDUCE, "cpu", (array,), (array,), result=array, reduce_op=op)


@pytest.mark.parametrize(
    ("dtype", "values"), [("float64", 4.5), ("int32", 4), ("int8", 4)]
)
def test_an_average_is_divided_by_the_number_of_ranks(
    dtype: str, values: float
) -> None:
    op = reducing(ReduceOp.AVG, dtype)
    op.check(Translating(0, 2))
    op.start().wait()
    np.testing.assert_array_equal(op.result, [values] * 3)


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint64"])
@pytest.mark.parametrize("ranks", [2, 3, 200])
def test_an_average_of_integers_is_rounded_towards_zero(dtype: str, ranks: int) -> None:
    limits = np.iinfo(dtype)
    sums = [limits.min, limits.min + 1, 0, 7, limits.max]
    array = np.array(sums, dtype)
    op = Op(
        *(OpType.ALL_REDUCE, "cpu", (array,), (array,)),
        result=array,
        reduce_op=ReduceOp.AVG,
    )
    op.check(Translating(0, ranks))
    op.start().wait()
    assert array.tolist() == [
        abs(one) // ranks * (-1 if one < 0 else 1) for one in sums
    ]


def test_a_check_that_returns_no_reduction_is_refused() -> None:
    backend = Forgetful(0, 2)
    with pytest.raises(
        TypeError,
        match=r"all_reduce in no group: check\(\) of backend 'backend' returned None "
        "for ReduceOp.MAX; it has to return reduce_op, or what the method all_reduce",
    ):
        reducing(ReduceOp.MAX).check(backend)
    array = np.ones(3)
    Op(OpType.BROADCAST, "cpu", (array,), (array, 0)).check(backend)


@pytest.mark.parametrize("name", ["tcp", "gloo", "mpi", "ucx", "nccl"])
def test_each_backend_returns_a_reduction_for_a_reduction_alone(name: str) -> None:
    kind = support_table.classes()[name]
    backend = kind.__new__(kind)
    factor = dist.make_nccl_premul_sum(0.5)
    for op in kind.reduce_ops:
        premul = op is ReduceOp.PREMUL_SUM
        dtype = np.dtype("float32" if premul else "int32")
        given = factor if premul else op
        assert backend.check(OpType.ALL_REDUCE, dtype, given) is not None
    assert backend.check(OpType.BROADCAST, np.dtype("int32"), None) is None


def test_the_average_of_truth_values_is_refused() -> None:
    with pytest.raises(TypeError, match="AVG is not defined for arrays of bool"):
        reducing(ReduceOp.AVG, "bool").check(Translating(0, 2))


def test_fused_ops_are_one_call_on_what_is_not_empty() -> None:
    backend = Translating(0, 2)
    ops = [reducing(ReduceOp.AVG, size=size) for size in (3, 0, 4)]
    for op in ops:
        op.check(backend)
    fused = fuse(ops)
    assert fused.method == "all_reduce_coalesced"
    assert not fused.is_empty
    assert [len(array) for array in fused.arrays] == [3, 0, 4]
    assert [len(array) for array in fused.args[0]] == [3, 4]
    fused.start().wait()
    assert [op.result.tolist() for op in ops] == [[4.5] * 3, [], [4.5] * 4]


def test_fused_ops_without_an_element_are_empty() -> None:
    ops = [reducing(ReduceOp.SUM, size=0) for _ in range(2)]
    for op in ops:
        op.check(Translating(0, 2))
    assert fuse(ops).is_empty
