"""Tests of every op and dtype on one rank of a real GPU, compared with cupy.

Each test runs in a process of its own: the process of the tests would keep the CUDA
context, and its descriptors and memory would count as leaks of the module.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups.config import BackendConfig
from rankscope.backends.groups.process_group import ProcessGroup
from rankscope.backends.nccl import dtypes as nccl_types
from tests.gpu.ranks import SLACK, used
from tools import support_table

OP = dist.ReduceOp
MORE = ("bfloat16",)
# Seconds that a test may take; the rank imports cupy, and CUDA loads its modules.
WAIT = 120


def dtype_of(name: str) -> Any:
    """Return the dtype `name` of numpy or ml_dtypes; skip without ml_dtypes."""
    if name not in MORE:
        return np.dtype(name)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    return np.dtype(getattr(ml_dtypes, name))


def ran(me: Rank, name: str, arguments: dict[str, Any]) -> str:
    """Run the body of the test `name` on a group of one; return why it was skipped."""
    body = globals()[name].__wrapped__
    with me.store() as store:
        group = ProcessGroup("g", [0], 0, BackendConfig("cuda:nccl"), store, 60)
        try:
            body(group, **arguments)
        except pytest.skip.Exception as skipped:
            return str(skipped)
        finally:
            group.shutdown()
    return ""


def in_a_rank(body: Callable[..., None]) -> Callable[..., None]:
    """Return the test that runs `body`, whose first argument is a group, in a rank."""

    @functools.wraps(body)
    def test(**arguments: Any) -> None:
        (skipped,) = run_ranks(1, ran, body.__name__, arguments, timeout=WAIT)
        if skipped:
            pytest.skip(skipped)

    _, *others = inspect.signature(body).parameters.values()
    test.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
    return test


def array(name: str, count: int = 1000) -> Any:
    """Return a cupy array of the dtype `name`; skip if cupy lacks the dtype."""
    import cupy

    dtype = dtype_of(name)
    values: Any = np.arange(count) % 5
    if dtype.kind == "c":
        values = values * (1 + 2j)
    try:
        return cupy.asarray(values.astype(dtype))
    except (TypeError, ValueError) as error:
        pytest.skip(f"cupy has no {name}: {error}")


def same(one: Any, other: Any, what: str = "") -> None:
    """Assert that two cupy arrays have the same bytes; `what` is for the message."""
    mine, others = (array.get().view(np.uint8) for array in (one, other))
    np.testing.assert_array_equal(mine, others, what)


@pytest.mark.parametrize("name", [*support_table.DTYPES, *MORE])
@in_a_rank
def test_every_op_leaves_what_it_should(group: ProcessGroup, name: str) -> None:
    import cupy

    x = array(name)
    before = x.copy()
    reducible = bool(nccl_types.ops_of(x.dtype))
    out = cupy.zeros_like(x)
    ops: list[Any] = [
        lambda: dist.broadcast(x, 0, group=group),
        lambda: dist.all_gather([out], x, group=group),
        lambda: dist.all_gather_into_tensor(out, x, group=group),
        lambda: dist.gather(x, [out], 0, group=group),
        lambda: dist.scatter(out, [x], 0, group=group),
        lambda: dist.all_to_all([out], [x], group=group),
        lambda: dist.all_to_all_single(out, x, group=group),
    ]
    if reducible:
        ops += [
            lambda: dist.reduce_scatter(out, [x], group=group),
            lambda: dist.reduce_scatter_tensor(out, x, group=group),
            lambda: dist.all_reduce(x, group=group),
            lambda: dist.reduce(x, 0, group=group),
        ]
    for place, op in enumerate(ops):
        out.fill(0)
        op()
        same(x, before)
        if 0 < place < len(ops) - 2 * reducible:
            same(out, before)


@pytest.mark.parametrize("name", ["float32", "int64", "float16"])
@in_a_rank
def test_every_reduction(group: ProcessGroup, name: str) -> None:
    x = array(name)
    before = x.copy()
    # In one process, as each costs a CUDA context and a communicator.
    for op in (OP.SUM, OP.PRODUCT, OP.MIN, OP.MAX, OP.AVG):
        dist.all_reduce(x, op, group=group)
        same(x, before, str(op))


@in_a_rank
def test_premul_sum(group: ProcessGroup) -> None:
    x = array("float32")
    dist.all_reduce(x, dist.make_nccl_premul_sum(0.5), group=group)
    np.testing.assert_array_equal(x.get(), (np.arange(1000) % 5) * 0.5)


@in_a_rank
def test_strided_arrays_are_refused(group: ProcessGroup) -> None:
    with pytest.raises(ValueError, match="not C-contiguous"):
        dist.all_reduce(array("float32").reshape(10, 100)[:, ::2], group=group)


@in_a_rank
def test_a_tensor_of_torch(group: ProcessGroup) -> None:
    torch = pytest.importorskip("torch")
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.arange(8, device="cuda", dtype=torch.bfloat16)
        x += 1
        dist.all_reduce(x, group=group)
        y = x * 2
    torch.cuda.synchronize()
    assert y.tolist() == [2 * (i + 1) for i in range(8)]


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
@in_a_rank
def test_a_float8_of_torch(group: ProcessGroup, name: str) -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(8, device="cuda").to(getattr(torch, name))
    out = torch.zeros_like(x)
    dist.all_gather_into_tensor(out, x, group=group)
    dist.all_reduce(x, dist.ReduceOp.AVG, group=group)
    dist.all_reduce(x, dist.make_nccl_premul_sum(2.0), group=group)
    torch.cuda.synchronize()
    assert out.float().tolist() == list(range(8))
    assert x.float().tolist() == [2.0 * i for i in range(8)]


@in_a_rank
def test_durations_come_from_the_device(group: ProcessGroup) -> None:
    import cupy

    x = cupy.ones(1 << 26, cupy.float32)
    work = dist.all_reduce(x, group=group, async_op=True)
    work.synchronize()
    assert 0 < (work.get_duration() or 0) < 1000
    dist.enable_timing(group, False)
    work = dist.all_reduce(x, group=group, async_op=True)
    work.synchronize()
    assert work.get_duration() is None
    dist.enable_timing(group, True)


def _idle(group: ProcessGroup) -> bool:
    return not group.status.in_flight


@in_a_rank
def test_the_memory_of_the_gpu_is_given_back(group: ProcessGroup) -> None:
    import cupy

    taken = []
    for generation in range(24):
        made = ProcessGroup(
            f"g{generation}", [0], 0, BackendConfig("cuda:nccl"), group.store, 60
        )
        dist.all_reduce(cupy.ones(1000), group=made)
        cupy.cuda.get_current_stream().synchronize()
        until(partial(_idle, made))
        if generation % 2:
            made.abort("the test is over")
        made.shutdown()
        taken.append(used(cupy))
    # The first generations make CUDA load modules, which stay loaded; a leak would
    # grow in every later generation too.
    assert taken[-1] - taken[3] <= SLACK, taken
