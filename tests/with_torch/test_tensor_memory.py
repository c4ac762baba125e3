"""A tensor's memory as an array: nothing is copied, and its storage stays as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rankscope.backends.devices.torch_memory import host_array


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.complex64]
)
def test_an_array_is_that_of_torch(dtype: torch.dtype) -> None:
    whole = torch.arange(12).reshape(3, 4).to(dtype)
    for tensor in whole, whole.T, whole[1:], whole[:, ::2], whole[0, 0], whole[:0]:
        ours, theirs = host_array(tensor), tensor.numpy()
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.flags.writeable
        assert np.array_equal(ours, theirs)
    host_array(whole)[0, 0] = 1
    assert whole[0, 0] == 1


def test_the_storage_can_be_resized_afterwards() -> None:
    """As FSDP1 does after each step; ``numpy()`` forbids it for good."""
    tensor = torch.ones(4)
    host_array(tensor)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="its storage has no memory"):
        host_array(tensor)


def test_an_array_keeps_its_tensor() -> None:
    array = host_array(torch.arange(1000.0))
    others = [torch.zeros(1000) for _ in range(10)]
    assert array.tolist() == list(range(1000)), len(others)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3, requires_grad=True), "requires grad"),
        (torch.zeros(3, dtype=torch.complex64).conj(), "conjugate bit"),
        (torch.zeros(3).to_sparse(), "[Ss]parse"),
        (torch.zeros(3, dtype=torch.bfloat16), "BFloat16"),
    ],
    ids=["grad", "conj", "sparse", "bfloat16"],
)
def test_what_numpy_cannot_share_raises_as_in_torch(tensor: Any, message: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match=message):
        host_array(tensor)
