"""Finding UCC's library and loading it into this process, over the UCX that is used."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import sysconfig
import threading
from collections.abc import Iterator
from ctypes import byref, c_void_p
from pathlib import Path
from typing import Any

from ..errors import DistBackendError
from ..ucx import library as ucx
from . import ucc

__all__ = ["VARIABLE", "UCCError", "UCCLibrary", "find", "load", "unavailable_reason"]

#: The environment variable that names the library: the file, or its folder.
VARIABLE = "RANKSCOPE_UCC_LIBRARY"

_FILE = "libucc.so.1"

# The version of the interface that is asked for; a library takes that of any 1.x.
_API = (1, 0)

_lock = threading.Lock()
_loaded: UCCLibrary | None = None


class UCCError(Exception):
    """A call of UCC failed; `status` is its ``ucc_status_t``."""

    def __init__(self, call: str, status: int, text: str) -> None:
        super().__init__(f"{call} failed: {text}")
        self.status = status


class UCCLibrary:
    """UCC's functions as attributes: ``library.ucc_context_progress(context)``.

    Parameters
    ----------
    path : the library's file.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        for function in ucc.FUNCTIONS:
            entry = getattr(library, function.name)
            entry.restype, entry.argtypes = function.result, function.arguments
            setattr(self, function.name, entry)
        #: The library's file.
        self.path = path
        self.version: str = self.ucc_get_version_string().decode()
        #: ``ucc_lib_h``, of all contexts of this process.
        self.handle = self._begin()

    def __getattr__(self, name: str) -> Any:
        # For the type checker: the functions are set one by one above.
        raise AttributeError(f"UCC's {name} is not among ucc.FUNCTIONS")

    def _begin(self) -> int:
        parameters = ucc.LibraryParameters(
            mask=ucc.CONSTANTS["UCC_LIB_PARAM_FIELD_THREAD_MODE"],
            thread_mode=ucc.CONSTANTS["UCC_THREAD_MULTIPLE"],
        )
        config, handle = c_void_p(), c_void_p()
        self.call("ucc_lib_config_read", None, None, byref(config))
        try:
            self.call(
                "ucc_init_version", *_API, byref(parameters), config, byref(handle)
            )
        finally:
            self.ucc_lib_config_release(config)
        return handle.value or 0

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function; raise `UCCError` unless its status says success."""
        status: int = getattr(self, name)(*arguments)
        self.check(name, status)
        return status

    def check(self, name: str, status: int) -> None:
        """Raise `UCCError` if `status`, the result of `name`, is an error."""
        if status < 0:
            raise UCCError(name, status, self.ucc_status_string(status).decode())


def _folders() -> Iterator[Path]:
    """Yield the folders that are searched: HPC-X, the environment, the system."""
    hpcx = os.environ.get("HPCX_UCC_DIR", "")
    if hpcx:
        yield Path(hpcx) / "lib"
    yield Path(sys.prefix) / "lib"
    yield from map(Path, filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")))
    yield Path("/opt/hpcx/ucc/lib")
    multiarch = sysconfig.get_config_var("MULTIARCH")
    for base in ("/usr/local", "/usr"):
        for name in filter(None, (multiarch and f"lib/{multiarch}", "lib64", "lib")):
            yield Path(base) / name


def find() -> Path | None:
    """Return the library's file; ``None`` where there is none."""
    named = os.environ.get(VARIABLE, "")
    if named:
        path = Path(named)
        return path / _FILE if path.is_dir() else path
    places = (folder / _FILE for folder in _folders())
    return next((place for place in places if place.exists()), None)


def unavailable_reason() -> str | None:
    """Return why UCC cannot be used here, with the remedy; ``None`` if it can."""
    if not sys.platform.startswith("linux") or sys.maxsize < 1 << 32:
        return (
            "Rankscope can use UCC on 64-bit Linux only; this is "
            f"{platform.system()} on {platform.machine()}."
        )
    found = find()
    if found is None:
        return (
            f"no {_FILE} is found. UCC is no package of Python: it comes with HPC-X, "
            "in NVIDIA's containers, and from conda-forge (conda install -c "
            f"conda-forge ucc); {VARIABLE} names the file where it is elsewhere"
        )
    if not found.exists():
        return f"{VARIABLE} is {str(found)!r}, and there is no such file"
    return None


def load() -> UCCLibrary:
    """Return UCC, loaded at the first call.

    Raises `DistBackendError`, with the remedy, if it cannot be used.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            reason, path = unavailable_reason(), find()
            if reason is not None or path is None:
                raise DistBackendError(f"the ucc backend cannot be used: {reason}")
            # UCC asks for UCX by the names of its parts, and there can be one UCX in
            # a process: that of the ucx backend, or else one beside UCC.
            if ucx.unavailable_reason() is None:
                ucx.load()
            with ucx.settings_for_loading():
                try:
                    _loaded = UCCLibrary(path)
                except (OSError, AttributeError, UCCError) as error:
                    raise DistBackendError(
                        f"the ucc backend cannot be used: UCC in {path} does not "
                        f"load: {error}"
                    ) from error
        return _loaded
