"""documented: the parts of the docstrings of a backend's methods that all share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ..documentation import complete, complete_methods

__all__ = ["documented"]

C = TypeVar("C", bound=type)

_PARAMETERS = {
    "tensor": """\
tensor : array
    The array of this rank.""",
    "tensors": """\
tensors : sequence of array
    The arrays of this rank; each op has one.""",
    "tensor_lists": """\
tensor_lists : sequence of sequence of array
    Written; one list for each of `tensors`, with an array for each rank.""",
    "tensor_list": """\
tensor_list : sequence of array
    Written; one for each rank.""",
    "output": """\
output : array
    Written.""",
    "outputs": """\
outputs : sequence of array
    Written; one for each of `tensors`.""",
    "gather_list": """\
gather_list : sequence of array or None
    Written; one for each rank; ``None`` on the other ranks.""",
    "scatter_list": """\
scatter_list : sequence of array or None
    Read; one for each rank; ``None`` on the other ranks.""",
    "input_list": """\
input_list : sequence of array
    Read; one for each rank.""",
    "output_list": """\
output_list : sequence of array
    Written; one for each rank.""",
    "output_split_sizes": """\
output_split_sizes : sequence of int
    How many rows of `output` come from each rank.""",
    "input_split_sizes": """\
input_split_sizes : sequence of int
    How many rows of `tensor` go to each rank.""",
    "op": """\
op : Reduction
    What `check` returned; of a coalesced op, the `ReduceOp`.""",
    "src": """\
src : int or None
    The source, as its rank in the group; ``None``, of a receive: any rank.""",
    "dst": """\
dst : int
    The destination, as its rank in the group.""",
    "tag": """\
tag : int
    A receive matches the sends with its tag.""",
    "size": """\
size : int
    The number of elements.""",
    "dtype": """\
dtype : dtype
    The dtype of the elements.""",
}
_RAISES = {
    "NotImplementedError": "The backend does not have the op.",
    "TypeError, ValueError": "The backend refuses the op, which gets no number.",
}


def documented(cls: C) -> C:
    """Complete the docstrings of the methods of `Backend`, in numpydoc's form."""
    return complete_methods(cls, _documented_method)


def _documented_method(method: Callable[..., Any]) -> None:
    is_op = inspect.signature(method).return_annotation == "Work"
    returns = "Work\n    The op, which may be in flight." if is_op else ""
    complete(method, _PARAMETERS, _RAISES if is_op else {}, returns)
