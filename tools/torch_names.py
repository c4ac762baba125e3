"""``python -m tools.torch_names``: the table *torch's name → here, or why not*.

Writes it into ``docs/torch_names.md``, between its markers. The names are those of
``torch_names.txt``, every public one of ``torch.distributed`` 2.13 and of its classes:
``tests/with_torch/test_torch_names.py`` compares the file with torch itself.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import rankscope as dist
from rankscope import device_mesh
from tools.support_table import put

__all__ = ["PAGE", "TORCH", "WHY_NOT", "find", "main", "names", "page"]

#: The version of torch whose names these are.
TORCH = "2.13"

PAGE = Path(__file__).resolve().parent.parent / "docs" / "torch_names.md"

# Modules of torch whose names are in a module of the same name here. `rankscope.torch`
# is another one than torch.distributed's.
_MODULES = {"device_mesh": device_mesh}

_LIST = Path(__file__).with_suffix(".txt")

# One sentence, and the names that it stands for.
_REASONS: dict[str, str] = {
    "It serves DDP's hooks and buckets, which belong to a module of torch; use DDP "
    "itself on ranks started with `--torch`.": "BuiltinCommHookType GradBucket Logger "
    "Reducer",
    "There are no levels: each rank always checks its own arguments before a byte "
    "moves, and what differs from rank to rank (op, sizes, dtype, root, reduction) is "
    "not refused by that, but found by the diagnosis of the hang, or by the backend "
    "where it compares.": "DebugLevel get_debug_level "
    "set_debug_level set_debug_level_from_env",
    "It is a name for type checkers, and here the type is `str` or `int`.": "GroupName "
    "RankType",
    "A group's backends are reached through the group alone; choose gloo by "
    "`init_process_group('gloo')`.": "ProcessGroupGloo",
    "It is a part of torch for modules and tensors of torch, not for arrays.": (
        "algorithms autograd remote_device rpc"
    ),
    "It is a module that torch imports for itself.": "sys torch traceback typing "
    "timedelta logging",
    "It is a module of torch's own settings and logs.": "c10d_logger config constants "
    "log logging_handlers utils",
    "What programs import of that module is offered by `rankscope` itself.": (
        "distributed_c10d"
    ),
    "A profiler's title for an op is nothing that a recorder or the board of Rankscope "
    "shows.": "record_comm",
    "torch deprecates it: `ReduceOp` has the same values.": "reduce_op",
    "`init_process_group` meets by its `init_method`, or takes a store of your own by "
    "`store=`.": "register_rendezvous_handler rendezvous",
    "The store stands on ZeroMQ, not on libuv.": "TCPStore.libuvBackend",
    "A Work makes the caller's current stream wait by `wait()`.": (
        "Work.block_current_stream"
    ),
    "It is a form for torch's compiler.": "Work.boxed Work.unbox ProcessGroup.boxed "
    "ProcessGroup.unbox",
    "The future of `get_future()` has the result and the error.": (
        "Work.get_future_result"
    ),
    "A group holds several backends, so that it has no one type; "
    "`get_backend_config` names them all.": "ProcessGroup.BackendType "
    "ProcessGroup.CUSTOM ProcessGroup.GLOO ProcessGroup.MPI ProcessGroup.NCCL "
    "ProcessGroup.UCC ProcessGroup.UNDEFINED ProcessGroup.XCCL",
    "A group never grows: make another with `new_group`.": (
        "ProcessGroup.merge_remote_group"
    ),
    "The function `split_group` does it, with the group as its first argument.": (
        "ProcessGroup.split_group"
    ),
    "There is no symmetric memory here.": "ProcessGroup.use_pg_for_symm_mem_rendezvous",
    "There is no built-in backend of that name; one of your own goes by its string.": (
        "Backend.FAKE Backend.UCC Backend.XCCL"
    ),
    "`Backend.registry` has the backends that are registered, with their devices.": (
        "Backend.backend_capability Backend.backend_list Backend.backend_type_map"
    ),
    "`get_default_backend_for_device` answers it.": (
        "Backend.default_device_backend_map"
    ),
    "The reductions are the members of the enum `ReduceOp`, and a factor belongs to "
    "what `make_nccl_premul_sum` returns.": "ReduceOp.RedOpType ReduceOp.factor "
    "ReduceOp.op",
}

#: Each name that is not here → why, in one sentence.
WHY_NOT = {name: why for why, listed in _REASONS.items() for name in listed.split()}


def names() -> list[str]:
    """Return torch's names, ``Store`` and ``Store.append`` for one."""
    return _LIST.read_text(encoding="utf-8").split()


def find(name: str) -> bool:
    """Return whether `rankscope` has `name`, a module's, a class's or a function's."""
    head, _, member = name.partition(".")
    if not member:
        return head in dist.__all__ or head in _MODULES
    owner = getattr(dist, head)
    return hasattr(owner, member) or _declares(owner, member)


def _declares(owner: Any, member: str) -> bool:
    """Return whether a class says that its objects have an attribute."""
    classes = owner.__mro__ if isinstance(owner, type) else ()
    return any(member in vars(one).get("__annotations__", {}) for one in classes)


def _row(name: str) -> str:
    why = WHY_NOT.get(name)
    return f"| `{name}` | {'here' if why is None else f'no: {why}'} |"


def page(text: str) -> str:
    """Return `text`, a page with markers, with the table of today's names."""
    rows = [_row(name) for name in names()]
    table = "\n".join(
        [f"| torch.distributed {TORCH} | rankscope |", "| --- | --- |", *rows]
    )
    return put(text, "names", table)


def main() -> int:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
