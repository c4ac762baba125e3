"""The names of this package and their modules, for type checkers and `__init__.py`."""

from .cluster.benching import Bench as Bench
from .cluster.benching import BenchResult as BenchResult
from .cluster.benching import BenchRow as BenchRow
from .cluster.cluster import Cluster as Cluster
from .cluster.execution import Execution as Execution
from .cluster.execution import Output as Output
from .cluster.job import Job as Job
from .errors import ClusterError as ClusterError
from .errors import ClusterStartError as ClusterStartError
from .errors import ExecutionError as ExecutionError
from .errors import PullError as PullError
from .errors import RankError as RankError
from .observe.diagnosing import StallWatch as StallWatch
from .observe.flight_records import FlightRecords as FlightRecords
from .observe.lateness import Lateness as Lateness
from .observe.observed_ranks import ObservedRanks as ObservedRanks
from .observe.profiling import Profile as Profile
from .observe.profiling import RankStacks as RankStacks
from .status import ClusterStatus as ClusterStatus
from .status import GroupStatus as GroupStatus
from .status import OpStatus as OpStatus
from .status import RankStatus as RankStatus
