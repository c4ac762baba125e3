"""documented: the parts of the docstrings of a store's methods that all share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ..documentation import complete, complete_methods

__all__ = ["documented"]

C = TypeVar("C", bound=type)

_PARAMETERS = {
    "key": """\
key : str
    The key.""",
    "keys": """\
keys : sequence of str
    The keys.""",
    "value": """\
value : bytes or str
    The value; text is encoded as UTF-8.""",
    "values": """\
values : sequence of bytes or str
    A value for each key.""",
    "amount": """\
amount : int
    What is added; may be negative, and 0 reads the number.""",
    "expected": """\
expected : bytes or str
    The value that `key` must have to be set; ``b""`` stands for an absent key.""",
    "desired": """\
desired : bytes or str
    The value to set.""",
    "timeout": """\
timeout : float or timedelta, optional
    How long to wait at most, in seconds if it is a number; 0 does not wait. The
    default is the store's own `timeout`.""",
    "block": """\
block : bool, default True
    Whether to wait for a value if the queue is empty.""",
    "world_size": """\
world_size : int
    The number of callers.""",
    "callback": """\
callback : callable
    What to call; one that raises is logged, and others are called all the same.""",
}
_CLOSED = {
    "DistStoreError": (
        "The store is closed. A `TCPStore` raises `DistNetworkError` when it has lost "
        "the process that serves the keys."
    ),
}
_LATE = {
    "DistStoreTimeoutError": (
        "The timeout passed; the message names the keys that are still missing, and "
        "the ranks that were to set them."
    ),
}
_WRONG_TIMEOUT = {"TypeError, ValueError": "`timeout` is no duration, or is negative."}
_WRONG_VALUE = {"TypeError": "A value is neither bytes nor text."}
_VALUES = {"value", "values", "expected", "desired"}
#: What `key` is for some methods.
_KEYS = {
    **dict.fromkeys(("queue_push", "queue_pop", "queue_len"), "The name of the queue."),
    "barrier": "The name of the barrier.",
    "last_will": "The key that is set if this process dies.",
    "watch": "The key whose value is waited for.",
}
# They answer from the object itself, and end what others wait for.
_LOCAL = ("close", "set_timeout", "has_extended_api")


def documented(cls: C) -> C:
    """Complete the docstrings of the methods of a store, in numpydoc's form."""
    return complete_methods(cls, _documented_method)


def _documented_method(method: Callable[..., Any]) -> None:
    parameters = {*inspect.signature(method).parameters}
    waits = "timeout" in parameters
    raises = {
        **(_WRONG_TIMEOUT if waits else {}),
        **(_WRONG_VALUE if parameters & _VALUES else {}),
        **(_LATE if waits else {}),
        **_CLOSED,
    }
    texts = dict(_PARAMETERS)
    if method.__name__ in _KEYS:
        texts["key"] = f"key : str\n    {_KEYS[method.__name__]}"
    complete(method, texts, {} if method.__name__ in _LOCAL else raises)
