"""NaN, infinities and signed zeros in reductions: numpy's rules, on every backend.

One program per backend goes through dtypes, sizes and reductions; which elements are
special on which rank is drawn, alike on all ranks, so that each knows what the others
have.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.mpi_ranks import mpiexec, run_mpi_ranks
from rankscope.backends.conformance.ranks import Rank, run_ranks
from tests.backends.backends import HOST_BACKENDS

pytestmark = pytest.mark.processes

DTYPES = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16]
# The last one takes another algorithm, with three ranks and with four: above 256 KiB.
NBYTES = [1, 64, 8192, 257 << 10]
OPS: dict[str, tuple[dist.ReduceOp, Any]] = {
    "MIN": (dist.ReduceOp.MIN, np.minimum),
    "MAX": (dist.ReduceOp.MAX, np.maximum),
    "SUM": (dist.ReduceOp.SUM, np.add),
}
SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0]


def inputs(seed: int, ranks: int, size: int, dtype: Any) -> list[np.ndarray]:
    """Return what each rank has: small integers, whose sums are exact, and specials."""
    draw = np.random.default_rng(seed)
    arrays = draw.integers(-8, 9, (ranks, size)).astype(dtype)
    # About every fourth element is special on some rank; the case is first.
    places = draw.random((ranks, size)) < 0.25 / ranks
    arrays[places] = draw.choice(SPECIAL, places.sum()).astype(dtype)
    arrays[draw.integers(ranks), draw.integers(size)] = np.nan
    return list(arrays)


def reductions(me: Rank, backend: str) -> int:
    """Return how many arrays were reduced, in all_reduce and in reduce_scatter."""
    dist.init_process_group(backend, timeout=60)
    done = 0
    for dtype in DTYPES:
        for nbytes in NBYTES:
            size = 1 + nbytes // np.dtype(dtype).itemsize
            for name, (op, ufunc) in OPS.items():
                given = inputs(done, me.size, size, dtype)
                with np.errstate(invalid="ignore"):
                    wanted = reduce(ufunc, given)
                # What the program has numpy do in its own arithmetic is not for ours.
                with np.errstate(all="raise"):
                    result = given[me.rank].copy()
                    dist.all_reduce(result, op=op)
                    output = np.empty(size, dtype)
                    dist.reduce_scatter(output, [given[me.rank]] * me.size, op=op)
                for found in (result, output):
                    where = f"{name} of {size} {np.dtype(dtype).name}"
                    np.testing.assert_array_equal(
                        found.astype(np.float64), wanted.astype(np.float64), where
                    )
                # The same bits on every rank: of a zero the sign, of a NaN the payload.
                bits = result.view(np.uint8)
                everywhere = [np.empty_like(bits) for _ in range(me.size)]
                dist.all_gather(everywhere, bits)
                assert all((one == bits).all() for one in everywhere), where
                done += 1
    dist.destroy_process_group()
    return done


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_special_floats_are_reduced_as_numpy_does(backend: str, world: int) -> None:
    done = run_ranks(world, reductions, backend, timeout=150)
    assert {*done} == {len(DTYPES) * len(NBYTES) * len(OPS)}


@pytest.mark.mpi
@pytest.mark.skipif(
    not dist.is_mpi_available() or mpiexec() is None,
    reason="needs mpi4py and mpiexec",
)
def test_special_floats_are_reduced_as_numpy_does_over_mpi() -> None:
    run_mpi_ranks(3, reductions, "mpi", timeout=150)


def averages(me: Rank, backend: str) -> None:
    """What is divided after the sum, and multiplied before it."""
    dist.init_process_group(backend, timeout=60)
    x = np.full(3, [np.inf, 1e-38, -np.inf][me.rank], np.float32)
    y = np.full(3, 60_000, np.float16)
    with np.errstate(all="raise"):
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        dist.all_reduce(y, op=dist.make_nccl_premul_sum(2.0))
    assert np.isnan(x).all()
    assert np.isinf(y).all()
    dist.destroy_process_group()


def test_arithmetic_beside_a_reduction_ends_no_group() -> None:
    run_ranks(3, averages, "tcp")


def the_case_of_gloo(me: Rank, backend: str) -> None:
    """Maxima that gloo's own arithmetic loses beside a NaN."""
    dist.init_process_group(backend, timeout=60)
    x = np.full(200_000, [1.0, 2.0, 9.0, np.nan][me.rank], np.float32)
    if me.rank == 3:
        x[::2] = 0
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    assert (x[::2] == 9).all()
    assert np.isnan(x[1::2]).all()
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_no_maximum_is_lost_beside_a_nan(backend: str) -> None:
    run_ranks(4, the_case_of_gloo, backend)
