"""The private and undocumented names of torch that the backend uses, and why.

A name that a version of torch lacks has a sentence in `missing`: what does not work
without it.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeAlias

import torch
import torch.distributed.distributed_c10d as c10d_module
from torch._C import _distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import (
    mixed_precision_hooks,
    optimizer_overlap_hooks,
)

__all__ = [
    "HANDLE",
    "DistStoreError",
    "DistributedDataParallel",
    "Shell",
    "before_forward",
    "being_made",
    "being_split",
    "bucket_changes",
    "c10d",
    "comm_hooks",
    "constructor",
    "cpu_backend",
    "delayed_hook",
    "disable_dynamo",
    "graph_task",
    "groups_name",
    "has_init_sync",
    "hooks_with_streams",
    "in_backward",
    "is_profiling",
    "missing",
    "queue_callback",
    "registered_groups",
    "release",
    "renumber",
    "replace",
    "replicas",
    "reset_reducer",
    "restore_local_tensors",
    "restore_precision",
    "run_allreduce_hook",
    "store_host",
    "store_port",
    "upcast_hook",
]

#: The release of torch, as 2 and 14.
release = tuple(map(int, torch.__version__.split(".")[:2]))

#: The handle of a rank for torch's ``reconfigure``.
HANDLE = "rankscope/{}"

#: A sentence for each name that this torch lacks.
missing: list[str] = []

#: One of the classes of `shell`, whose `group` is the Rankscope group.
Shell: TypeAlias = Any

DistStoreError = torch.distributed.DistStoreError
DistributedDataParallel = torch.nn.parallel.DistributedDataParallel


def _probe(owner: Any, name: str, without: str) -> Any:
    found = getattr(owner, name, None)
    if found is None:
        missing.append(
            f"torch {torch.__version__} has no {name}, without which {without}"
        )
    return found


#: Call a function on the thread of backward() when its graph is done, before DDP's own
#: callback, which waits for the buckets in C++: no interrupt reaches it there, and the
#: error of an op loses its type. There is no public way.
queue_callback: Callable[[Callable[[], None]], None] | None = _probe(
    torch.autograd.Variable._execution_engine,
    "queue_callback",
    "an abort in a backward pass raises RuntimeError, and an interrupt comes late",
)
# The callbacks of a backward pass that fails are never called: its ops have to be told
# from those of the next one.
_graph_task: Callable[[], int] | None = _probe(
    torch._C, "_current_graph_task_id", "ops in a backward pass are not driven by it"
)
# DDP with a static graph reduces the gradients of its first pass in a callback of the
# pass, and waits there in C++: those ops cannot be driven. No node is current there.
_node: Callable[[], Any] | None = _probe(
    torch._C, "_current_autograd_node", "ops in a backward pass are not driven by it"
)

#: Whether a profiler records: record_function costs 10 µs even where none does.
is_profiling: Callable[[], bool] = _probe(
    torch._C._autograd, "_profiler_enabled", "the profiler does not name ops"
) or (lambda: False)

_disable_dynamo: Callable[[Any], Any] = _probe(
    torch, "_disable_dynamo", "compiled functions may fail at an op"
) or (lambda function: function)
# Torch's wrapper costs each call 5 µs, and the first one an import of Dynamo: newer
# versions of torch can be told to leave a function alone, and what it calls.
_frames = torch._C._dynamo.eval_frame


def disable_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have torch.compile not trace `function`, as an op: it works on memory."""
    if not hasattr(_frames, "set_code_exec_strategy"):
        wrapped: Callable[..., Any] = _disable_dynamo(function)
        return wrapped
    skip = _frames._FrameAction.SKIP
    strategy = _frames._FrameExecStrategy(skip, skip)
    _frames.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


#: What makes a model of DDP. With ``init_sync=False`` it issues no op: there is no
#: other way to do without them in a script that is not changed.
constructor = DistributedDataParallel, "__init__"
has_init_sync = "init_sync" in inspect.signature(DistributedDataParallel).parameters
if not has_init_sync:
    missing.append(
        f"torch {torch.__version__} has no init_sync of DistributedDataParallel, "
        "without which a rank that is started again cannot make such a model"
    )
#: The hook of DDP's mixed precision that reduces a bucket, as its owner and name.
upcast_hook = mixed_precision_hooks, "_reducer_allreduce_and_upcast_hook"
#: What that hook, and the one of an optimizer in the backward pass, wait for in C++.
run_allreduce_hook = c10d.Reducer, "_run_allreduce_hook"
#: The functions of DDP with events and streams, which torch lacks on CPUs.
hooks_with_streams = (
    constructor,
    (DistributedDataParallel, "_root_copy_hook"),
    (DistributedDataParallel, "_module_wait_for_copy_hook"),
    upcast_hook,
    (optimizer_overlap_hooks, "_apply_optim_in_backward_hook"),
)
#: The hook of DDP that sums the parameters in ``delay_all_reduce_named_params``.
delayed_hook = DistributedDataParallel, "_delayed_all_reduce_hook"
#: What a forward pass of DDP begins with.
before_forward = DistributedDataParallel, "_pre_forward"
_probe(
    *before_forward,
    "a DDP model that goes on after a rebuild without rejoin is not refused by name",
)
_probe(*delayed_hook, "delayed gradients of DDP may be read before they are summed")
for _owner, _name in (run_allreduce_hook, *hooks_with_streams):
    _probe(
        _owner,
        _name,
        "DDP's mixed precision, or optimizers in the backward pass, do not work",
    )


def replace(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Have `owner` use ``change(function)`` for its function `name`, if it has one."""
    function = getattr(owner, name, None)
    if function is not None:
        setattr(owner, name, change(function))


def graph_task() -> int:
    """Return the number of the backward pass this thread is in; -1: in none.

    It is in none while it calls the callbacks of the pass, whose graph is done then.
    """
    if _graph_task is None or _node is None or queue_callback is None:
        return -1
    return -1 if _node() is None else _graph_task()


def in_backward() -> bool:
    """Return whether this thread may be in a backward pass, or in its callbacks."""
    return _graph_task is None or _graph_task() != -1


# The functions of torch that make a group: from nothing, and from a part of another.
_MAKER, _SPLITTER = "_new_process_group_helper", "split_group"
_probe(c10d_module, _MAKER, "groups have no other backend beside it, and no names")


def _variables_of(function: str) -> dict[str, Any]:
    """Return the variables of a function of torch that called; empty: none did."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if frame.f_code.co_name == function and module == c10d_module.__name__:
            return frame.f_locals
        frame = frame.f_back
    return {}


def being_made(name: str) -> tuple[list[str], str]:
    """Return the backends beside `name` in the group being made, and its purpose."""
    made = _variables_of(_MAKER)
    if not made:
        return [], ""
    backends = made["backend_config"].get_device_backend_map().values()
    return sorted({str(one) for one in backends} - {name}), made["group_desc"]


def being_split() -> tuple[list[int], str]:
    """Return all ranks of the groups that ``split_group`` makes, and their purpose."""
    made = _variables_of(_SPLITTER)
    ranks = [one for part in made.get("split_ranks") or () for one in part]
    return ranks, made.get("group_desc") or ""


def registered_groups() -> Iterator[c10d.ProcessGroup]:
    return iter(list(c10d_module._world.pg_map))


def cpu_backend(group: c10d.ProcessGroup) -> Any:
    """Return what does the ops of CPU tensors in `group`; ``None``: nothing does."""
    try:
        return group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None


def renumber(group: c10d.ProcessGroup, ranks: Sequence[int]) -> None:
    """Have torch know `ranks` as the global ranks of `group`, which has lost some."""
    c10d_module._world.pg_group_ranks[group] = {
        rank: place for place, rank in enumerate(ranks)
    }


def replicas(model: torch.nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            yield module


def comm_hooks(model: torch.nn.Module) -> Iterator[tuple[Any, Any, Any]]:
    """Yield each module of DDP in `model` with each of its hooks and its state."""
    for module in replicas(model):
        for hook, state in module._comm_hooks:
            yield module, hook, state


# How often the reducer of a DDP model has built its buckets anew, until its last reset.
_changes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def bucket_changes(model: Any) -> int:
    """Return how often a model has built its buckets anew; equal where they are."""
    return _changes.get(model, 0) + int(model._has_rebuilt_buckets)


def reset_reducer(model: Any, *, anew: bool = False) -> None:
    """Have a DDP model forget the backward pass that failed.

    Every rank does it: buckets are built anew in the next backward pass, by their order
    on the first rank. The number of ranks is read again, too. `anew`: the reducer is
    made anew, as ranks have other buckets than others.
    """
    if not (model.static_graph or anew):
        _changes[model] = bucket_changes(model)
        model._update_process_group(model.process_group)
        return
    _changes.pop(model, None)
    # A reducer of a static graph keeps what it saw in the first pass, which another
    # rank may not have done: all get a new one.
    model._remove_autograd_hooks()
    static = model.static_graph
    model._has_rebuilt_buckets = model.static_graph = False
    parameters, expect_sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    hooks, model._comm_hooks = model._comm_hooks, []
    model._ddp_init_helper(parameters, expect_sparse, names, static)
    for hook, state in hooks:
        model.register_comm_hook(state, hook)
    if model.mixed_precision is not None:
        model.reducer._set_mixed_precision_param_dtype(
            model.mixed_precision.param_dtype
        )
    if static:
        model._set_static_graph()


def restore_local_tensors(model: Any) -> None:
    """Have a DDP model over tensor parallelism name its parameters again.

    From the first forward pass on DTensors of the same memory, which are no parameters,
    are in their places in its modules.
    """
    parameters = {
        one.data_ptr(): one
        for one in model._module_parameters
        if hasattr(one, "_st_info")
    }
    for module in model.module.modules() if parameters else ():
        for name, value in list(vars(module).items()):
            if hasattr(value, "device_mesh"):
                delattr(module, name)
                setattr(module, name, parameters[value.to_local().data_ptr()])


def restore_precision(model: Any) -> None:
    """Have a DDP model with mixed precision be as between two backward passes."""
    if model.mixed_precision is None:
        return
    for parameter in model.module.parameters():
        if hasattr(parameter, "_fp_param"):
            parameter.data = parameter._fp_param
        if hasattr(parameter, "_ddp_mp_hook_state"):
            parameter._ddp_mp_hook_state[1].remove()
            del parameter._ddp_mp_hook_state
    for _, state in model._comm_hooks:
        state.wait_for_stream_enqueued = False


def store_host(store: Any) -> str:
    """Return the host where ranks reach rank 0, by torch's store; else this one."""
    host = getattr(_innermost(store), "host", "")
    return host or "127.0.0.1"


def store_port(store: Any) -> int | None:
    """Return the port of torch's ``TCPStore``; ``None``: it is another store."""
    found: int | None = getattr(_innermost(store), "port", None)
    return found


def _innermost(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def groups_name(description: str) -> str:
    """Return the name that a person reads for a group of torch; empty: its ranks."""
    return "" if description == "undefined" else description.removeprefix("mesh_")
