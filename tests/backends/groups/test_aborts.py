"""Abort on every CPU backend: in each op, in each state, a hundred times."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rankscope.backends import unavailable_reason
from rankscope.backends.conformance.mpi_ranks import mpiexec
from rankscope.conformance import (
    MPI,
    Options,
    Processes,
    Result,
    Setup,
    check_backend,
)

pytestmark = pytest.mark.processes

BACKENDS = [
    "tcp",
    pytest.param(
        "mpi",
        marks=pytest.mark.skipif(
            unavailable_reason("mpi") is not None or mpiexec() is None,
            reason="needs MPI",
        ),
    ),
    pytest.param(
        "ucx",
        marks=pytest.mark.skipif(
            unavailable_reason("ucx") is not None, reason="needs UCX"
        ),
    ),
    "store",
]


def check(backend: str, rule: str, size: int, options: Options) -> Result:
    """Try one rule on `size` ranks; it holds."""
    modules = ("tests.backends.store_backend:register",) if backend == "store" else ()
    report = check_backend(
        Setup(backend, modules=modules, options=options),
        [size],
        rules=[rule],
        session=MPI if backend == "mpi" else Processes,
    )
    (result,) = report.results
    assert result.status == "held", "\n".join(result.lines())
    return result


@pytest.mark.parametrize("count", [4, 1 << 18])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_waiter_returns_and_the_group_is_rebuilt(
    backend: str, count: int, record_property: Callable[[str, object], None]
) -> None:
    # Half a second is what is wanted of an idle machine.
    options = Options(timeout=60, hung_count=count, abort_seconds=5)
    result = check(backend, "abort while hung", 3, options)
    record_property("abort_to_last_waiter_s", result.notes["abort_s"])
    assert result.cases == 13


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_op_that_all_ranks_are_in(backend: str) -> None:
    options = Options(timeout=60, running_bytes=16 << 20, running_times=6)
    result = check(backend, "abort while running", 2, options)
    assert result.notes["aborted_while_running"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hundred_cycles_leak_nothing(backend: str) -> None:
    # In every second cycle an op is aborted.
    options = Options(timeout=60, cycles=200)
    result = check(backend, "leaves nothing behind", 2, options)
    # MPI's heap settles late: 7 MiB after 200 cycles, 9 MiB after 400.
    assert result.notes["grown_mib"] < 16
