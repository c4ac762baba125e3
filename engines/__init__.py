"""The cluster: engines, the agent inside each, the control and status channel."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cluster.benching import Bench, BenchResult, BenchRow
    from .cluster.cluster import Cluster
    from .cluster.diagnosing import StallWatch
    from .cluster.execution import Execution, Output
    from .cluster.flight_records import FlightRecords
    from .cluster.job import Job
    from .cluster.lateness import Lateness
    from .cluster.observed_ranks import ObservedRanks
    from .cluster.profiling import Profile, RankStacks
    from .errors import (
        ClusterError,
        ClusterStartError,
        ExecutionError,
        PullError,
        RankError,
    )
    from .status import ClusterStatus, GroupStatus, OpStatus, RankStatus

__all__ = [
    "Bench",
    "BenchResult",
    "BenchRow",
    "Cluster",
    "ClusterError",
    "ClusterStartError",
    "ClusterStatus",
    "Execution",
    "ExecutionError",
    "FlightRecords",
    "GroupStatus",
    "Job",
    "Lateness",
    "ObservedRanks",
    "OpStatus",
    "Output",
    "Profile",
    "PullError",
    "RankError",
    "RankStacks",
    "RankStatus",
    "StallWatch",
]

_MODULES = {
    "cluster.benching": ("Bench", "BenchResult", "BenchRow"),
    "cluster.cluster": ("Cluster",),
    "cluster.diagnosing": ("StallWatch",),
    "cluster.execution": ("Execution", "Output"),
    "cluster.flight_records": ("FlightRecords",),
    "cluster.job": ("Job",),
    "cluster.lateness": ("Lateness",),
    "cluster.observed_ranks": ("ObservedRanks",),
    "cluster.profiling": ("Profile", "RankStacks"),
    "errors": (
        "ClusterError",
        "ClusterStartError",
        "ExecutionError",
        "PullError",
        "RankError",
    ),
    "status": ("ClusterStatus", "GroupStatus", "OpStatus", "RankStatus"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    # At first use: a script that is watched needs no ipyparallel, whose import takes
    # a second.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value
