"""documented: the parts of the docstrings of groups' functions that many share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ..documentation import complete, complete_methods

__all__ = ["documented", "documented_methods", "documented_ops", "documented_options"]

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

_PARAMETERS = {
    "group": """\
group : ProcessGroup, optional
    The group; ``None`` is the default group.""",
    "backend": """\
backend : str, optional
    The backends of the group: one name, or one per device type as in
    ``"cpu:gloo,cuda:nccl"`` (see `BackendConfig`). The default is that of the group
    that this one is made from.""",
    "timeout": """\
timeout : float or timedelta, optional
    Bounds every op of the group, from its start; in seconds if it is a number. The
    default is that of the group that this one is made from.""",
    "pg_options": """\
pg_options : object, optional
    Not used: accepted for c10d's signature.""",
    "group_desc": """\
group_desc : str, optional
    The name that messages and the board show; the default is made of the ranks.""",
    "device_id": """\
device_id : int, cupy.cuda.Device or torch.device, optional
    The CUDA device of this process. The backend of ``cuda`` is then built, and
    connected, at once.""",
}
_REQUIRED_GROUP = """\
group : ProcessGroup or None
    The group; ``None`` is the default group."""
_RAISES_OF_GROUP = {
    "ValueError": (
        "`group` is ``None``, and there is no default group; or this rank is not in "
        "`group`."
    ),
    "TypeError": "`group` is no group.",
}
# -1 is their answer on a rank that is not in the group.
_TAKES_OTHERS = ("get_rank", "get_world_size")


def documented(function: F) -> F:
    """Complete the docstring of a function that makes or takes a group."""
    group = inspect.signature(function).parameters.get("group")
    takes_group = group is not None
    texts = dict(_PARAMETERS)
    if group is not None and group.default is group.empty:
        texts["group"] = _REQUIRED_GROUP
    raises = dict(_RAISES_OF_GROUP) if takes_group else {}
    if function.__name__ in _TAKES_OTHERS:
        raises["ValueError"] = "`group` is ``None``, and there is no default group."
    return complete(function, texts, raises)


# -- the methods of a group, and their options -------------------------------

_OPTIONS = {
    "timeout": """\
timeout : float or timedelta, optional
    The timeout of the op (`op_timeout`), in seconds if it is a number; the default is
    the group's.""",
    "asyncOp": """\
asyncOp : bool, default True
    Not used, as a method of a group returns a Work in either case: accepted for c10d's
    fields.""",
    "reduceOp": """\
reduceOp : ReduceOp, default SUM
    The reduction.""",
    "rootRank": """\
rootRank : int, default 0
    The root, as its rank in the group.""",
    "rootTensor": """\
rootTensor : int, default 0
    Not used, as a rank has one array: accepted for c10d's fields.""",
    "device_ids": """\
device_ids : sequence of int, optional
    The CUDA device of this rank, in a list.""",
    "device": """\
device : str or torch.device, optional
    The device type whose backend runs the barrier; the group's first by default.""",
}
_METHODS = {
    "device": """\
device : str
    A device type, such as ``"cpu"``.""",
}
_OPS = {
    "tensors": """\
tensors : array or sequence of array
    The array of this rank, alone or in a list of one.""",
    "tensor": """\
tensor : array
    The array of this rank.""",
    "output_tensors": """\
output_tensors : sequence of array
    What is written, as the function's output; or that in a list of one.""",
    "input_tensors": """\
input_tensors : array or sequence of array
    What is read, as the function's input; or that in a list of one.""",
    "output_lists": """\
output_lists : sequence of sequence of array
    For each of `input_list` an array for each rank.""",
    "input_list": """\
input_list : sequence of array
    The arrays of this rank.""",
    "output": """\
output : array
    What is written.""",
    "input": """\
input : array
    What is read.""",
    "outputs": """\
outputs : sequence of array
    What is written.""",
    "inputs": """\
inputs : sequence of array
    What is read; one for each of `outputs`.""",
    "output_split_sizes": """\
output_split_sizes : sequence of int, optional
    How many rows of `output` come from each rank; empty or missing: evenly.""",
    "input_split_sizes": """\
input_split_sizes : sequence of int, optional
    How many rows of `input` go to each rank; empty or missing: evenly.""",
    "root": """\
root : int or options, optional
    The root, as its rank in the group, 0 by default; or `opts` in this place.""",
    "op": """\
op : ReduceOp or options, optional
    The reduction, SUM by default; or `opts` in this place.""",
    "timeout": """\
timeout : float or timedelta, optional
    The timeout of the op (`op_timeout`), in seconds if it is a number; the default is
    the group's.""",
    "opts": """\
opts : options, optional
    The object that c10d has for the op; arguments go before its fields.""",
    "dstRank": """\
dstRank : int
    The destination, as its rank in the group.""",
    "srcRank": """\
srcRank : int
    The source, as its rank in the group.""",
    "tag": """\
tag : int, default 0
    A receive matches the sends with its tag; as of `isend`.""",
    "wait_all_ranks": """\
wait_all_ranks : bool, default False
    Whether the error names all missing ranks, not the first one alone.""",
}
_OPS_RAISE = {
    "TypeError, ValueError, NotImplementedError, DistError": ("As the function does."),
}


def documented_options(cls: C) -> C:
    """Complete the docstring of a class of options with its fields."""
    return complete(cls, _OPTIONS)


def documented_methods(cls: C) -> C:
    """Complete the docstrings of the methods of a group that start no op."""
    return complete_methods(cls, lambda method: complete(method, _METHODS))


def documented_ops(cls: C) -> C:
    """Complete the docstrings of the methods of a group that start an op."""

    def documented_op(method: Callable[..., Any]) -> None:
        blocks = method.__name__ == "monitored_barrier"
        returns = "" if blocks else "Work\n    The Work of the op."
        complete(method, _OPS, _OPS_RAISE, returns)

    return complete_methods(cls, documented_op)
