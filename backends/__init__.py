"""The c10d layer: groups, backends, collectives.  It knows nothing of Jupyter.

The names of ``torch.distributed``, usable from a plain script under any
launcher that sets ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``.
"""

from __future__ import annotations

from .backend import Backend, unavailable_reason
from .coalescing import (
    CoalescingManager,
    P2POp,
    all_gather_into_tensor_coalesced,
    all_reduce_coalesced,
    batch_isend_irecv,
    coalescing_manager,
    reduce_scatter_tensor_coalesced,
)
from .collectives import (
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
)
from .config import BackendConfig
from .errors import (
    DistAbortedError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    DistStoreTimeoutError,
    DistTimeoutError,
)
from .export import dump_flight_recorder
from .file_store import FileStore
from .futures import create_work_from_call, create_work_from_future
from .groups import (
    SHRINK_ABORT,
    SHRINK_DEFAULT,
    GroupMember,
    abort_process_group,
    destroy_process_group,
    enable_timing,
    get_backend,
    get_backend_config,
    get_global_rank,
    get_group_rank,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    group,
    init_process_group,
    is_available,
    is_backend_available,
    is_gloo_available,
    is_initialized,
    is_mpi_available,
    is_nccl_available,
    new_group,
    rebuild_process_group,
    shrink_group,
)
from .hooks import add_op_hook
from .monitored_barrier import monitored_barrier
from .nccl_options import nccl_options
from .objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    refuse_pickles,
    scatter_object_list,
    send_object_list,
)
from .op_timeout import op_timeout
from .point_to_point import irecv, isend, recv, send
from .prefix_store import PrefixStore
from .process_group import ProcessGroup
from .reduce_op import ReduceOp, make_nccl_premul_sum
from .shared import empty, zeros
from .staging import register_staging
from .store import Store
from .tcp_store import TCPStore
from .work import OpType, Work, WorkState
from .world import NonGroupMember

__all__ = [
    "SHRINK_ABORT",
    "SHRINK_DEFAULT",
    "Backend",
    "BackendConfig",
    "CoalescingManager",
    "DistAbortedError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "DistStoreTimeoutError",
    "DistTimeoutError",
    "FileStore",
    "GroupMember",
    "NonGroupMember",
    "OpType",
    "P2POp",
    "PrefixStore",
    "ProcessGroup",
    "ReduceOp",
    "Store",
    "TCPStore",
    "Work",
    "WorkState",
    "abort_process_group",
    "add_op_hook",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "coalescing_manager",
    "create_work_from_call",
    "create_work_from_future",
    "destroy_process_group",
    "dump_flight_recorder",
    "empty",
    "enable_timing",
    "gather",
    "gather_object",
    "get_backend",
    "get_backend_config",
    "get_global_rank",
    "get_group_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "isend",
    "make_nccl_premul_sum",
    "monitored_barrier",
    "nccl_options",
    "new_group",
    "op_timeout",
    "rebuild_process_group",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "refuse_pickles",
    "register_staging",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "shrink_group",
    "unavailable_reason",
    "zeros",
]
