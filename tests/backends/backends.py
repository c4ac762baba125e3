"""The backends for host arrays on which tests run, as parameters."""

from __future__ import annotations

import pytest

import rankscope as dist


def _parameter(name: str) -> object:
    reason = dist.unavailable_reason(name)
    skip = pytest.mark.skipif(reason is not None, reason=f"needs {name}: {reason}")
    return pytest.param(name, marks=skip)


#: Without a launcher: MPI's ranks need mpiexec.
HOST_BACKENDS = [_parameter(name) for name in ("tcp", "ucx", "gloo")]
