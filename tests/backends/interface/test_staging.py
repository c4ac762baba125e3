"""Staging: which arrays an op copies to host memory, and which it copies back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends import OpType, Work
from rankscope.backends.interface import staging
from rankscope.backends.interface.base import Backend
from rankscope.backends.interface.staging import StagedBackend
from rankscope.backends.work.op_type import Argument, OpSpec


class Remote:
    """An array elsewhere; its values are reached by copies alone."""

    def __init__(self, *values: float) -> None:
        self.values = np.array(values)
        self.shape, self.dtype, self.size = self.values.shape, self.values.dtype, 1
        self.read = self.written = 0


def to_host(array: Remote) -> np.ndarray:
    array.read += 1
    return array.values.copy()


def from_host(host: np.ndarray, array: Remote) -> None:
    array.written += 1
    array.values[...] = host


class Inner(Backend):
    """Rank 1 of 2; every op puts 7 into what its method's row says is written."""

    name = "inner"

    def run(self, op: OpType, args: Sequence[Any]) -> Work:
        work = Work(op)
        work.mark_started()
        for argument, value in zip(op.spec.arguments or (), args, strict=False):
            for array in value if isinstance(value, list) else [value]:
                assert type(array) is np.ndarray
                if argument not in (Argument.READ, Argument.READ_LIST):
                    array.fill(7)
        work.mark_completed()
        return work


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> StagedBackend:
    monkeypatch.setattr(
        staging, "staging_for", lambda *names: staging.Copies(to_host, from_host)
    )
    return StagedBackend(Inner(1, 2), "elsewhere")


@pytest.mark.parametrize(
    ("arguments", "args", "read", "written"),
    [
        ([Argument.READ], [Remote(1)], 1, 0),
        ([Argument.WRITTEN], [Remote(1)], 0, 1),
        ([Argument.UPDATED], [Remote(1), dist.ReduceOp.SUM], 1, 1),
        ([Argument.FROM_ROOT], [Remote(1), 0], 0, 1),
        ([Argument.FROM_ROOT], [Remote(1), 1], 1, 0),
        ([Argument.TO_ROOT], [Remote(1), 0, dist.ReduceOp.SUM], 1, 0),
        ([Argument.TO_ROOT], [Remote(1), 1, dist.ReduceOp.SUM], 1, 1),
        ([Argument.READ_LIST], [[Remote(1), Remote(2)]], 1, 0),
        ([Argument.WRITTEN_LIST], [(Remote(1), Remote(2))], 0, 1),
        ([Argument.UPDATED], [[Remote(1), Remote(2)]], 1, 1),  # coalesced
    ],
)
def test_the_row_of_an_op_says_what_is_copied(
    backend: StagedBackend,
    arguments: list[Argument],
    args: list[Any],
    read: int,
    written: int,
) -> None:
    op = object.__new__(OpType)
    op._name_ = op._value_ = "made_up"
    op.spec = OpSpec(arguments=tuple(arguments))
    passed: list[Any] = []

    def made_up(*given: Any) -> Work:
        passed.extend(given)
        return Inner(1, 2).run(op, given)

    backend.inner.made_up = made_up  # type: ignore[attr-defined]
    backend._stage(op, "made_up", args).wait()
    arrays = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
    assert [(one.read, one.written) for one in arrays] == [(read, written)] * len(
        arrays
    )
    assert all(one.values == 7 for one in arrays) or not written
    assert passed[1:] == args[1:]


def test_a_list_that_only_the_root_has_is_none_elsewhere(
    backend: StagedBackend,
) -> None:
    passed: list[Any] = []

    def gather(*given: Any) -> Work:
        passed.extend(given)
        return Inner(1, 2).run(OpType.BARRIER, ())

    backend.inner.gather = gather  # type: ignore[assignment]
    backend.gather(Remote(1), None, 0).wait()
    assert passed[1:] == [None, 0]


def test_every_op_of_a_backend_can_be_staged() -> None:
    for op in OpType:
        names = [op.value] if op.spec.arguments is not None else []
        names += [f"{op.value}_coalesced"] if op.spec.fused else []
        for name in names:
            assert getattr(StagedBackend, name) is not getattr(Backend, name)
