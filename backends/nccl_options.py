"""Options of the communicators that are made: ``NCCLConfig``'s, by their names."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

__all__ = ["nccl_options", "options"]

# Not split_share and shrink_share: with them an abort of one communicator would end
# the ops of another.
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

# What parseCommConfig of NCCL's init.cc lets pass; of the cluster size, what the
# documentation of ncclConfig_t does. The others are at least 0.
_LEAST = {"min_ctas": 1, "max_ctas": 1, "nvls_ctas": 1, "n_channels_per_net_peer": 1}
_MOST = {"cga_cluster_size": 8}

_chosen: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "rankscope_nccl_options", default=None
)


def options() -> dict[str, Any]:
    """What communicators of a backend made now are made with."""
    return dict(_chosen.get() or {})


@contextlib.contextmanager
def nccl_options(**chosen: Any) -> Iterator[None]:
    """Within the block, NCCL backends are made with these options, on every rank.

    They are the fields of ``ncclConfig_t`` in nccl4py's spelling: ``min_ctas``,
    ``max_ctas``, ``cga_cluster_size``, ``net_name`` and others; what each does
    is in NCCL's documentation of ``ncclConfig_t``. A backend is made at the
    first use of its group, so that use belongs into the block. Raises
    `ValueError` for an unknown name or a number out of range, `TypeError` for a
    value of another type.
    """
    for name, value in chosen.items():
        if name not in _KINDS:
            known = ", ".join(sorted(_KINDS))
            raise ValueError(f"nccl_options: there is no {name!r}; there are {known}")
        kind = _KINDS[name]
        # True is an int to isinstance, and 1 to NCCL.
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            raise TypeError(f"nccl_options: {name}={value!r}; expected {kind.__name__}")
        if kind is int:
            _check_range(name, chosen[name])
    together = {**options(), **chosen}
    least, most = together.get("min_ctas"), together.get("max_ctas")
    if least is not None and most is not None and least > most:
        raise ValueError(
            f"nccl_options: min_ctas={least} is more than max_ctas={most}; expected "
            "min_ctas of at most max_ctas"
        )
    token = _chosen.set(together)
    try:
        yield
    finally:
        _chosen.reset(token)


def _check_range(name: str, value: int) -> None:
    least, most = _LEAST.get(name, 0), _MOST.get(name)
    if value < least or (most is not None and value > most):
        wanted = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"nccl_options: {name}={value}; expected {wanted}")
