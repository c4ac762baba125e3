"""Functions that ipyparallel runs on a rank: they set and return its variables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

from IPython.core.getipython import get_ipython

from .value_port import ValuePort
from .values import MemoryFile, pack, read_memory_file, size_of, unpack

__all__ = ["UNREACHED", "close_files", "get_variables", "set_variables"]

#: Bytes from which values go through a file in memory, or a connection of their own.
LARGE = 1 << 20
#: The answer where the file or the port is out of reach: the values come by message.
UNREACHED = "unreached"
#: Seconds after which a file is closed that its reader has not: it is gone.
KEPT = 60.0

#: The files that were made here, and when.
_files: dict[bytes, tuple[MemoryFile, float]] = {}


def set_variables(
    names: Sequence[str],
    counts: Sequence[int],
    place: MemoryFile | ValuePort | None,
    *frames: Any,
) -> str:
    """Set variables; return why it could not be done, if so.

    The frames of each name are `frames`, or those at `place`; they are as many as its
    count. `UNREACHED`: the place is out of reach.
    """
    found: list[Any] | None = list(frames)
    if isinstance(place, MemoryFile):
        found = read_memory_file(place)
    elif place is not None:
        found = place.receive()
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
    names: Sequence[str], shared: bool, port: ValuePort | None = None
) -> tuple[Any, ...]:
    """Return the facts about the values, where their frames are, or the frames.

    The facts about a value are its class, empty where there is no such variable; why it
    cannot be had; and the number of its frames. `shared`: the notebook is on this host.
    Large values are in a file, or were sent to `port`, under a number; `UNREACHED`: the
    port is out of reach.
    """
    close_files(before=time.monotonic() - KEPT)
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
    place: MemoryFile | int | str | None = None
    if size_of(every) >= LARGE:
        if shared:
            place = MemoryFile.write(every)
        elif port is not None:
            # Not by message at once: a pull that was interrupted has closed its port.
            number = port.send(every)
            place = UNREACHED if number is None else number
    if place is None:
        return facts, None, *every
    if isinstance(place, MemoryFile):
        _files[place.token] = place, time.monotonic()
    return facts, place


def _namespace() -> dict[str, Any]:
    shell: Any = get_ipython()
    names: dict[str, Any] = shell.user_ns
    return names


def close_files(*tokens: bytes, before: float = 0.0) -> None:
    """Close the files `tokens`, and those made `before` a time."""
    for token, (file, made) in list(_files.items()):
        if token in tokens or made < before:
            del _files[token]
            file.close()
