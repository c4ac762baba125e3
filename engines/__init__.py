"""The cluster: engines, the agent inside each, the control and status channel."""

from __future__ import annotations

from .cluster.benching import Bench, BenchResult, BenchRow
from .cluster.cluster import Cluster
from .cluster.diagnosing import StallWatch
from .cluster.execution import Execution, Output
from .cluster.flight_records import FlightRecords
from .errors import ClusterError, ClusterStartError, ExecutionError, RankError
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
    "OpStatus",
    "Output",
    "RankError",
    "RankStatus",
    "StallWatch",
]
