"""The backends for host arrays on which tests run, as parameters of pytest."""

from __future__ import annotations

from typing import Any

import pytest

import rankscope as dist

__all__ = ["HOST_BACKENDS", "MESSAGING_BACKENDS"]


def _parameters(*names: str) -> list[Any]:
    found = []
    for name in names:
        reason = dist.unavailable_reason(name)
        skip = pytest.mark.skipif(reason is not None, reason=f"{name}: {reason}")
        found.append(pytest.param(name, marks=skip))
    return found


#: Those that need no launcher.
HOST_BACKENDS = _parameters("tcp", "ucx", "gloo")
#: Of them, those whose algorithms are those of `messaging`.
MESSAGING_BACKENDS = _parameters("tcp", "ucx")
