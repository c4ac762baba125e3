"""One row for each op, and no second table of ops: a made-up row reaches every reader.

Readers that run an op are in `test_coalescing` and `test_device_arrays`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rankscope.backends
from rankscope.backends.benchmark import BENCHMARKS
from rankscope.backends.conformance import calls, exact
from rankscope.backends.groups.key import GroupKey
from rankscope.backends.interface.base import Backend
from rankscope.backends.observe.diagnosis import diagnose
from rankscope.backends.observe.torch_format import flight_recorder
from rankscope.backends.observe.verdicts import Fault, RankView
from rankscope.backends.work import op_type
from rankscope.backends.work.flight_recorder import GroupCounters, Record
from rankscope.backends.work.op_type import Argument, OpSpec, OpType, spec_of
from tools import support_table

# -- the rows ------------------------------------------------------------------


@pytest.mark.parametrize("op", list(OpType), ids=str)
def test_the_row_of_an_op_is_found_by_its_name(op: OpType) -> None:
    assert isinstance(op.spec, OpSpec)
    assert spec_of(op.value) is op.spec
    assert op.is_p2p is op.spec.is_p2p


def test_a_name_that_is_no_ops_has_the_row_of_an_unknown_op() -> None:
    assert spec_of("batch_isend_irecv") is OpType.UNKNOWN.spec


@pytest.mark.parametrize("op", [op for op in OpType if op.spec.arguments is not None])
def test_an_op_that_backends_run_has_the_methods_of_its_row(op: OpType) -> None:
    methods = [op.value, *([f"{op.value}_coalesced"] if op.spec.fused else [])]
    lacking = [name for name in methods if not callable(getattr(Backend, name, None))]
    assert not lacking, f"backends/interface/base.py: Backend has no {lacking}"


@pytest.mark.parametrize("op", [op for op in OpType if op.spec.arguments is not None])
def test_an_op_that_backends_run_is_public(op: OpType) -> None:
    assert op.value in rankscope.backends.__all__, (
        f"no public {op.value}: define it in a module of backends/collectives/, and "
        "name it in backends/__init__.pyi"
    )


def test_what_is_measured_has_a_benchmark() -> None:
    measured = {op.value for op in OpType if op.spec.measured}
    assert measured == {*BENCHMARKS} - {"batch_isend_irecv"}


@pytest.mark.parametrize(
    ("arguments", "arrays", "inputs"),
    [
        ([Argument.READ, Argument.WRITTEN_LIST], 4, 1),
        ([Argument.READ, Argument.WRITTEN_LIST], 1, 1),  # not the root
        ([Argument.WRITTEN, Argument.READ_LIST], 4, 3),
        ([Argument.WRITTEN, Argument.READ_LIST], 1, 0),  # not the root
        ([Argument.WRITTEN_LIST, Argument.READ_LIST], 6, 3),
        ([Argument.WRITTEN, Argument.READ], 2, 1),
        ([], 0, 0),
    ],
)
def test_the_inputs_of_a_record(
    arguments: list[Argument], arrays: int, inputs: int
) -> None:
    assert OpSpec(arguments=tuple(arguments)).inputs(arrays) == inputs


# -- its readers ---------------------------------------------------------------


@pytest.fixture
def rotate(monkeypatch: pytest.MonkeyPatch) -> OpType:
    """An op type of this test's own, unlike every other."""
    op = object.__new__(OpType)
    op._name_, op._value_ = "ROTATE", "rotate"
    op.is_p2p = False
    op.spec = OpSpec(
        arguments=(Argument.WRITTEN, Argument.READ_LIST),
        payload=lambda counts, ranks: 10 * counts[1] + ranks,
        bus_factor=lambda ranks: 7.0 * ranks,
        same_sizes=slice(1, 2),
        fused=True,
        torch_name="_rotate",
        torch_coalesced="_rotate_many",
        torch_uneven="_rotate_v",
    )
    monkeypatch.setitem(OpType._value2member_map_, "rotate", op)
    monkeypatch.setitem(OpType._member_map_, "ROTATE", op)
    monkeypatch.setattr(OpType, "_member_names_", [*OpType._member_names_, "ROTATE"])
    return op


GROUP = GroupKey("default", (0, 1))


def entries(op: OpType, *runs: list[tuple[int, ...]]) -> list[dict[str, Any]]:
    """Records of one batch of `op` on arrays of these shapes, as plain data."""
    status = GroupCounters("default", 0, 0, range(2), GROUP.id)
    found = []
    for place, shapes in enumerate(runs):
        arrays = [np.empty(shape, np.float32) for shape in shapes]
        record = Record(status, op, arrays, None, 60.0, "tcp")
        record.number(first=not place)
        found.append(record.as_dict())
    return found


def test_bandwidths_are_those_of_the_row(rotate: OpType) -> None:
    assert op_type.payload("rotate", [(1,), (5,)], 4, 3) == (10 * 5 + 3) * 4
    assert op_type.bus_factor("rotate", 3) == 21.0
    arrays = [np.empty(1, np.float32), np.empty(5, np.float32)]
    record = Record(GroupCounters("g", 0, 0, range(3)), rotate, arrays, None, 1.0)
    assert record.traffic()["nbytes"] == (10 * 5 + 3) * 4


def test_pytorchs_names_are_those_of_the_row(rotate: OpType) -> None:
    def dumped(*runs: list[tuple[int, ...]]) -> dict[str, Any]:
        groups = {GROUP.id: {"name": GROUP.name, "ranks": GROUP.ranks}}
        (entry,) = flight_recorder(0, groups, entries(rotate, *runs))["entries"]
        return {**entry, "profiling_name": entry["profiling_name"][5:]}

    even = dumped([(3,), (3,), (4,)])
    assert even["profiling_name"] == "_rotate"
    assert (even["input_sizes"], even["output_sizes"]) == ([[2, 3]], [[4]])
    both = dumped([(3,), (3,), (4,)], [(3,), (3,), (4,)])
    assert both["profiling_name"] == "_rotate_many"
    assert dumped([(3,), (2,), (4,)])["profiling_name"] == "_rotate_v"


def test_the_diagnosis_compares_the_array_of_the_row(rotate: OpType) -> None:
    def views(*shapes: list[tuple[int, ...]]) -> dict[int, RankView]:
        return {
            rank: RankView(rank, entries(rotate, each), now_ns=1 << 63)
            for rank, each in enumerate(shapes)
        }

    differ = diagnose({GROUP: 0}, views([(3,), (4,)], [(3,), (5,)]), 1.0)
    assert [verdict.fault for verdict in differ] == [Fault.SIZE_MISMATCH]
    agree = diagnose({GROUP: 0}, views([(3,), (4,)], [(9,), (4,)]), 1.0)
    assert [verdict.fault for verdict in agree] == [Fault.EXECUTION_HANG]


def test_the_support_table_lists_what_has_a_row(rotate: OpType) -> None:
    assert {"rotate", "rotate_coalesced"} < {*support_table.ops()}


# -- no second table -----------------------------------------------------------


def _tables_of_ops(tree: ast.Module) -> Iterator[int]:
    """The lines of the literals that name three ops or more, but for ``__all__``."""
    names = {op.value for op in OpType}
    statements = [
        statement
        for statement in tree.body
        if not isinstance(statement, ast.Assign)
        or ast.unparse(statement.targets[0]) != "__all__"
    ]
    for node in ast.walk(ast.Module(statements, [])):
        if isinstance(node, (ast.Dict, ast.Tuple, ast.List, ast.Set)):
            keys = node.keys if isinstance(node, ast.Dict) else node.elts
            ops = 0
            for key in keys:
                match key:
                    case ast.Constant(value=value):
                        ops += value in names
                    case ast.Attribute(value=ast.Name(id="OpType")):
                        ops += 1
                    case ast.Attribute(
                        attr="value", value=ast.Attribute(value=ast.Name(id="OpType"))
                    ):
                        ops += 1
            if ops >= 3:
                yield node.lineno


def test_no_module_but_the_transports_has_a_table_of_ops() -> None:
    root = Path(rankscope.backends.__file__).parent.parent
    # The conformance suite tries each op by itself; `torch_watch` has the methods of
    # torch's own process groups.
    names = ("tcp", "gloo", "mpi", "nccl", "conformance", "torch_watch")
    transports = {root / "backends" / name for name in names}
    # What torch's records and logs hold of its own ops, and lack.
    transports |= {
        root / "backends" / "observe" / "root_cause",
        root / "backends" / "post_mortem",
    }
    # What makes the arrays and checks the result of each op that is measured, the
    # public names, and what the docs say of NCCL's functions.
    apart = {
        root / "tools" / "support_table.py",
        root / "backends" / "benchmark_cases.py",
        root / "backends" / "__init__.py",
    }
    found = [
        f"{file.relative_to(root)}:{line}"
        for room in ("backends", "engines", "magics", "widgets", "tools")
        for file in sorted((root / room).rglob("*.py"))
        if file not in apart and transports.isdisjoint(file.parents)
        for line in _tables_of_ops(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert found == []


def test_the_conformance_suite_tries_every_op_of_a_backend() -> None:
    ops = {op.value for op in OpType if op.spec.arguments is not None}
    assert {*calls.OPS, "send"} == ops, (
        "conformance/calls.py: OPS, and the calls of start(), are not the ops of OpType"
    )
    # It tries send with recv, and a barrier, which moves nothing, by a rule of its own.
    assert {*exact.OPS, "send", "recv", "barrier"} == ops | {"send_and_recv"}, (
        "conformance/exact.py: WITH_REDUCE_OP, WITHOUT_REDUCE_OP and the methods of "
        "Checker are not the ops of OpType"
    )


@pytest.mark.parametrize("op", OpType, ids=lambda op: op.value)
def test_the_arrays_that_an_op_reads_are_told_by_its_arguments(op: OpType) -> None:
    lists = (Argument.READ_LIST, Argument.WRITTEN_LIST)
    arrays = [
        (argument, place)
        for argument in op.spec.arguments or ()
        for place in range(3 if argument in lists else 1)
    ]
    read = [
        one for one in arrays if one[0] not in (Argument.WRITTEN, Argument.WRITTEN_LIST)
    ]
    assert list(op.spec.read_of(arrays)) == read
    # Those of two calls, argument by argument.
    arrays, read = ([one for one in ones for _ in range(2)] for ones in (arrays, read))
    assert list(op.spec.read_of(arrays, 2)) == read
    # A barrier's array is the backend's own.
    if op is OpType.BARRIER:
        assert list(op.spec.read_of(["scratch"])) == []
