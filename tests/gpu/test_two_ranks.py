"""Tests of two ranks on one GPU: reductions, order on streams, memory and splits.

NCCL refuses two ranks on one GPU of one host. Each rank therefore has another
``NCCL_HOSTID``, and the ranks communicate over the loopback interface.
"""

from __future__ import annotations

import copy
import importlib
import os
import time
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups.world import world as groups
from rankscope.backends.nccl import dtypes as nccl_types
from rankscope.backends.nccl import nccl4py
from rankscope.backends.nccl.stream import NCCLStream
from rankscope.engines.wire.gpu_environment import Gpus
from tests.gpu.ranks import used, world
from tools import support_table

pytestmark = pytest.mark.processes

OP = dist.ReduceOp
FLOATS = ("float16", "float32", "float64", "bfloat16")

# Seconds that the ranks of a test may run.
WAIT = 120


FOLDS: dict[OP, Any] = {
    OP.SUM: np.add,
    OP.PRODUCT: np.multiply,
    OP.MIN: np.minimum,
    OP.MAX: np.maximum,
    # The inputs are even numbers, so that the average is exact in every dtype.
    OP.AVG: lambda one, other: ((one + other) / 2).astype(one.dtype),
}


def exact(me: Rank) -> None:
    """Compare collectives of several dtypes and sizes with numpy, exactly."""
    with world(me) as cupy:
        size = me.size
        for dtype in ("float32", "float64", "int32", "int64", "uint8", "float16"):
            for count in (1, 1000, 1 << 20):
                held = [
                    (np.random.default_rng(r).integers(0, 5, count)).astype(dtype)
                    for r in range(size)
                ]
                x = cupy.asarray(held[me.rank])
                for op in (OP.SUM, OP.PRODUCT, OP.MIN, OP.MAX):
                    y = x.copy()
                    dist.all_reduce(y, op)
                    np.testing.assert_array_equal(y.get(), FOLDS[op](*held))
                out = cupy.empty(count * size, dtype)
                dist.all_gather_into_tensor(out, x)
                np.testing.assert_array_equal(out.get(), np.concatenate(held))
                rows = [cupy.empty(count, dtype) for _ in range(size)]
                dist.all_gather(rows, x)
                parts = [cupy.asarray(held[me.rank]) for _ in range(size)]
                got = [cupy.empty(count, dtype) for _ in range(size)]
                dist.all_to_all(got, parts)
                for r in range(size):
                    np.testing.assert_array_equal(rows[r].get(), held[r])
                    np.testing.assert_array_equal(got[r].get(), held[r])
                both = cupy.concatenate([x, x])
                half = cupy.empty(count, dtype)
                dist.reduce_scatter_tensor(half, both)
                np.testing.assert_array_equal(half.get(), sum(held).astype(dtype))
        # Parts of different sizes.
        uneven = [cupy.full(10 * r + 1, me.rank + 1.0) for r in range(size)]
        mine = cupy.empty(10 * me.rank + 1)
        dist.reduce_scatter(mine, uneven)
        assert (mine.get() == 3).all()
        for root in range(size):
            y = cupy.full(5, me.rank)
            dist.broadcast(y, root)
            assert (y.get() == root).all()


def test_ops_are_exact() -> None:
    run_ranks(2, exact, timeout=WAIT)


def reductions(me: Rank, names: list[str]) -> None:
    """Compare every reduction of each dtype, and an all-gather, with numpy."""
    # The import registers bfloat16 with numpy.
    importlib.import_module("ml_dtypes")
    with world(me) as cupy:
        for name in names:
            dtype = np.dtype(name)
            held = []
            for rank in range(me.size):
                values: Any = 2 * np.random.default_rng(rank).integers(0, 3, 100)
                values = values * (1 + 2j) if dtype.kind == "c" else values
                held.append(values.astype(dtype))
            x = cupy.asarray(held[me.rank])
            out = cupy.empty(100 * me.size, dtype)
            dist.all_gather_into_tensor(out, x)
            np.testing.assert_array_equal(out.get(), np.concatenate(held), name)
            for op in nccl_types.ops_of(dtype):
                y = x.copy()
                dist.all_reduce(y, op)
                expected = FOLDS[op](*held)
                np.testing.assert_array_equal(y.get(), expected, f"{name} {op}")
            if name in FLOATS:
                y = x.copy()
                dist.all_reduce(y, dist.make_nccl_premul_sum(0.5))
                expected = FOLDS[OP.AVG](*held)
                np.testing.assert_array_equal(y.get(), expected, f"{name} premul")


def test_every_dtype_is_reduced_as_it_should() -> None:
    pytest.importorskip("ml_dtypes")
    names = [*support_table.DTYPES, "bfloat16"]
    run_ranks(2, reductions, names, timeout=WAIT)


def messages(me: Rank) -> None:
    """Exchange messages and reduce a coalesced block of arrays."""
    other = 1 - me.rank
    with world(me) as cupy:
        for count in (1, 1 << 22):
            given, came = cupy.full(count, me.rank + 1.0), cupy.zeros(count)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, given, other),
                    dist.P2POp(dist.irecv, came, other),
                ]
            )
            for work in works:
                work.wait()
            # The test does not synchronize: the current stream waits for the ops.
            assert float((came + 1).sum()) == count * (other + 2)
        if me.rank == 0:
            dist.send(given, 1)
        else:
            dist.recv(came, 0)
            assert (came.get() == 1).all()
        arrays = [cupy.full(100 + i, float(i)) for i in range(20)]
        with dist.coalescing_manager():
            for array in arrays:
                dist.all_reduce(array)
        for i, array in enumerate(arrays):
            assert (array.get() == 2 * i).all()


def test_messages_and_coalescing() -> None:
    run_ranks(2, messages, timeout=WAIT)


SPIN = r"""
extern "C" __global__ void spin(float* x, int n, float value, long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = value;
}
"""


def ordered(me: Rank, broken: str) -> bool:
    """Return whether ops run in the order of the caller's stream.

    An op has to run after the preceding and before the following work of the stream.
    `broken` removes one of the two orders, so that the test can show a failure.
    """
    with world(me) as cupy:
        spin = cupy.RawKernel(SPIN, "spin")
        x = cupy.zeros(1024, cupy.float32)
        dist.all_reduce(x)
        cupy.cuda.get_current_stream().synchronize()
        ours = next(iter(groups.get_group().current.backends["cuda"]._streams.values()))  # type: ignore[attr-defined]
        if broken == "before":
            cuda = ours._api.cuda
            wait = cuda.wait
            # The communicator's stream waits for no event.
            cuda.wait = lambda stream, event: (
                None if stream == ours.cuda_stream else wait(stream, event)
            )
        if broken == "after":
            ours.join = lambda launch, done: None
        right = True
        for round_ in range(5):
            with cupy.cuda.Stream(non_blocking=True) as stream:
                cycles = np.int64(200_000_000)
                spin((1,), (256,), (x, np.int32(1024), np.float32(round_ + 1), cycles))
                dist.all_reduce(x)
                y = x * 1
                stream.synchronize()
            right = right and bool((y.get() == 2 * (round_ + 1)).all())
            cupy.cuda.Device().synchronize()
        return right


@pytest.mark.parametrize(
    ("broken", "right"), [("", True), ("before", False), ("after", False)]
)
def test_streams_are_ordered_and_the_test_would_notice(
    broken: str, right: bool
) -> None:
    results = run_ranks(2, ordered, broken, timeout=WAIT)
    assert all(results) == right


def memory_reused(me: Rank, broken: bool) -> bool:
    """Return whether arrays stay allocated until the op that uses them has ended.

    The caller deletes its references; `broken` makes the backend keep none either.
    """
    with world(me) as cupy:
        if broken:
            submit = NCCLStream.submit

            def forgetful(self: Any, works: Any, calls: Any, arrays: Any) -> None:
                submit(self, works, calls, ())
                for work in works:
                    work._result = ()

            NCCLStream.submit = forgetful  # type: ignore[method-assign]
        warm = cupy.ones(10)
        dist.all_reduce(warm)
        cupy.cuda.get_current_stream().synchronize()
        right = True
        count = 1 << 22
        for _ in range(5):
            out = cupy.zeros(2 * count, cupy.float32)
            x = cupy.full(count, me.rank + 1.0, cupy.float32)
            cupy.cuda.get_current_stream().synchronize()
            if me.rank == 1:
                time.sleep(0.05)
            work = dist.all_gather_into_tensor(out, x, async_op=True)
            del x, work
            # cupy's memory pool gives freed memory to the next allocation.
            overwritten = cupy.full(count, 77.0, cupy.float32)
            dist.barrier()
            expected = np.repeat([1.0, 2.0], count).astype(np.float32)
            right = right and bool((out.get() == expected).all())
            del overwritten
        return right


def test_memory_is_kept_until_the_device_is_done() -> None:
    assert all(run_ranks(2, memory_reused, False, timeout=WAIT))


def test_the_test_of_memory_would_notice() -> None:
    assert not all(run_ranks(2, memory_reused, True, timeout=WAIT))


def both_backends(me: Rank, cpu: str) -> None:
    """Reduce a host array and a device array in one group."""
    with world(me, backend=f"cpu:{cpu},cuda:nccl") as cupy:
        x, y = np.ones(4), cupy.ones(4)
        dist.all_reduce(x)
        dist.all_reduce(y)
        assert (x == 2).all()
        assert (y.get() == 2).all()


def test_one_group_of_two_backends() -> None:
    run_ranks(2, both_backends, "tcp", timeout=WAIT)


def splits(me: Rank) -> bool:
    """Split the communicator of a second group from that of the first group.

    Returns whether ncclCommSplit was called.
    """
    with world(me) as cupy:
        x = cupy.ones(1000)
        dist.all_reduce(x)
        cupy.cuda.Device().synchronize()
        # A communicator is idle only after the backend has polled the end of its ops.
        until(lambda: not groups.get_group().status.in_flight, 20)
        dist.all_reduce(cupy.ones(1), async_op=True).synchronize()
        nccl = nccl4py.load().nccl
        split, made = nccl.split, []
        nccl.split = lambda comm, rank: made.append(rank) or split(comm, rank)  # type: ignore[func-returns-value, method-assign]
        group = dist.new_group(range(me.size), group_desc="second")
        for _ in range(3):
            y = cupy.full(1000, me.rank + 1.0)
            dist.all_reduce(y, group=group)
            assert (y.get() == 3).all()
            dist.all_reduce(x)
        dist.destroy_process_group(group)
        dist.all_reduce(x)
        cupy.cuda.Device().synchronize()
        return bool(made)


def test_a_group_of_all_ranks_is_split_off() -> None:
    assert run_ranks(2, splits, timeout=WAIT) == [True, True]


def suspends(me: Rank) -> None:
    """Free the memory of a group's communicator and use the group again."""
    with world(me) as cupy:
        group = groups.get_group()
        x = cupy.full(1 << 20, me.rank + 1.0)
        dist.all_reduce(x)
        if nccl4py.load().nccl.suspend_lacks():
            with pytest.raises(NotImplementedError, match="is needed: .*pip install"):
                group.suspend()
            return
        before = used(cupy)
        stats = group.memory_stats()
        group.suspend()
        assert group.memory_stats()["suspended"] == 1
        # Both ranks are on this GPU; neither allocates anything meanwhile.
        print(f"suspend: {stats}; {before - used(cupy)} bytes were freed on the GPU")
        with pytest.raises(dist.DistBackendError, match="is suspended"):
            dist.all_reduce(x)
        group.resume()
        dist.all_reduce(x)
        assert (x.get() == 6).all()


def test_a_group_is_suspended_and_resumed() -> None:
    run_ranks(2, suspends, timeout=WAIT)


def trains(me: Rank) -> None:
    """Train a model of torch by DDP over the backend ``rankscope``; compare."""
    os.environ.update(Gpus(share=True).environment(me.rank))
    torch: Any = importlib.import_module("torch")
    training = torch.nn.parallel
    distributed: Any = importlib.import_module("torch.distributed")
    importlib.import_module("rankscope.torch")
    distributed.init_process_group("rankscope")
    try:
        device = torch.device("cuda", 0)
        torch.manual_seed(0)
        plain = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 8))
        plain.to(device)
        model = training.DistributedDataParallel(copy.deepcopy(plain))
        for step in range(5):
            torch.manual_seed(step)
            batch = torch.randn(32, 64, device=device)
            for one, part in (plain, batch), (model, batch.chunk(me.size)[me.rank]):
                one.zero_grad()
                one(part).pow(2).mean().backward()
                with torch.no_grad():
                    for parameter in one.parameters():
                        parameter -= 0.1 * parameter.grad
        for own, whole in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own, whole, rtol=1e-4, atol=1e-5)
            parts = [torch.empty_like(own) for _ in range(me.size)]
            distributed.all_gather(parts, own.detach())
            assert torch.equal(parts[0], parts[1])
    finally:
        distributed.destroy_process_group()


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_a_model_of_torch_trains_on_the_gpu() -> None:
    run_ranks(2, trains, timeout=WAIT)
