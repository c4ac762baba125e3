"""CPU tensors of PyTorch: used where they are, in an environment that has PyTorch."""

from __future__ import annotations

import importlib.util

import pytest

from rankscope.backends.conformance.ranks import Rank, run_ranks
from tools.other_environments import torch_python

pytestmark = pytest.mark.processes


def with_tensors(me: Rank) -> str:
    import torch

    import rankscope as dist
    from tests.backends import store_backend

    store_backend.register()
    dist.init_process_group("cpu:store", timeout=60)
    x = torch.full((2, 3), float(me.rank + 1))
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((2, 3), 3.0))
    parts = [torch.zeros(2, dtype=torch.int64) for _ in range(me.size)]
    dist.all_gather(parts, torch.tensor([me.rank, 7]))
    assert [part.tolist() for part in parts] == [[0, 7], [1, 7]]
    flat = torch.zeros(4, dtype=torch.float16)
    dist.all_gather_into_tensor(flat, torch.full((2,), me.rank, dtype=torch.float16))
    assert flat.tolist() == [0, 0, 1, 1]
    with dist.coalescing_manager():
        some = [torch.ones(3), torch.ones(5)]
        for one in some:
            dist.all_reduce(one)
    assert all(bool((one == 2).all()) for one in some)
    leaf = torch.ones(3, requires_grad=True)
    dist.all_reduce(leaf)
    assert leaf.detach().tolist() == [2.0] * 3
    assert leaf.requires_grad
    assert leaf.grad_fn is None
    narrow = torch.full((2, 2), me.rank + 1.0, dtype=torch.bfloat16)
    if importlib.util.find_spec("ml_dtypes") is None:
        with pytest.raises(TypeError, match="pip install ml_dtypes"):
            dist.broadcast(narrow, 1)
    else:
        dist.broadcast(narrow, 1)
        assert narrow.tolist() == [[2.0, 2.0]] * 2
    for bad, message in (
        (torch.ones(3, 4).t(), "not C-contiguous"),
        (torch.ones(3, dtype=torch.complex32), "cannot be shared"),
        (torch.ones(3, dtype=torch.complex64).conj(), "conjugate bit"),
        (torch.eye(2).to_sparse(), "to_dense"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            dist.all_reduce(bad)
    dist.barrier()
    dist.destroy_process_group()
    return str(torch.__version__)


@pytest.mark.soak
def test_tensors_are_reduced_and_gathered_in_place() -> None:
    reasons: list[str] = []
    python = torch_python(print, reasons.append)
    if python is None:
        pytest.skip("; ".join(reasons))
    assert len(set(run_ranks(2, with_tensors, python=python))) == 1
