"""Options of new communicators.

They are the fields of nccl4py's ``NCCLConfig``, by name, and one environment variable:
whether communicators are non-blocking.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator
from typing import Any

from ..errors import DistBackendError

__all__ = ["SWITCH", "nccl_options", "nonblocking", "options"]

#: The environment variable for non-blocking communicators; if it is not set,
#: ``TORCH_NCCL_USE_COMM_NONBLOCKING`` of torch is read.
SWITCH = "RANKSCOPE_NCCL_USE_COMM_NONBLOCKING"
#: The values that turn a switch on and off, the same as in torch.
_ON, _OFF = ("1", "true", "yes", "y", "on", ""), ("0", "false", "no", "n", "off")

# split_share and shrink_share are left out: with these options, communicators share
# resources, and an abort of one communicator would end the ops of another.
_KINDS: dict[str, type] = {
    "min_ctas": int,
    "max_ctas": int,
    "cga_cluster_size": int,
    "net_name": str,
    "traffic_class": int,
    "comm_name": str,
    "collnet_enable": bool,
    "cta_policy": int,
    "nvls_ctas": int,
    "n_channels_per_net_peer": int,
    "nvlink_centric_sched": bool,
}

# The bounds that parseCommConfig in NCCL's init.cc checks; the bound of
# cga_cluster_size is from the documentation of ncclConfig_t. An int option without an
# entry in _LEAST is at least 0.
_LEAST = {"min_ctas": 1, "max_ctas": 1, "nvls_ctas": 1, "n_channels_per_net_peer": 1}
_MOST = {"cga_cluster_size": 8}

_chosen: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "rankscope_nccl_options", default=None
)


def options() -> dict[str, Any]:
    """Return the options of a backend that is created now: those of the open blocks."""
    return dict(_chosen.get() or {})


@contextlib.contextmanager
def nccl_options(**chosen: Any) -> Iterator[None]:
    """Create the NCCL backends of the block with these options; use it on every rank.

    The options are the fields of ``ncclConfig_t`` in nccl4py's spelling:
    ``min_ctas``, ``max_ctas``, ``cga_cluster_size``, ``net_name`` and others; NCCL's
    documentation of ``ncclConfig_t`` describes each field. The first use of a group
    creates the group's backend, so the first use belongs in the block. A nested block
    adds to the options of the outer block. Raises `ValueError` for an unknown name, a
    number out of range or a ``min_ctas`` without ``max_ctas``, which NCCL refuses, and
    `TypeError` for a value of another type.
    """
    for name, value in chosen.items():
        if name not in _KINDS:
            known = ", ".join(sorted(_KINDS))
            raise ValueError(f"nccl_options: there is no {name!r}; there are {known}")
        kind = _KINDS[name]
        # isinstance(True, int) holds, and NCCL would read True as 1.
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            raise TypeError(f"nccl_options: {name}={value!r}; expected {kind.__name__}")
        if kind is int:
            _check_range(name, chosen[name])
    together = {**options(), **chosen}
    _check_ctas(together)
    token = _chosen.set(together)
    try:
        yield
    finally:
        _chosen.reset(token)


def _check_range(name: str, value: int) -> None:
    """Raise `ValueError` if `value` is out of the range of the option `name`."""
    least, most = _LEAST.get(name, 0), _MOST.get(name)
    if value < least or (most is not None and value > most):
        wanted = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"nccl_options: {name}={value}; expected {wanted}")


def _check_ctas(together: dict[str, Any]) -> None:
    """Raise `ValueError` if NCCL would refuse this pair of min_ctas and max_ctas."""
    least, most = together.get("min_ctas"), together.get("max_ctas")
    if least is None:
        return
    if most is None:
        # parseCommConfig compares the two before it sets the default of max_ctas.
        raise ValueError(
            f"nccl_options: min_ctas={least} without max_ctas, which NCCL refuses; "
            f"give both, for instance min_ctas={least}, max_ctas={max(least, 32)}"
        )
    if least > most:
        raise ValueError(
            f"nccl_options: min_ctas={least} is more than max_ctas={most}; expected "
            "min_ctas of at most max_ctas"
        )


def nonblocking() -> bool:
    """Return whether communicators are non-blocking, which is the default.

    Raises `DistBackendError` for an environment variable of another value.
    """
    name = SWITCH if SWITCH in os.environ else "TORCH_NCCL_USE_COMM_NONBLOCKING"
    value = os.environ.get(name, "1").strip().lower()
    if value not in (*_ON, *_OFF):
        raise DistBackendError(f"{name}={value}: expected 1 (the default) or 0")
    return value in _ON
