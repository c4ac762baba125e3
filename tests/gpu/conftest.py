"""Marks and skips for the tests of this folder, which need a real GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import rankscope as dist


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder ``gpu``; skip the tests if NCCL cannot be used."""
    reason = dist.unavailable_reason("nccl")
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=f"no NCCL here: {reason}"))
