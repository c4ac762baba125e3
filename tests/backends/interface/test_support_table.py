"""``docs/backends.md``: up to date, and every cell of its tables exercised."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance import exact, surface
from rankscope.backends.conformance.mpi_ranks import mpiexec, run_mpi_ranks
from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.interface.base import Backend
from rankscope.backends.interface.staging import StagedBackend
from tests.backends.store_backend import StoreBackend
from tools import support_table

_gloo = pytest.mark.skipif(
    not dist.is_gloo_available(), reason="pygloo has no wheel for this Python"
)
_mpi = [
    pytest.mark.mpi,
    pytest.mark.skipif(
        not dist.is_mpi_available() or mpiexec() is None,
        reason="mpi4py or mpiexec is missing: pip install -e .[dev,mpi]",
    ),
]
_BACKENDS = [pytest.param("gloo", marks=_gloo), pytest.param("mpi", marks=_mpi)]


def run(backend: str, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function` on two ranks, started as `backend` needs it."""
    start = run_mpi_ranks if backend == "mpi" else run_ranks
    return start(2, function, backend, *args, timeout=170)


@contextlib.contextmanager
def world(config: str) -> Iterator[None]:
    """The default group, from the environment of the ranks."""
    dist.init_process_group(config, timeout=60)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_the_page_is_up_to_date() -> None:
    text = support_table.PAGE.read_text(encoding="utf-8")
    assert support_table.page(text) == text, "run python -m tools.support_table"


def test_the_base_class_adds_no_op_that_the_table_lacks() -> None:
    other = {
        *("register_backend", "refresh", "check", "coalescing", "scratch"),
        *(
            "state",
            "default_device",
            "prepare",
            "reduction",
            "split_from",
            "abort",
            "shutdown",
        ),
    }
    methods = {name for name, value in vars(Backend).items() if callable(value)}
    methods |= {n for n, v in vars(Backend).items() if isinstance(v, classmethod)}
    assert {name for name in methods if name[0] != "_"} == {*support_table.OPS} | other


def test_what_is_missing_is_said_to_be() -> None:
    bare = Backend(0, 2)
    for op in support_table.OPS:
        if support_table.support(Backend, op) is None:
            continue
        raise AssertionError(f"the base class has a {op} of its own")
    with pytest.raises(NotImplementedError, match="does not implement all_gather"):
        bare.all_gather([], np.ones(1))


# -- every operation -----------------------------------------------------------


def watch(kind: type[Backend]) -> set[str]:
    """The ops that are called on backends of `kind` from now on."""
    called: set[str] = set()

    def watched(op: str) -> Callable[..., dist.Work]:
        method = getattr(kind, op)

        def call(self: Backend, *args: Any) -> dist.Work:
            called.add(op)
            return method(self, *args)

        return call

    for op in support_table.OPS:
        setattr(kind, op, watched(op))
    return called


def ops_on_host(me: Rank, backend: str) -> set[str]:
    if backend == "store":
        dist.Backend.register_backend("store", StoreBackend, devices="cpu")
        called = watch(StoreBackend)
    else:
        called = watch(support_table.classes()[backend])
    with world(f"cpu:{backend}"):
        exact.check_everything(
            exact.Checker(), sizes=[7], reducible=["float64"], movable=["uint8"]
        )
        surface.everything()
    return called


@pytest.mark.parametrize("backend", [*_BACKENDS, "store"])
def test_every_operation_is_exercised_and_exact(backend: str) -> None:
    for called in run(backend, ops_on_host):
        assert called == {*support_table.OPS}


def ops_elsewhere(me: Rank, backend: str) -> set[str]:
    called = watch(StagedBackend)
    with world(f"cpu:{backend},ext:{backend}"):
        surface.staged()
    return called


@pytest.mark.parametrize("backend", _BACKENDS)
def test_every_staged_operation_is_exercised_and_exact(backend: str) -> None:
    for called in run(backend, ops_elsewhere):
        # A rank sends or receives, and the other one does the other.
        assert called | {"send", "recv"} == {*support_table.OPS}
        assert called & {"send", "recv"}


# -- every dtype with every reduction --------------------------------------------

_UFUNCS: dict[dist.ReduceOp, Any] = {
    **exact.NUMPY,
    dist.ReduceOp.BAND: np.bitwise_and,
    dist.ReduceOp.BOR: np.bitwise_or,
    dist.ReduceOp.BXOR: np.bitwise_xor,
}


def wrong_cells(me: Rank, backend: str) -> list[str]:
    wrong = []
    table = support_table.reductions(backend)
    with world(f"cpu:{backend}"):
        for dtype, row in table.items():
            held = [exact.data(rank, 33, dtype) for rank in range(me.size)]
            for op, how in row.items():
                said = outcome(held[me.rank].copy(), op, held)
                if said != ("refused" if how is None else "exact"):
                    wrong.append(f"{dtype} {op.name}, {how} in the table: {said}")
    return wrong


def outcome(x: Any, op: dist.ReduceOp, held: list[Any]) -> str:
    """What an all_reduce of `x` comes to: ``"exact"``, ``"refused"``, or else."""
    before = x.copy()
    try:
        dist.all_reduce(x, op)
    except (TypeError, ValueError) as error:
        np.testing.assert_array_equal(x, before)
        return "refused" if "all_reduce #" not in str(error) else str(error)
    if op is dist.ReduceOp.AVG:
        wanted = exact.reduced(op, held)
    else:
        wanted = _UFUNCS[op](*held).astype(x.dtype)
    return "exact" if np.array_equal(x, wanted) else f"{x} and not {wanted}"


@pytest.mark.parametrize("backend", _BACKENDS)
def test_every_dtype_with_every_reduction(backend: str) -> None:
    for wrong in run(backend, wrong_cells):
        assert wrong == []
