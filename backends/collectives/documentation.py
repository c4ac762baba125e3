"""documented: the parts of a docstring that all collectives share, written once.

``help(dist.all_reduce)`` and Jupyter's ``dist.all_reduce?`` show them for each op.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..documentation import complete

__all__ = ["documented", "documented_objects"]

F = TypeVar("F", bound=Callable[..., Any])

#: The parameters that several functions have, in numpydoc's form.
_PARAMETERS = {
    "op": """\
op : ReduceOp, default SUM
    The reduction, the same on all ranks; the Notes of `all_reduce` say which dtypes
    have which. AVG is a sum, divided by the number of ranks.""",
    "src": """\
src : int, optional
    The source, as its rank in the world. Either it or `group_src` is given.""",
    "dst": """\
dst : int, optional
    The destination, as its rank in the world. Either it or `group_dst` is given.""",
    "group_src": """\
group_src : int, optional
    The source, as its rank in the group, instead of `src`.""",
    "group_dst": """\
group_dst : int, optional
    The destination, as its rank in the group, instead of `dst`.""",
    "tag": """\
tag : int, default 0
    A receive matches the sends with its tag. NCCL has no tags: 0 only.""",
    "group": """\
group : ProcessGroup, optional
    The group; ``None`` is the default group. Every rank of it makes the call; on other
    ranks, to whom `new_group` returned `GroupMember.NON_GROUP_MEMBER`, it does nothing
    but warn.""",
    "async_op": """\
async_op : bool, default False
    Return a `Work` at once instead of blocking. The arrays belong to the op until
    the Work is over.""",
}
#: Without `src` or `dst` the root of these is rank 0.
_WITH_A_ROOT = (
    *("gather", "scatter"),
    *("broadcast_object_list", "gather_object", "scatter_object_list"),
)
_DEFAULT_ROOTS = {
    name: f"""\
{name} : int, optional
    The {what}, as its rank in the world. Without it and `group_{name}` it is
    rank 0 of the world, or the first rank of a group that does not have rank 0."""
    for name, what in (("src", "source"), ("dst", "destination"))
}
# A message has two ranks, and the others of the group take no part.
_PARAMETERS_OF_MESSAGES = {
    "group": """\
group : ProcessGroup, optional
    The group of both ranks; ``None`` is the default group. On a rank outside the group
    the call does nothing but warn.""",
}
# The ops of objects are made of array ops, and block.
_PARAMETERS_OF_OBJECTS = {
    "use_batch": """\
use_batch : bool, default False
    Not used: accepted for c10d's signature. No backend connects two ranks apart from
    the rest of the group, which is what c10d spares NCCL by it.""",
    "device": """\
device : str or torch.device, optional
    The device type of the group whose backend carries the bytes, the same on all
    ranks, as ``"cpu"`` or ``"cuda:1"``; ``None`` is host memory where the group has a
    backend for it, else its first device type.""",
}
_RETURNS = """\
Work or None
    The Work with ``async_op=True``, else ``None`` after the op has ended. On a GPU
    the caller's current stream waits for the op, and the host does not. On a rank
    outside the group there is no op to wait for: ``None``, or a Work that is over."""
_NO_GROUP = (
    "There is no default group (`init_process_group` makes it), and `group` is ``None``"
)
_BEFORE = (
    "Raised on this rank before it sends anything, and the group stays usable; other "
    "ranks whose call was right wait for this one."
)
_FAILED = "DistTimeoutError, DistAbortedError, DistBackendError"
_HOW_IT_FAILED = (
    "The op failed. The message names rank, op and sequence number; the error has them "
    "as attributes."
)
_RAISED_BY_THE_WORK = (
    "``wait()`` of the Work raises it; the call itself does where the group is aborted "
    "already."
)
_RAISES = {
    "ValueError": (
        f"{_NO_GROUP}; a rank that is given is not in the group, or none is given; "
        "sizes do not fit; an array is not C-contiguous, or read-only where it is "
        "written; the group has no backend for the device type of the arrays; the "
        f"backend does not have the reduction for any dtype. {_BEFORE}"
    ),
    "TypeError": (
        "An argument is no array, no list of them, no reduction or no group; a dtype "
        "is none of those in the Notes; dtypes of one call differ; the backend has the "
        "reduction, but not for the dtype. Like `ValueError` it is raised before this "
        "rank sends anything."
    ),
    "NotImplementedError": (
        "The backend of the arrays' device type does not have the op."
    ),
}
_RAISES_OF_OBJECTS = {
    "TypeError, ValueError": (
        f"{_NO_GROUP}; an argument is wrong; an object cannot be pickled. {_BEFORE} "
        "The lengths of two ranks' lists are compared after the transfer."
    ),
    "DistError": (
        "An object cannot be unpickled here, or this rank refuses pickles "
        "(`refuse_pickles`). The op has ended on all ranks."
    ),
    _FAILED: _HOW_IT_FAILED,
}
_NOTES = """\
An array is one of numpy or cupy, a tensor of torch on the CPU or on CUDA, or any other
that exports DLPack. Of a tensor that requires a gradient the data are used, and
autograd learns nothing of the op. Arrays on CUDA need cupy. The dtypes are bool, the
integers, floats and complex numbers of numpy in native byte order, bfloat16 (of torch
or of ml_dtypes, a package that it needs in either case), and on NCCL float8 of torch.
Of longdouble and clongdouble only MPI and UCX have reductions. All arrays of a call are
on one device type, which chooses the backend.

Each rank checks its own arguments alone. Sizes, dtypes, roots or reductions that differ
from rank to rank end, by the backend, in an error, in an op that hangs, whose cause is
then found (``docs/faults.md``), or in wrong data."""


def documented(function: F) -> F:
    """Complete the docstring of a public op, in numpydoc's form; return `function`."""
    parameters = inspect.signature(function).parameters
    how = _HOW_IT_FAILED
    if "async_op" in parameters:
        how += f" With ``async_op=True`` {_RAISED_BY_THE_WORK}"
    elif "Work" in str(inspect.signature(function).return_annotation):
        how += f" {_RAISED_BY_THE_WORK[0].upper()}{_RAISED_BY_THE_WORK[1:]}"
    return _complete(function, {}, {**_RAISES, _FAILED: how}, _NOTES)


def documented_objects(function: F) -> F:
    """Do the same for an op that sends pickled objects."""
    return _complete(function, _PARAMETERS_OF_OBJECTS, _RAISES_OF_OBJECTS)


def documented_barrier(function: F) -> F:
    """Do the same for an op without arrays, which says itself what it raises."""
    return complete(function, _PARAMETERS)


def _complete(
    function: F,
    texts_of_kind: Mapping[str, str],
    raises: Mapping[str, str],
    notes: str = "",
) -> F:
    parameters = inspect.signature(function).parameters
    of_messages = _PARAMETERS_OF_MESSAGES if "tag" in parameters else {}
    roots = _DEFAULT_ROOTS if function.__name__ in _WITH_A_ROOT else {}
    texts = {**_PARAMETERS, **of_messages, **roots, **texts_of_kind}
    returns = _RETURNS if "async_op" in parameters else ""
    return complete(function, texts, raises, returns, notes)
