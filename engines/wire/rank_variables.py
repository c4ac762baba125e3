"""Functions that ipyparallel runs on a rank: they set and return its variables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from IPython.core.getipython import get_ipython

from .values import MemoryFile, pack, read_memory_file, size_of, unpack

__all__ = ["close_files", "get_variable", "set_variables"]

#: Bytes from which a value goes through a file in memory.
LARGE = 1 << 20
#: Seconds after which a file is closed that its reader has not: it is gone.
KEPT = 60.0

#: The files that were made here, and when.
_files: dict[bytes, tuple[MemoryFile, float]] = {}


def set_variables(
    names: Sequence[str], counts: Sequence[int], file: MemoryFile | None, *frames: Any
) -> str:
    """Set variables; return why it could not be done, if so.

    The frames of each name are `frames`, or those of a `file`; they are as many as its
    count. ``"unshared"``: the file is out of reach.
    """
    found = list(frames) if file is None else read_memory_file(file)
    if found is None:
        return "unshared"
    namespace = _namespace()
    values = {}
    for name, count in zip(names, counts, strict=True):
        own, found = found[:count], found[count:]
        try:
            values[name] = unpack(own, namespace)
        except Exception as error:  # noqa: BLE001 - the error is the answer
            return f"{name} cannot be unpickled: {type(error).__name__}: {error}"
    namespace.update(values)
    return ""


def get_variable(name: str, shared: bool) -> tuple[Any, ...]:
    """Return what the value is, why there is none, its file if it has one, its frames.

    `shared`: the notebook is on this host.
    """
    close_files(before=time.monotonic() - KEPT)
    namespace = _namespace()
    if name not in namespace:
        return "", f"there is no variable {name!r}", None
    value = namespace[name]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    try:
        frames = pack(value)
    except Exception as error:  # noqa: BLE001 - the error is the answer
        return kind, f"{name} cannot be pickled: {type(error).__name__}: {error}", None
    if shared and size_of(frames) >= LARGE:
        file = MemoryFile.write(frames)
        if file is not None:
            _files[file.token] = file, time.monotonic()
            return kind, "", file
    return kind, "", None, *frames


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
