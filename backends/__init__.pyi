"""The names of this package and their modules, for type checkers and `__init__.py`."""

from .collectives.breakpoint import breakpoint
from .collectives.coalescing import (
    CoalescingManager,
    P2POp,
    _coalescing_manager,
    all_gather_coalesced,
    all_gather_into_tensor_coalesced,
    all_gather_single_coalesced,
    all_reduce_coalesced,
    batch_isend_irecv,
    coalescing_manager,
    reduce_scatter_single_coalesced,
    reduce_scatter_tensor_coalesced,
)
from .collectives.data_movement import (
    all_gather,
    all_gather_into_tensor,
    all_gather_single,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    scatter,
)
from .collectives.monitored_barrier import monitored_barrier
from .collectives.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    refuse_pickles,
    scatter_object_list,
    send_object_list,
)
from .collectives.point_to_point import (
    irecv,
    isend,
    recv,
    send,
)
from .collectives.reductions import (
    all_reduce,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
)
from .devices.host_arrays import empty, zeros
from .errors import (
    ConnectionLostError,
    DistAbortedError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistNetworkTimeoutError,
    DistStoreError,
    DistStoreTimeoutError,
    DistTimeoutError,
    QueueEmptyError,
)
from .gloo.library import (
    GlooInfo,
    gloo_info,
    gloo_options,
)
from .groups.api import (
    abort_process_group,
    default_pg_timeout,
    destroy_process_group,
    enable_timing,
    init_process_group,
    is_available,
    is_backend_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_ucc_available,
    is_xccl_available,
    rebuild_process_group,
)
from .groups.config import (
    BackendConfig,
    get_default_backend_for_device,
)
from .groups.device_mesh import (
    DeviceMesh,
    init_device_mesh,
)
from .groups.membership import (
    GroupMember,
    get_backend,
    get_backend_config,
    get_global_rank,
    get_group_rank,
    get_node_local_rank,
    get_pg_count,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    group,
    is_initialized,
    is_torchelastic_launched,
)
from .groups.options import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from .groups.process_group import ProcessGroup
from .groups.spec import NonGroupMember
from .groups.subgroups import (
    SHRINK_ABORT,
    SHRINK_DEFAULT,
    new_group,
    new_subgroups,
    new_subgroups_by_enumeration,
    shrink_group,
    split_group,
)
from .interface.base import Backend
from .interface.registry import unavailable_reason
from .interface.staging import register_staging
from .nccl.options import nccl_options
from .observe.export import dump_flight_recorder
from .stores.base import Store
from .stores.file import FileStore
from .stores.hash import HashStore
from .stores.prefix import PrefixStore
from .stores.tcp import TCPStore
from .ucx.backend import UCXInfo, ucx_info
from .work.composite import (
    create_work_from_call,
    create_work_from_future,
)
from .work.hooks import add_op_hook
from .work.op_timeout import op_timeout
from .work.op_type import OpType
from .work.reduce_op import (
    ReduceOp,
    make_nccl_premul_sum,
    supports_complex,
)
from .work.state import WorkState
from .work.work import Work

__all__ = [
    "SHRINK_ABORT",
    "SHRINK_DEFAULT",
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "Backend",
    "BackendConfig",
    "BarrierOptions",
    "BroadcastOptions",
    "CoalescingManager",
    "ConnectionLostError",
    "DeviceMesh",
    "DistAbortedError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistNetworkTimeoutError",
    "DistStoreError",
    "DistStoreTimeoutError",
    "DistTimeoutError",
    "FileStore",
    "GatherOptions",
    "GlooInfo",
    "GroupMember",
    "HashStore",
    "NonGroupMember",
    "OpType",
    "P2POp",
    "PrefixStore",
    "ProcessGroup",
    "QueueEmptyError",
    "ReduceOp",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
    "Store",
    "TCPStore",
    "UCXInfo",
    "Work",
    "WorkState",
    "_coalescing_manager",
    "abort_process_group",
    "add_op_hook",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_gather_object",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "breakpoint",
    "broadcast",
    "broadcast_object_list",
    "coalescing_manager",
    "create_work_from_call",
    "create_work_from_future",
    "default_pg_timeout",
    "destroy_process_group",
    "dump_flight_recorder",
    "empty",
    "enable_timing",
    "gather",
    "gather_object",
    "get_backend",
    "get_backend_config",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "gloo_info",
    "gloo_options",
    "group",
    "init_device_mesh",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "isend",
    "make_nccl_premul_sum",
    "monitored_barrier",
    "nccl_options",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "op_timeout",
    "rebuild_process_group",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "refuse_pickles",
    "register_staging",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "shrink_group",
    "split_group",
    "supports_complex",
    "ucx_info",
    "unavailable_reason",
    "zeros",
]
