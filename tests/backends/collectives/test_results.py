"""The result of a Work: the caller's own objects, as c10d gives its tensors back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rankscope as dist


class Tensor:
    """What exports its memory and is no array of numpy, as a tensor of torch."""

    def __init__(self, value: float) -> None:
        self.array = np.full(2, value)

    def __dlpack__(self, **how: Any) -> Any:
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self.array.__dlpack_device__()


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("cpu:tcp", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


Issue = Callable[[Any, Any], dist.Work | None]

CASES: dict[str, Issue] = {
    "all_reduce": lambda out, _: dist.all_reduce(out, async_op=True),
    "average": lambda out, _: dist.all_reduce(out, dist.ReduceOp.AVG, async_op=True),
    "reduce": lambda out, _: dist.reduce(out, 0, async_op=True),
    "broadcast": lambda out, _: dist.broadcast(out, 0, async_op=True),
    "all_gather": lambda out, x: dist.all_gather((out,), x, async_op=True),
    "into_tensor": lambda out, x: dist.all_gather_into_tensor(out, x, async_op=True),
    "gather": lambda out, x: dist.gather(x, [out], 0, async_op=True),
    "scatter": lambda out, x: dist.scatter(out, [x], 0, async_op=True),
    "all_to_all": lambda out, x: dist.all_to_all([out], [x], async_op=True),
    "single": lambda out, x: dist.all_to_all_single(out, x, async_op=True),
    "reduce_scatter": lambda out, x: dist.reduce_scatter(out, [x], async_op=True),
    "tensor": lambda out, x: dist.reduce_scatter_tensor(out, x, async_op=True),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", CASES)
def test_a_work_gives_back_what_the_caller_gave(name: str) -> None:
    output, given = Tensor(0.0), Tensor(3.0)
    work = CASES[name](output, given)
    assert work is not None
    work.wait()
    assert work.result() == [output]
    assert work.get_future().value() == [output]
    in_place = name in {"all_reduce", "average", "reduce", "broadcast"}
    assert output.array.tolist() == [0.0 if in_place else 3.0] * 2


@pytest.mark.usefixtures("alone")
def test_a_block_gives_each_op_its_own() -> None:
    one, other = Tensor(1.0), Tensor(2.0)
    with dist.coalescing_manager():
        works = [
            dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True) for x in (one, other)
        ]
    for work, x in zip(works, (one, other), strict=True):
        assert work is not None
        work.wait()
        assert work.result() == [x]
