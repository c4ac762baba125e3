"""The cluster: engines, the agent inside each, the control and status channel."""

from __future__ import annotations

from .benching import Bench, BenchResult, BenchRow
from .cluster import Cluster
from .diagnosing import StallWatch
from .errors import ClusterError, ClusterStartError
from .execution import Execution, ExecutionError, Output, RankError
from .rings import Rings
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
    "GroupStatus",
    "OpStatus",
    "Output",
    "RankError",
    "RankStatus",
    "Rings",
    "StallWatch",
]
