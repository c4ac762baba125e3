"""documented: the parts of a docstring that all collectives share, written once.

``help(dist.all_reduce)`` and Jupyter's ``dist.all_reduce?`` show them for each op.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..documentation import complete

__all__ = ["documented", "documented_objects"]

F = TypeVar("F", bound=Callable[..., Any])
Parameters = Mapping[str, inspect.Parameter]

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
    A receive matches the sends with its tag. gloo takes 0 to 2147483647, mpi, ucx and
    ucc take 0 to 31999. nccl has no tags: it takes 0 alone.""",
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
    "there is no default group (`init_process_group` makes it), and `group` is ``None``"
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
    "``wait()`` of the Work raises it. The call itself does where the op cannot start: "
    "the group is aborted already, or its backend cannot be made."
)
#: What is wrong with an argument that raises `ValueError`, by the parameter.
_WRONG_VALUES = {
    "op": (
        "`op` is a reduction that the backend has for no dtype, or PREMUL_SUM without "
        "a factor (`make_nccl_premul_sum`)"
    ),
    "tag": "`tag` is none of the backend's",
    **dict.fromkeys(
        ("input_list", "tensor_list", "output_tensor_list", "output_tensor_lists"),
        "a list has not one entry for each rank",
    ),
    **dict.fromkeys(
        ("gather_list", "scatter_list"),
        "the list is missing on the root, is given on another rank, or has not one "
        "array for each rank",
    ),
    "input_tensors": "there are not as many outputs as inputs",
    "input_split_sizes": (
        "the sizes of a split are not one for each rank, or do not add up to dimension "
        "0; dimension 0 cannot be split evenly, and no sizes are given"
    ),
}
#: Parameters that are lists of arrays.
_LISTS = {
    *("input_list", "tensor_list", "gather_list", "scatter_list", "tensors"),
    *("input_tensor_list", "input_tensors"),
}
#: Parameters of arrays beside `tensor`, with which it is compared; those named
#: ``output…`` are others.
_LISTS_BESIDE_TENSOR = {"tensor_list", "gather_list", "scatter_list"}
_WRONG_ARRAYS = (
    "an array is not C-contiguous, or read-only where it is written; the group has no "
    "backend for the device type of the arrays; an array is on another device than the "
    "others, or than the GPU that `init_process_group` got as ``device_id``"
)
_LACKS_OP = "The backend of the arrays' device type does not have the op."
_RAISES_OF_OBJECTS = {
    "NotImplementedError": "The backend lacks an op that the bytes are sent by.",
    "DistError": (
        "An object cannot be unpickled here, or this rank refuses pickles "
        "(`refuse_pickles`). The op has ended on all ranks."
    ),
    _FAILED: _HOW_IT_FAILED,
}
#: The functions of objects that fill a list with what another list has.
_OF_TWO_LISTS = ("broadcast_object_list", "recv_object_list")
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
        how += f" {_RAISED_BY_THE_WORK}"
    raises = {
        "ValueError": _when_value_error(function.__name__, parameters),
        "TypeError": _when_type_error(parameters),
        "NotImplementedError": _LACKS_OP,
        _FAILED: how,
    }
    return _complete(function, {}, raises, _NOTES)


def documented_objects(function: F) -> F:
    """Do the same for an op that sends pickled objects."""
    name, parameters = function.__name__, inspect.signature(function).parameters
    wrong = [_NO_GROUP, *_wrong_rank(name, parameters)]
    if "tag" in parameters:
        wrong.append(_WRONG_VALUES["tag"])
    wrong.append("an argument has the wrong type, a list the wrong length")
    if name != "recv_object_list":
        wrong.append("an object cannot be pickled")
    wrong.append("the call is in a block of `coalescing_manager`")
    text = f"{_sentence(wrong)} {_BEFORE}"
    if name in _OF_TWO_LISTS:
        text += " The lengths of two ranks' lists are compared after the transfer."
    raises = {"TypeError, ValueError": text, **_RAISES_OF_OBJECTS}
    if name == "send_object_list":
        del raises["DistError"]
    return _complete(function, _PARAMETERS_OF_OBJECTS, raises)


def documented_barrier(function: F) -> F:
    """Do the same for an op without arrays, which says itself what it raises."""
    return complete(function, _PARAMETERS)


def _when_value_error(name: str, parameters: Parameters) -> str:
    wrong = [_NO_GROUP] if "group" in parameters else []
    wrong += _wrong_rank(name, parameters)
    wrong += [text for given, text in _WRONG_VALUES.items() if given in parameters]
    if _compares_arrays(parameters):
        wrong.append("sizes do not fit")
    return f"{_sentence([*dict.fromkeys(wrong), _WRONG_ARRAYS])} {_BEFORE}"


def _wrong_rank(name: str, parameters: Parameters) -> list[str]:
    """Return what is wrong with the rank of the root, or of the other side, if any."""
    given = next((one for one in ("src", "dst") if one in parameters), None)
    if given is None:
        return []
    is_message = "tag" in parameters
    may_be_missing = name in _WITH_A_ROOT or (is_message and given == "src")
    text = f"`{given}` and `group_{given}` are both given, "
    text += "" if may_be_missing else "or neither is, "
    text += "or name no rank of the group"
    if is_message:
        text += ", or this rank itself"
    if is_message and may_be_missing:
        text += "; neither is given, and the backend is nccl or ucc"
    return [text]


def _when_type_error(parameters: Parameters) -> str:
    kinds = [
        "no array",
        *(["no list of them"] if _LISTS & {*parameters} else []),
        *(["no reduction"] if "op" in parameters else []),
        "no group",
    ]
    wrong = [f"an argument is {', '.join(kinds[:-1])} or {kinds[-1]}"]
    whole = [
        *(["a rank"] if {"src", "dst"} & {*parameters} else []),
        *(["the tag"] if "tag" in parameters else []),
        *(["the size of a split"] if "input_split_sizes" in parameters else []),
    ]
    if whole:
        wrong.append(f"{' or '.join(whole)} is no integer")
    wrong.append("a dtype is none of those in the Notes, or needs a missing package")
    if _compares_arrays(parameters):
        wrong.append("dtypes of one call differ")
    if "op" in parameters:
        wrong.append("the backend has the reduction, but not for the dtype")
    return (
        f"{_sentence(wrong)} Like `ValueError` it is raised before this rank sends "
        "anything."
    )


def _compares_arrays(parameters: Parameters) -> bool:
    """Return whether an op has arrays that it compares with each other."""
    return any(
        name in _LISTS_BESIDE_TENSOR or name.startswith("output") for name in parameters
    )


def _sentence(clauses: Sequence[str]) -> str:
    text = "; ".join(clauses)
    return f"{text[0].upper()}{text[1:]}."


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
