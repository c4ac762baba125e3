"""documented: the parts of the docstrings of clusters' methods that many share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from rankscope.backends.documentation import complete, complete_methods

__all__ = ["documented"]

C = TypeVar("C", bound=type)

_PARAMETERS = {
    "ranks": """\
ranks : int or iterable of int, optional
    The ranks; ``None``: all.""",
    "rank": """\
rank : int
    The rank.""",
    "group": """\
group : str or GroupKey, optional
    A name, an id or a key; ``None``: all groups.""",
    "timeout": """\
timeout : float, optional
    Seconds that the ranks get to answer; ``None``: no limit.""",
    "backend": """\
backend : str, optional
    Config of the default group, as in `init_process_group`.""",
    "torch": """\
torch : bool or str, default False
    Whether cells begin with ``torch.distributed``: ``torch``, ``dist`` and ``device``
    are there, the environment is that of torchrun, and the default group is torch's,
    with `timeout`. A text names its backends, as in ``"gloo"`` or
    ``"cpu:gloo,cuda:nccl"``, the default where every rank has a GPU. Then there is no
    group of Rankscope until a cell calls ``rankscope.init_process_group()``, and
    `backend` is not given.""",
    "start_timeout": """\
start_timeout : float, default 120
    Seconds that the start may take.""",
    "progress": """\
progress : callable, optional
    Called with a line of text at each step.""",
    "every": """\
every : bool, default False
    Whether threads of Jupyter and of Rankscope are shown, too.""",
    "verdicts": """\
verdicts : sequence of Verdict
    What `diagnose` found.""",
}
_CLOSED = {"ClusterError": "It is closed."}
_NO_SUCH_RANK = {"ClusterError": "It is closed, or there is no such rank."}
_LOCAL = ("close", "shutdown", "glance", "status")


def documented(cls: C) -> C:
    """Complete the docstrings of a class of ranks and of its methods."""
    complete(cls, _PARAMETERS)
    return complete_methods(cls, _documented_method)


def _documented_method(method: Callable[..., Any]) -> None:
    takes_ranks = {"rank", "ranks"} & {*inspect.signature(method).parameters}
    raises = _NO_SUCH_RANK if takes_ranks else _CLOSED
    complete(method, _PARAMETERS, {} if method.__name__ in _LOCAL else raises)
