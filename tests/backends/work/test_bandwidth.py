"""The bandwidths are those that nccl-tests prints for the same op and time."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.backends.work import op_type
from rankscope.backends.work.flight_recorder import GroupCounters, Record
from rankscope.backends.work.op_type import OpType

# op, shapes of inputs and outputs on one rank of 4, S in elements, bus factor.
OPS = [
    ("all_reduce", [(1000,)], 1000, 1.5),
    ("broadcast", [(10, 100)], 1000, 1.0),
    ("reduce", [(1000,)], 1000, 1.0),
    ("all_gather", [(250,)] * 5, 1000, 0.75),
    ("all_gather_into_tensor", [(250,), (1000,)], 1000, 0.75),
    ("gather", [(250,)], 1000, 0.75),
    ("gather", [(250,)] * 5, 1000, 0.75),
    ("scatter", [(250,)], 1000, 0.75),
    ("scatter", [(250,)] * 5, 1000, 0.75),
    ("reduce_scatter", [(250,)] * 5, 1000, 0.75),
    ("reduce_scatter_tensor", [(1000,), (250,)], 1000, 0.75),
    ("all_to_all", [(100,), (200,), (300,), (400,), *[(250,)] * 4], 1000, 0.75),
    ("all_to_all_single", [(1000,), (1000,)], 1000, 0.75),
    ("send", [(1000,)], 1000, 1.0),
    ("recv", [(1000,)], 1000, 1.0),
]


@pytest.mark.parametrize(("op", "shapes", "elements", "factor"), OPS)
def test_formulas(
    op: str, shapes: list[tuple[int, ...]], elements: int, factor: float
) -> None:
    size = op_type.payload(op, shapes, 4, 4)
    assert size == elements * 4
    assert op_type.bus_factor(op, 4) == pytest.approx(factor)
    # 4000 bytes in 2 µs are 2 GB/s.
    assert op_type.algbw(size, 2e-6) == pytest.approx(2.0)
    assert op_type.busbw(op, size, 2e-6, 4) == pytest.approx(2.0 * factor)


def test_every_op_with_arrays_is_there() -> None:
    assert {op for op, *_ in OPS} == {one.value for one in OpType if one.spec.arguments}


def test_what_moves_nothing_has_no_payload() -> None:
    assert op_type.payload("barrier", [], 0, 4) is None


def test_one_rank_and_no_time() -> None:
    assert op_type.bus_factor("all_reduce", 1) == 1.0
    assert op_type.algbw(1000, 0.0) == 0.0


def test_a_record_tells_what_it_moves_in_bounded_words() -> None:
    status = GroupCounters("default", 0, 0, range(256))
    parts = [np.zeros(2, "float32")] * 257
    record = Record(status, OpType.ALL_GATHER, parts, None, 10.0)
    assert record.traffic() == {
        "nbytes": 256 * 2 * 4,
        "sizes": ((2,),) * 4,
        "dtypes": ("float32",) * 4,
    }
    assert record.duration is None
    record.started_ns, record.ended_ns = 1_000, 3_500
    assert record.duration == pytest.approx(2.5e-6)
