"""Options of new communicators and streams, and switches in the environment.

The options are the fields of nccl4py's ``NCCLConfig``, by name, and ``high_priority``.
Each switch is a variable of Rankscope; if it is not set, torch's variable of the same
meaning is read.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator
from typing import Any

from ..did_you_mean import did_you_mean
from ..errors import DistBackendError

__all__ = [
    "HIGH_PRIORITY",
    "SWITCH",
    "nccl_options",
    "nonblocking",
    "options",
    "switch",
    "take_high_priority",
]

#: The environment variable for non-blocking communicators.
SWITCH = "RANKSCOPE_NCCL_USE_COMM_NONBLOCKING"
#: The option that is no field of ``NCCLConfig``.
HIGH_PRIORITY = "high_priority"
#: The values that turn a switch on and off, the same as in torch.
_ON, _OFF = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")

# The fields of NCCLConfig that are no options, and why.
_SHARED = (
    "communicators would share resources, and an abort of one would end the ops of the "
    "other"
)
_REFUSED = {
    "split_share": _SHARED,
    "shrink_share": _SHARED,
    "blocking": f"the environment variable {SWITCH} is for that",
}
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
    "graph_usage_mode": int,
    "num_rma_ctx": int,
    "max_p2p_peers": int,
    "graph_stream_ordering": int,
    "launch_order_implicit": bool,
    "num_rma_sig": int,
    "rma_eager_init": bool,
    "host_cft_mode": int,
    "nvls_host_mode": int,
    HIGH_PRIORITY: bool,
}

# The bounds that parseCommConfig in NCCL's init.cc checks; the bound of
# cga_cluster_size is from the documentation of ncclConfig_t. An int option without an
# entry in _LEAST is at least 0.
_LEAST = {"min_ctas": 1, "max_ctas": 1, "nvls_ctas": 1, "n_channels_per_net_peer": 1}
_LEAST |= {"num_rma_ctx": 1, "max_p2p_peers": 1}
_MOST = {"cga_cluster_size": 8, "graph_usage_mode": 2, "graph_stream_ordering": 1}

_chosen: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "rankscope_nccl_options", default=None
)


def options() -> dict[str, Any]:
    """Return the options of a backend that is created now: those of the open blocks."""
    return dict(_chosen.get() or {})


@contextlib.contextmanager
def nccl_options(**chosen: Any) -> Iterator[None]:
    """Create the NCCL backends of the block with these options; use it on every rank.

    The first use of a group creates the group's backend, so the first use belongs in
    the block. A nested block adds to the options of the outer block.

    In the place of ``ProcessGroupNCCL.Options``.

    Parameters
    ----------
    **chosen : int, bool or str
        The fields of ``ncclConfig_t`` in nccl4py's spelling: ``min_ctas``,
        ``max_ctas``, ``cga_cluster_size``, ``net_name`` and others; NCCL's
        documentation of ``ncclConfig_t`` describes each. With ``high_priority`` the ops
        run on a CUDA stream of the highest priority.

    Yields
    ------
    None
        Nothing.

    Raises
    ------
    ValueError
        An unknown name, a number out of range, or ``min_ctas`` without ``max_ctas``,
        which NCCL refuses.
    TypeError
        A value of another type.

    Examples
    --------
    >>> with dist.nccl_options(min_ctas=1, max_ctas=8, high_priority=True):
    ...     group = dist.new_group(backend="cuda:nccl")
    """
    for name, value in chosen.items():
        if name not in _KINDS:
            raise ValueError(f"nccl_options: {_unknown(name)}")
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
    least, most = _LEAST.get(name, 0), _MOST.get(name)
    if value < least or (most is not None and value > most):
        wanted = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"nccl_options: {name}={value}; expected {wanted}")


def _check_ctas(together: dict[str, Any]) -> None:
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


def _unknown(name: str) -> str:
    if name in _REFUSED:
        return f"{name} is not offered: {_REFUSED[name]}"
    known = ", ".join(sorted(_KINDS))
    return f"there is no {name!r}{did_you_mean(name, _KINDS)}; there are {known}"


def take_high_priority(chosen: dict[str, Any]) -> bool:
    """Remove ``high_priority`` from options; return whether it is on."""
    wanted = chosen.pop(HIGH_PRIORITY, None)
    return switch("HIGH_PRIORITY") if wanted is None else bool(wanted)


def nonblocking() -> bool:
    """Return whether communicators are non-blocking, which is the default."""
    # NCCL prefers this variable to what a communicator's config says.
    forced = os.environ.get("NCCL_COMM_BLOCKING", "").strip()
    if forced in ("0", "1"):
        return forced == "0"
    return switch("USE_COMM_NONBLOCKING", True)


def switch(what: str, default: bool = False) -> bool:
    """Return whether the variable of `what`, such as ``"NAN_CHECK"``, is on."""
    name = f"RANKSCOPE_NCCL_{what}"
    if name not in os.environ:
        name = f"TORCH_NCCL_{what}"
    value = os.environ.get(name, "").strip().lower()
    if not value:
        return default
    if value not in (*_ON, *_OFF):
        on, off = ("1 (the default)", "0") if default else ("1", "0 (the default)")
        raise DistBackendError(f"{name}={value}: expected {on} or {off}")
    return value in _ON
