"""The table of torch's names: each is here, or one sentence says why not."""

from __future__ import annotations

import re

import pytest

import rankscope as dist
from tools import torch_names

HERE = [name for name in torch_names.names() if name not in torch_names.WHY_NOT]


@pytest.mark.parametrize("name", HERE)
def test_a_name_that_is_here_can_be_found(name: str) -> None:
    assert torch_names.find(name), f"say in tools/torch_names.py why {name} is not here"


def test_what_is_not_here_has_a_reason_of_one_sentence() -> None:
    assert set(torch_names.WHY_NOT) <= set(torch_names.names())
    for name, why in torch_names.WHY_NOT.items():
        assert not torch_names.find(name), f"{name} is here: {why}"
        text = re.sub(r"`[^`]*`", "x", why)
        assert re.fullmatch(r"[^.]+\.", text), (name, why)


def test_the_page_is_that_of_the_code() -> None:
    text = torch_names.PAGE.read_text(encoding="utf-8")
    assert torch_names.page(text) == text, "run python -m tools.torch_names"


def test_a_page_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for 'names'"):
        torch_names.page("")


def test_torchs_newer_names_are_the_same_functions() -> None:
    assert dist.all_gather_single is dist.all_gather_into_tensor
    assert dist.reduce_scatter_single is dist.reduce_scatter_tensor
    assert dist.all_gather_single_coalesced is dist.all_gather_into_tensor_coalesced
    assert dist.reduce_scatter_single_coalesced is dist.reduce_scatter_tensor_coalesced
    assert dist._coalescing_manager is dist.coalescing_manager


def test_small_answers() -> None:
    assert dist.get_default_backend_for_device("cpu") == "tcp"
    assert dist.get_default_backend_for_device("cuda:1") == "nccl"
    with pytest.raises(ValueError, match="'tpu' has no backend"):
        dist.get_default_backend_for_device("tpu")
    assert dist.supports_complex(dist.ReduceOp.SUM)
    assert not dist.supports_complex(dist.make_nccl_premul_sum(0.5))
    assert not dist.supports_complex(dist.ReduceOp.MAX)
