"""Functions that ipyparallel runs on a rank: they set and return its variables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from IPython.core.getipython import get_ipython

from .value_port import ValuePort
from .values import pack, size_of, unpack

__all__ = ["LARGE", "UNREACHED", "get_variables", "set_variables"]

#: Bytes from which values go over a connection of their own.
LARGE = 1 << 20
#: The answer where the port is out of reach: the values come by message.
UNREACHED = "unreached"


def set_variables(
    names: Sequence[str], counts: Sequence[int], port: ValuePort | None, *frames: Any
) -> str:
    """Set variables; return why it could not be done, if so."""
    found = list(frames) if port is None else port.receive()
    if found is None:
        return UNREACHED
    namespace = _namespace()
    values, rest = {}, iter(found)
    for name, count in zip(names, counts, strict=True):
        try:
            values[name] = unpack(list(islice(rest, count)), namespace)
        except Exception as error:  # noqa: BLE001 - the error is the answer
            return f"{name} cannot be unpickled: {type(error).__name__}: {error}"
    namespace.update(values)
    return ""


def get_variables(
    names: Sequence[str], port: ValuePort | None = None
) -> tuple[Any, ...]:
    """Return the facts about the values, where their frames are, or the frames.

    The facts about a value are its class, empty where there is no such variable; why it
    cannot be had; and the number of its frames. Large values were sent to `port`, under
    a number; `UNREACHED`: the port is out of reach.
    """
    namespace = _namespace()
    facts: list[tuple[str, str, int]] = []
    every: list[Any] = []
    for name in names:
        kind, why, frames = "", "", []
        if name in namespace:
            value = namespace[name]
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            try:
                frames = pack(value)
            except Exception as error:  # noqa: BLE001 - the error is the answer
                why = f"cannot be pickled: {type(error).__name__}: {error}"
        facts.append((kind, why, len(frames)))
        every += frames
    if port is None or size_of(every) < LARGE:
        return facts, None, *every
    # Not by message at once: a pull that was interrupted has closed its port.
    number = port.send(every)
    return facts, UNREACHED if number is None else number


def _namespace() -> dict[str, Any]:
    shell: Any = get_ipython()
    names: dict[str, Any] = shell.user_ns
    return names
