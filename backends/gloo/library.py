"""Which gloo library this process uses."""

from __future__ import annotations

import contextlib
import contextvars
import importlib.machinery
import importlib.metadata
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..did_you_mean import did_you_mean
from ..errors import DistBackendError
from ..install import pip_install, with_extra
from ..messaging.connecting import interface_of, own_address

__all__ = [
    "VARIABLE",
    "GlooInfo",
    "Library",
    "chosen",
    "gloo_info",
    "gloo_options",
    "has_options",
    "installed",
    "unavailable",
]

#: The environment variable that names the library.
VARIABLE = "RANKSCOPE_GLOO"

# The preferred one first, each with its extension, and gloo's transport in it.
_FILES = {"pygloo": "pygloo", "xoscar": "xoscar/collective/xoscar_pygloo"}
_TRANSPORTS = {"pygloo": "uv", "xoscar": "tcp"}

# The versions that the extra `gloo` names, too. xoscar's dependencies (pandas and scipy
# among them) are not needed here.
_REQUIREMENTS = {
    "pygloo": ["'pygloo>=0.2.1,<0.3'"],
    "xoscar": ["--no-deps", "'xoscar>=0.12,<0.13'"],
}

_option: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "rankscope_gloo_library", default=None
)


@dataclass(frozen=True)
class Library:
    """An installed gloo library: its distribution, and the file of its extension."""

    name: str
    version: str
    path: str

    @property
    def transport(self) -> str:
        """gloo's transport between the ranks: ``"uv"`` or ``"tcp"``."""
        return _TRANSPORTS[self.name]

    @property
    def waits(self) -> bool:
        """Whether it can be told to wait for a late rank longer than 30 s."""
        return self.name == "xoscar"

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True)
class GlooInfo:
    """Which gloo this process uses, and how; made by `gloo_info`.

    Parameters
    ----------
    library : str
        The distribution that carries the library: ``"pygloo"`` or ``"xoscar"``.
    version : str
        Its version.
    path : str
        The file of the library.
    transport : str
        ``"uv"`` (pygloo) or ``"tcp"`` (xoscar).
    interface, address : str
        The network interface, and its address, at which ranks on other hosts reach this
        one. Ranks that all share a host use loopback, unless GLOO_SOCKET_IFNAME is set.

    Examples
    --------
    >>> isinstance(dist.gloo_info(), dist.GlooInfo)
    True
    """

    library: str
    version: str
    path: str
    transport: str
    interface: str
    address: str

    def __str__(self) -> str:
        return (
            f"gloo: {self.library} {self.version} over {self.transport}, interface "
            f"{self.interface} ({self.address})\n"
            f"      {self.path}"
        )


@contextlib.contextmanager
def gloo_options(*, library: str | None = None) -> Iterator[None]:
    """Create the gloo backends of the block with these options; use it on every rank.

    The first use of a group creates the group's backend, so the first use belongs in
    the block.

    Parameters
    ----------
    library : str, optional
        ``"pygloo"`` or ``"xoscar"``, the same on all ranks of a group. ``None`` is what
        the environment variable RANKSCOPE_GLOO names, or else the first of the two that
        is installed.

    Yields
    ------
    None
        Nothing.

    Raises
    ------
    ValueError
        Another name.

    Notes
    -----
    In the place of ``pg_options``, which torch's gloo ignores.

    Examples
    --------
    >>> with dist.gloo_options(library="xoscar"):
    ...     group = dist.new_group()
    """
    if library is not None and library not in _FILES:
        raise ValueError(
            f"gloo_options: library={library!r}; expected {_known()}"
            f"{did_you_mean(library, list(_FILES))}"
        )
    token = _option.set(library or _option.get())
    try:
        yield
    finally:
        _option.reset(token)


def has_options() -> bool:
    return _option.get() is not None


def gloo_info() -> GlooInfo:
    """Return which gloo library this process uses, its transport and its interface.

    Returns
    -------
    GlooInfo
        What there is; as text in two lines.

    Raises
    ------
    DistBackendError
        There is no gloo; the message has the remedy.

    Examples
    --------
    >>> info = dist.gloo_info()
    >>> info.library in ("pygloo", "xoscar"), info.transport in ("uv", "tcp")
    (True, True)
    """
    library = chosen()
    address = own_address()
    return GlooInfo(
        library.name,
        library.version,
        library.path,
        library.transport,
        interface_of(address),
        address,
    )


def unavailable() -> str | None:
    """Return why gloo cannot be used here, with the remedy; ``None`` if it can."""
    try:
        chosen()
    except DistBackendError as error:
        return str(error)
    return None


def installed() -> dict[str, Library]:
    """Return the installed libraries by name, the preferred one first."""
    found = {name: _find(name) for name in _FILES}
    return {name: library for name, library in found.items() if library is not None}


def _find(name: str) -> Library | None:
    """Return the library of distribution `name`, without an import of its package."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(str(distribution.locate_file(_FILES[name] + suffix)))
        if path.exists():
            return Library(name, distribution.version, str(path))
    return None


def chosen() -> Library:
    """Return the library that the options, the variable or the default names."""
    elsewhere = _unsupported()
    if elsewhere is not None:
        raise DistBackendError(elsewhere)
    found = installed()
    by = "gloo_options" if _option.get() else VARIABLE
    name = _option.get() or os.environ.get(VARIABLE, "")
    if not name:
        if not found:
            raise DistBackendError(
                "gloo cannot be used: neither pygloo nor xoscar, which carry gloo's "
                "library, is installed for this Python: "
                f"{pip_install(with_extra('gloo'))}. The default backends need nothing "
                "more: leave out backend="
            )
        return next(iter(found.values()))
    if name not in _FILES:
        raise DistBackendError(
            f"gloo cannot be used: {by} is {name!r}; expected {_known()}"
            f"{did_you_mean(name, list(_FILES))}"
        )
    if name not in found:
        remedy = f"{pip_install(*_REQUIREMENTS[name])}, or unset {by}"
        has_wheel = sys.version_info[:2] == (3, 10) and platform.machine() == "x86_64"
        if name == "pygloo" and not has_wheel:
            remedy = f"its wheels are for CPython 3.10 on x86-64; unset {by}"
        raise DistBackendError(
            f"gloo cannot be used: {by} names {name}, which is not installed for this "
            f"Python: {remedy}"
        )
    return found[name]


def _unsupported() -> str | None:
    """Return what of this platform no gloo library supports, as a sentence."""
    machine, implementation = platform.machine(), platform.python_implementation()
    if not sys.platform.startswith("linux") or machine not in ("x86_64", "aarch64"):
        return (
            "Rankscope can use gloo on Linux on x86-64 and aarch64 only; this is "
            f"{platform.system()} on {machine}."
        )
    if implementation != "CPython":
        return f"gloo's libraries need CPython; this is {implementation}."
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return (
            "gloo's libraries have no wheel for the free-threaded build of CPython, "
            "which this is; the ordinary build has gloo."
        )
    return None


def _known() -> str:
    return " or ".join(repr(name) for name in _FILES)
