"""Finding UCX's libraries and loading them into this process.

No package is imported: the libraries are loaded from the folder of the wheel, with
settings that keep UCX from patching malloc and from taking signals.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import platform
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from ..environment import being_changed, being_read
from ..errors import DistBackendError
from ..install import pip_install, with_extra
from . import ucp

__all__ = [
    "ERROR_FROM",
    "VARIABLE",
    "UCXError",
    "folder",
    "load",
    "settings_for_loading",
    "unavailable_reason",
]

#: The environment variable that names the folder of another UCX than the wheel's, such
#: as one that was built for InfiniBand.
VARIABLE = "RANKSCOPE_UCX"

_FILES = ("libucs.so.0", "libuct.so.0", "libucp.so.0")

# It brings the other two in the same step, in which no other thread loads an MPI. Its
# symbols stay local: an MPI with a UCX of its own would find ours in their place.
_UCP = _FILES[-1]

# Read when the libraries are loaded. Without them UCX writes its own code over malloc's
# and mmap's first instructions, handles SIGHUP, SIGSEGV, SIGBUS, SIGFPE and SIGILL, and
# prints a warning for each message that an aborted group had not received. Its errors
# would go to stdout, which is a script's result, and a cell's.
_SETTINGS = {
    "UCX_LOG_LEVEL": "error",
    "UCX_LOG_FILE": "stderr",
    "UCX_MEM_EVENTS": "n",
    "UCX_DEBUG_SIGNO": "",
    "UCX_HANDLE_ERRORS": "none",
}

#: A ``ucs_status_ptr_t`` from here on is no request, but an error in disguise.
ERROR_FROM = (1 << 8 * ctypes.sizeof(ctypes.c_void_p)) + ucp.CONSTANTS["UCS_ERR_LAST"]

_lock = threading.Lock()
_loaded: UCXLibrary | None = None


class UCXError(Exception):
    """A call of UCX failed; `status` is its ``ucs_status_t``.

    `peer` is the rank, in the group, that the call was about; ``None``: none, or any.
    """

    def __init__(
        self, call: str, status: int, text: str, peer: int | None = None
    ) -> None:
        super().__init__(f"{call} failed: {text}")
        self.call, self.status, self.text, self.peer = call, status, text, peer


class UCXLibrary:
    """UCP's functions as attributes: ``library.ucp_worker_progress(worker)``."""

    def __init__(self, path: Path) -> None:
        file = str(path / _UCP)
        library, with_gil = ctypes.CDLL(file), ctypes.PyDLL(file)
        for function in ucp.FUNCTIONS:
            source = with_gil if function.short else library
            entry = getattr(source, function.name)
            entry.restype = function.result
            if not function.by_words:
                entry.argtypes = function.arguments
            setattr(self, function.name, entry)
        self.version: str = self.ucp_get_version_string().decode()
        folders = {str(found) for found in _loaded_folders()}
        if len(folders) != 1:
            raise OSError(f"parts of it are loaded from {', '.join(sorted(folders))}")
        #: The folder of the libraries.
        self.path = Path(*folders)

    def __getattr__(self, name: str) -> Any:
        # For the type checker: the functions are set one by one above.
        raise AttributeError(f"UCX's {name} is not among ucp.FUNCTIONS")

    def check(self, call: str, status: int, peer: int | None = None) -> None:
        """Raise `UCXError` unless `status`, the result of `call`, says success."""
        if status < 0:
            raise UCXError(call, status, self.explain(status), peer)

    def explain(self, status: int) -> str:
        """Return UCX's text for a ``ucs_status_t``."""
        text: str = self.ucs_status_string(status).decode()
        return text

    def refuse(self, call: str, pointer: int, peer: int | None = None) -> NoReturn:
        """Raise the `UCXError` that a pointer from `ERROR_FROM` on is in disguise."""
        status = pointer - (ERROR_FROM - ucp.CONSTANTS["UCS_ERR_LAST"])
        raise UCXError(call, status, self.explain(status), peer)


def _loaded_folders() -> set[Path]:
    """Return the folders from which parts of UCX are loaded."""
    with open("/proc/self/maps") as maps:
        files = {
            Path(line.split(maxsplit=5)[-1].strip()) for line in maps if "/" in line
        }
    names = tuple(file.partition(".")[0] + "." for file in _FILES)
    return {file.parent for file in files if file.name.startswith(names)}


def _loaded_from() -> Path | None:
    """Return the folder of the UCX that this process has loaded, in whole or in part.

    Open MPI and MPICH bring their own, and load its parts one after the other. Two are
    not possible. The loader takes one library for the other where the second UCX asks
    for its parts by their names, and mixed parts crash.
    """
    return next(iter(_loaded_folders()), None)


def folder() -> Path | None:
    """Return the folder of UCX's libraries; ``None`` where there is none."""
    named = os.environ.get(VARIABLE, "")
    if named:
        return Path(named)
    # Its package is not imported: that would load UCX with the settings of others.
    spec = importlib.util.find_spec("libucx")
    places = (spec.submodule_search_locations if spec is not None else None) or ()
    for place in places:
        found = Path(place) / "lib"
        if (found / _FILES[-1]).exists():
            return found
    return None


def unavailable_reason() -> str | None:
    """Return why UCX cannot be used here, with the remedy; ``None`` if it can."""
    if not sys.platform.startswith("linux") or sys.maxsize < 1 << 32:
        return (
            "Rankscope can use UCX on 64-bit Linux only; this is "
            f"{platform.system()} on {platform.machine()}."
        )
    found = folder()
    if found is None:
        return (
            "neither libucx-cu12 nor libucx-cu13, which carry UCX (no GPU is needed), "
            f"is installed: {pip_install(with_extra('ucx'))}"
        )
    missing = [file for file in _FILES if not (found / file).exists()]
    if missing:
        return (
            f"{VARIABLE} is {str(found)!r}, a folder without {', '.join(missing)}; "
            "expected the folder of UCX's libraries"
        )
    return None


def load() -> UCXLibrary:
    """Return UCX, loaded at the first call."""
    global _loaded
    with _lock:
        if _loaded is not None:
            return _loaded
        reason, own = unavailable_reason(), folder()
        while _loaded is None:
            begun = _loaded_from()
            path = begun or own
            if path is None or (begun is None and reason is not None):
                raise DistBackendError(f"the ucx backend cannot be used: {reason}")
            with settings_for_loading():
                try:
                    _loaded = UCXLibrary(path)
                except (OSError, AttributeError) as error:
                    if begun is None and _loaded_from() is not None:
                        # An MPI has begun to load its own on another thread just now,
                        # whose first part ours has met. It can have the rest of that.
                        continue
                    raise DistBackendError(
                        f"the ucx backend cannot be used: UCX in {path} does not load: "
                        f"{error}"
                    ) from error
        return _loaded


@contextlib.contextmanager
def settings_for_loading() -> Iterator[None]:
    """Have UCX, if it is loaded meanwhile, take no signals and patch nothing.

    The variables are not set for good: a program that this process starts, such as one
    that uses MPI, may want UCX otherwise.
    """
    with being_changed():
        added = [name for name in _SETTINGS if name not in os.environ]
        os.environ.update({name: _SETTINGS[name] for name in added})
    try:
        with being_read():
            yield
    finally:
        with being_changed():
            for name in added:
                os.environ.pop(name, None)
