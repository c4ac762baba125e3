"""float16 and bfloat16, with each library: the host engine reduces them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.devices.arrays import native
from rankscope.backends.gloo.library import gloo_options, installed, unavailable

pytestmark = pytest.mark.skipif(
    unavailable() is not None, reason="no gloo library for this Python"
)

each_library = pytest.mark.parametrize("library", list(installed()))

UFUNCS = {
    dist.ReduceOp.SUM: np.add,
    dist.ReduceOp.PRODUCT: np.multiply,
    dist.ReduceOp.MIN: np.minimum,
    dist.ReduceOp.MAX: np.maximum,
}


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def held(rank: int, size: int, dtype: np.dtype) -> np.ndarray:
    values = np.random.default_rng([rank, size]).uniform(-2, 2, size)
    return values.astype(dtype)


def reduced(op: dist.ReduceOp, arrays: list[np.ndarray]) -> np.ndarray:
    """Reduce in float32, in the order of the ranks, and round once."""
    total = arrays[0].astype(np.float32)
    for array in arrays[1:]:
        total = UFUNCS[op](total, array.astype(np.float32))
    return total.astype(arrays[0].dtype)


def every_reduction(me: Rank, library: str, name: str) -> int:
    dtype, checked = dtype_of(name), 0
    with gloo_options(library=library):
        dist.init_process_group("gloo", timeout=60)
        for op in UFUNCS:
            for size in (1, 1000, 200_000, 3_000_000):
                arrays = [held(rank, size, dtype) for rank in range(me.size)]
                wanted = reduced(op, arrays)
                x = arrays[me.rank].copy()
                dist.all_reduce(x, op)
                np.testing.assert_array_equal(x, wanted)
                x = arrays[me.rank].copy()
                dist.reduce(x, 1, op)
                mine = wanted if me.rank == 1 else arrays[me.rank]
                np.testing.assert_array_equal(x, mine)
                out = np.zeros(size // me.size, dtype)
                if out.size:
                    dist.reduce_scatter_tensor(
                        out, arrays[me.rank][: out.size * me.size], op
                    )
                    start = out.size * me.rank
                    np.testing.assert_array_equal(out, wanted[start : start + out.size])
                checked += 1
        x = np.full(5, 3.0 * me.rank, dtype)
        dist.all_reduce(x, dist.ReduceOp.AVG)
        np.testing.assert_array_equal(x, np.full(5, 1.5, dtype))
        large = np.full(3, np.finfo(np.float32).max / 2, np.float32).astype(dtype)
        with np.errstate(over="ignore"):
            large *= np.array(2, dtype)
        dist.all_reduce(large)
        assert np.isinf(large.astype(np.float32)).all()
        dist.destroy_process_group()
    return checked


@pytest.mark.processes
@each_library
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_reduction_of_two_ranks_is_rounded_once(name: str, library: str) -> None:
    assert run_ranks(2, every_reduction, library, name) == [16, 16]


def moves(me: Rank, library: str) -> None:
    dtype = dtype_of("bfloat16")
    with gloo_options(library=library):
        dist.init_process_group("gloo", timeout=60)
        arrays = [held(rank, 1001, dtype) for rank in range(me.size)]
        mine = arrays[me.rank]
        out = np.empty(2 * mine.size, dtype)
        dist.all_gather_into_tensor(out, mine)
        np.testing.assert_array_equal(out, np.concatenate(arrays))
        x = mine.copy()
        dist.broadcast(x, 1)
        np.testing.assert_array_equal(x, arrays[1])
        x = mine.copy()
        with dist.coalescing_manager():
            dist.all_reduce(x)
            dist.all_reduce(y := mine.copy())
        wanted = reduced(dist.ReduceOp.SUM, arrays)
        np.testing.assert_array_equal(x, wanted)
        np.testing.assert_array_equal(y, wanted)
        dist.destroy_process_group()


@pytest.mark.processes
@each_library
def test_bfloat16_is_moved_and_fused(library: str) -> None:
    run_ranks(2, moves, library)


def apart(me: Rank, library: str) -> str:
    """The ranks disagree in the dtype."""
    dtype = dtype_of(["float16", "bfloat16"][me.rank])
    with gloo_options(library=library):
        dist.init_process_group("gloo", timeout=60)
        dist.barrier()
        with pytest.raises(dist.DistError) as caught:
            dist.all_reduce(np.ones(3, dtype))
        dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.processes
@each_library
def test_ranks_whose_narrow_dtypes_differ_are_told_so(library: str) -> None:
    for said in run_ranks(2, apart, library):
        assert "dtype" in said
        assert "bfloat16" in said


@pytest.mark.parametrize("name", ["float8_e4m3fn", "int4"])
def test_other_dtypes_of_ml_dtypes_are_refused(name: str) -> None:
    x = np.zeros(3, getattr(ml_dtypes, name))
    with pytest.raises(TypeError, match=f"x has dtype {name}; expected bool, an integ"):
        native(x, "cpu", "x", "all_reduce")
