"""``docs/backends.md``: up to date, and every cell of its tables exercised."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance import reference
from rankscope.backends.conformance.checker import Checker
from rankscope.backends.conformance.mpi_ranks import mpiexec, run_mpi_ranks
from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.interface.base import Backend
from rankscope.backends.interface.staging import StagedBackend
from rankscope.backends.work.op_type import Argument
from tests.backends import whole_surface
from tests.backends.store_backend import StoreBackend
from tools import support_table

_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
_mpi = [
    pytest.mark.mpi,
    pytest.mark.skipif(
        not dist.is_mpi_available() or mpiexec() is None,
        reason="mpi4py or mpiexec is missing: pip install -e .[dev,mpi]",
    ),
]
_ucx = pytest.mark.skipif(
    dist.unavailable_reason("ucx") is not None,
    reason="needs UCX: pip install -e .[ucx]",
)
_BACKENDS = [
    "tcp",
    pytest.param("gloo", marks=_gloo),
    pytest.param("mpi", marks=_mpi),
    pytest.param("ucx", marks=_ucx),
]


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


#: What the cells of `all_reduce` say after their first sentence.
_EXCEPT: dict[tuple[str, str], set[str]] = {
    ("int16", "nccl"): set(),
    ("uint16", "nccl"): set(),
}


def _said(cell: str) -> set[str]:
    names = {*re.findall(r"[A-Z_]{2,}", cell.partition(";")[0])}
    return {op.name for op in dist.ReduceOp} - names if "all but" in cell else names


def test_all_reduce_says_what_the_tables_say() -> None:
    text = inspect.getdoc(dist.all_reduce) or ""
    _, heads, table, _ = re.split(r"\n=+  =+  =+\n", text)
    assert heads.split() == ["dtype", "tcp,", "ucx,", "mpi,", "gloo", "nccl"]
    columns = ((0, 20), (20, 47), (47, 88))
    rows = {}
    for line in table.splitlines():
        kind, host, nccl = (line[a:b].strip() for a, b in columns)
        if kind:
            rows[kind.split(",")[0].rstrip("s")] = (host, nccl)
    kinds = {"i": "integer", "u": "integer", "b": "bool", "f": "float", "c": "complex"}
    for name in support_table.classes():
        for dtype, row in support_table.reductions(name).items():
            host, nccl = rows[kinds[np.dtype(dtype).kind]]
            said = _said(nccl if name == "nccl" else host)
            has = {op.name for op, how in row.items() if how is not None}
            assert _EXCEPT.get((dtype, name), said) == has, (dtype, name)


def test_the_base_class_adds_no_op_that_the_table_lacks() -> None:
    other = {
        *("register_backend", "refresh", "check", "check_message", "coalescing"),
        *("suspend_lacks", "suspend", "resume", "memory_stats"),
        *(
            "state",
            "transports",
            "default_device",
            "prepare",
            "split_from",
            "abort",
            "shutdown",
        ),
    }
    # A method that is neither is an op without a row in OpType, or belongs to `other`.
    methods = {name for name, value in vars(Backend).items() if callable(value)}
    methods |= {n for n, v in vars(Backend).items() if isinstance(v, classmethod)}
    assert {name for name in methods if name[0] != "_"} == {*support_table.OPS} | other


def arguments(op: str) -> list[Any]:
    """Arguments for the method `op` on a rank of two."""
    single = op.removesuffix("_coalesced")
    spec = dist.OpType(single).spec
    lists = (Argument.READ_LIST, Argument.WRITTEN_LIST)
    # The array that holds the parts of both ranks is twice as long as the other one.
    sizes = {"all_gather_into_tensor": (4, 2), "reduce_scatter_tensor": (2, 4)}
    found: list[Any] = []
    for place, argument in enumerate(spec.arguments or ()):
        array = np.ones(sizes.get(single, (4, 4))[place])
        found.append([array, array] if argument in lists else array)
    if single != op:
        found = [[array] for array in found]
    others: dict[str, Any] = {"src": 1, "dst": 1, "op": dist.ReduceOp.SUM, "tag": 0}
    others |= {"output_split_sizes": [2, 2], "input_split_sizes": [2, 2]}
    names = list(inspect.signature(getattr(Backend, single)).parameters)[1:]
    return found + [others[name] for name in names[len(found) :]]


@pytest.mark.parametrize("op", support_table.OPS)
def test_the_fallback_of_an_op_is_the_method_of_its_row(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def recorded(name: str) -> Callable[..., dist.Work]:
        def method(self: Backend, *args: Any) -> dist.Work:
            called.append(name)
            work = dist.Work(dist.OpType.UNKNOWN)
            work.mark_completed()
            return work

        return method

    class Others(Backend):
        """Has every op but `op`."""

    for name in support_table.OPS:
        if name != op:
            setattr(Others, name, recorded(name))
    fallback = support_table.fallback(op)
    method = getattr(Others(0, 2), op)
    if fallback is None:
        with pytest.raises(NotImplementedError, match=f"does not implement {op}$"):
            method(*arguments(op))
    else:
        method(*arguments(op))
    assert called == ([] if fallback is None else [fallback])


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


def supported(backend: str) -> set[str]:
    """The ops of the table that `backend` has, by itself or by a fallback."""
    kind = StoreBackend if backend == "store" else support_table.classes()[backend]
    return {op for op in support_table.OPS if support_table.support(kind, op)}


def ops_on_host(me: Rank, backend: str) -> set[str]:
    if backend == "store":
        dist.Backend.register_backend("store", StoreBackend, devices="cpu")
        called = watch(StoreBackend)
    else:
        called = watch(support_table.classes()[backend])
    with world(f"cpu:{backend}"):
        whole_surface.check_everything(
            Checker(),
            sizes=[7],
            reducible=["float64"],
            movable=["uint8"],
            lacking={*support_table.OPS} - supported(backend),
        )
        whole_surface.built_on_ops()
    return called


@pytest.mark.processes
@pytest.mark.parametrize("backend", [*_BACKENDS, "store"])
def test_every_operation_is_exercised_and_exact(backend: str) -> None:
    for called in run(backend, ops_on_host):
        assert called == supported(backend)


def ops_elsewhere(me: Rank, backend: str) -> set[str]:
    called = watch(StagedBackend)
    with world(f"cpu:{backend},ext:{backend}"):
        whole_surface.staged()
    return called


@pytest.mark.processes
@pytest.mark.parametrize("backend", _BACKENDS)
def test_every_staged_operation_is_exercised_and_exact(backend: str) -> None:
    for called in run(backend, ops_elsewhere):
        # A rank sends or receives, and the other one does the other.
        assert called | {"send", "recv"} == supported(backend)
        assert called & {"send", "recv"}


# -- every dtype with every reduction --------------------------------------------

_UFUNCS: dict[dist.ReduceOp, Any] = {
    **reference.NUMPY,
    dist.ReduceOp.BAND: np.bitwise_and,
    dist.ReduceOp.BOR: np.bitwise_or,
    dist.ReduceOp.BXOR: np.bitwise_xor,
}


def wrong_cells(me: Rank, backend: str) -> list[str]:
    wrong = []
    table = support_table.reductions(backend)
    with world(f"cpu:{backend}"):
        for dtype, row in table.items():
            held = [reference.data(rank, 33, dtype) for rank in range(me.size)]
            for op, how in row.items():
                said = outcome(held[me.rank].copy(), op, held)
                if said != ("refused" if how is None else "exact"):
                    wrong.append(f"{dtype} {op.name}, {how} in the table: {said}")
    return wrong


def outcome(x: Any, op: dist.ReduceOp, held: list[Any]) -> str:
    """What an all_reduce of `x` comes to: ``"exact"``, ``"refused"``, or else."""
    before = x.copy()
    premul = op is dist.ReduceOp.PREMUL_SUM
    try:
        dist.all_reduce(x, dist.make_nccl_premul_sum(0.5) if premul else op)
    except (TypeError, ValueError) as error:
        np.testing.assert_array_equal(x, before)
        return "refused" if "all_reduce #" not in str(error) else str(error)
    if premul:
        wanted = (sum(held) / 2).astype(x.dtype)
    elif op is dist.ReduceOp.AVG:
        wanted = reference.reduced(op, held)
    else:
        wanted = _UFUNCS[op](*held).astype(x.dtype)
    return "exact" if np.array_equal(x, wanted) else f"{x} and not {wanted}"


@pytest.mark.processes
@pytest.mark.parametrize("backend", _BACKENDS)
def test_every_dtype_with_every_reduction(backend: str) -> None:
    for wrong in run(backend, wrong_cells):
        assert wrong == []
