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
    `ValueError` for an unknown name, `TypeError` for a value of another type.
    """
    for name, value in chosen.items():
        if name not in _KINDS:
            known = ", ".join(sorted(_KINDS))
            raise ValueError(f"nccl_options: there is no {name!r}; there are {known}")
        if not isinstance(value, _KINDS[name]):
            raise TypeError(
                f"nccl_options: {name}={value!r}; expected {_KINDS[name].__name__}"
            )
    token = _chosen.set({**(_chosen.get() or {}), **chosen})
    try:
        yield
    finally:
        _chosen.reset(token)
