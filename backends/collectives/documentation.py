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
    The reduction. Which of them a dtype has depends on the backend: the tables of
    ``docs/backends.md``. AVG is a sum, divided by the number of ranks.""",
    "src": """\
src : int, optional
    The source, as its rank in the world.""",
    "dst": """\
dst : int, optional
    The destination, as its rank in the world.""",
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
    the caller's current stream waits for the op, and the host does not."""
_FAILED = "DistTimeoutError, DistAbortedError, DistBackendError"
_HOW_IT_FAILED = (
    "The op failed. The message names rank, op and sequence number; the error has them "
    "as attributes."
)
_RAISES = {
    "TypeError, ValueError": (
        "An argument is wrong, or the backend cannot do the op with it: an array that "
        "is not C-contiguous or, where it is written, not writable; sizes or dtypes "
        "that differ; a rank that is not in the group. Nothing was sent; the group "
        "stays usable."
    ),
    "NotImplementedError": (
        "The backend of the arrays' device type does not have the op."
    ),
    _FAILED: f"{_HOW_IT_FAILED} With ``async_op=True`` the Work raises the error.",
}
_RAISES_OF_OBJECTS = {
    "TypeError, ValueError": (
        "An argument is wrong, or an object cannot be pickled. Nothing was sent; the "
        "group stays usable. The lengths of two ranks' lists are compared after the "
        "transfer."
    ),
    "DistError": (
        "An object cannot be unpickled here, or this rank refuses pickles "
        "(`refuse_pickles`). The op has ended on all ranks."
    ),
    _FAILED: _HOW_IT_FAILED,
}


def documented(function: F) -> F:
    """Complete the docstring of a public op, in numpydoc's form; return `function`."""
    return _complete(function, {}, _RAISES)


def documented_objects(function: F) -> F:
    """Do the same for an op that sends pickled objects."""
    return _complete(function, _PARAMETERS_OF_OBJECTS, _RAISES_OF_OBJECTS)


def _complete(
    function: F, texts_of_kind: Mapping[str, str], raises: Mapping[str, str]
) -> F:
    parameters = inspect.signature(function).parameters
    of_messages = _PARAMETERS_OF_MESSAGES if "tag" in parameters else {}
    texts = {**_PARAMETERS, **of_messages, **texts_of_kind}
    returns = _RETURNS if "async_op" in parameters else ""
    return complete(function, texts, raises, returns)
