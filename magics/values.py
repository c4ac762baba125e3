"""Values of options: read, checked, and refused with the reason.

Everything that can be known without an engine is found here, before one starts.
"""

from __future__ import annotations

import math

import numpy as np

from rankscope.backends import BackendConfig
from rankscope.backends.benchmark import parse_sizes
from rankscope.engines.gpus import parse_devices
from rankscope.engines.launch import launcher_names

from .options import closest

__all__ = [
    "backend",
    "count",
    "device",
    "dtype",
    "gpus",
    "launcher",
    "names",
    "seconds",
    "sizes",
    "times",
]


def count(text: str) -> int:
    """Return a number of ranks."""
    try:
        number = int(text)
    except ValueError:
        raise ValueError("expected a number of ranks, such as 4") from None
    if number < 1:
        raise ValueError("there must be at least 1 rank")
    return number


def times(text: str) -> int:
    """Return how often something is to be done; 0 is never."""
    if not text.isdecimal():
        raise ValueError("expected a whole number, such as 20")
    return int(text)


def sizes(text: str) -> list[int]:
    """Return bytes; the `ValueError` says how they are spelled."""
    return parse_sizes(text)


def names(text: str) -> list[str]:
    """Return the names in a list with commas."""
    found = [name.strip() for name in text.split(",")]
    if not all(found) or len(set(found)) < len(found):
        raise ValueError("expected different names with commas between them")
    return found


def dtype(text: str) -> str:
    """Return the name of a numpy dtype."""
    try:
        return np.dtype(text).name
    except TypeError:
        raise ValueError("expected a dtype, such as float32 or int64") from None


def device(text: str) -> str:
    """Return a device type that arrays can be made on."""
    if text not in ("cpu", "cuda"):
        raise ValueError("expected cpu or cuda")
    return text


def gpus(text: str) -> tuple[int, ...]:
    """Return the numbers of CUDA devices, in the order given."""
    return parse_devices(text)


def seconds(text: str) -> float:
    """Return a duration in seconds."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("expected seconds, such as 30 or 0.5") from None
    if not (math.isfinite(value) and value > 0):
        raise ValueError("expected a number of seconds above 0")
    return value


def backend(text: str) -> str:
    """Return `text` if it is a `BackendConfig`; its `ValueError` says what is wrong."""
    try:
        BackendConfig(text)
    except ValueError as error:
        # What was typed stands before every message here.
        raise ValueError(str(error).removeprefix(f"backend {text!r}: ")) from None
    return text


def launcher(text: str) -> str:
    """Return the name of a launcher of ipyparallel's, or of a launcher class."""
    names = launcher_names()
    if "." in text or text.lower() in names:
        return text
    raise ValueError(
        f"no such launcher{closest(text, names)} (there are {', '.join(names)})"
    )
