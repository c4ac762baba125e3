"""``python -m rankscope doctor``: what can be used here, and what is missing.

Each check is a function that yields findings. A finding is a fact (``ok``), an optional
part that is missing (``none``), advice (``note``) or a fault (``fault``), on which the
exit status depends.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

import psutil

from rankscope import __version__
from rankscope.backends import gloo_info, ucx_info, unavailable_reason
from rankscope.backends.attach.py_spy import PySpyError, dump, find_py_spy
from rankscope.backends.devices.cuda_install import has_driver
from rankscope.backends.gloo.library import VARIABLE, installed
from rankscope.backends.install import pip_install, with_extra
from rankscope.backends.interface.registry import known_backends, resolve
from rankscope.backends.messaging.connecting import interface_of, own_address
from rankscope.backends.tcp.connector import (
    TRANSPORTS,
    chosen_transports,
    wants_encryption,
)
from rankscope.backends.tcp.peer_memory import Probe, allow_siblings
from rankscope.widgets.units import bytes_text

__all__ = ["CHECKS", "Finding", "examine", "main"]

#: The Pythons that the tests run on.
SUPPORTED = ((3, 10), (3, 14))
#: Descriptors that a rank needs: sockets of ipyparallel, of the store and of groups.
DESCRIPTORS = 256
#: Bytes that large arrays in a segment of NCCL or MPI may take in /dev/shm.
SHARED_MEMORY = 64 << 20

_WIDTH = 88
_INDENT = " " * 22


@dataclass(frozen=True)
class Finding:
    """One line of the report: ``ok``, ``none``, ``note`` or ``fault``."""

    level: str
    name: str
    text: str

    def __str__(self) -> str:
        return textwrap.fill(
            self.text,
            _WIDTH,
            initial_indent=f"  {self.level:6}{self.name:14}",
            subsequent_indent=_INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )


# -- Python and platform ---------------------------------------------------------


def check_python() -> Iterator[Finding]:
    found = f"{platform.python_implementation()} {platform.python_version()}"
    least, most = (".".join(map(str, one)) for one in SUPPORTED)
    here = sys.version_info[:2]
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        found += ", free-threaded"
    if (
        found != f"CPython {platform.python_version()}"
        or not SUPPORTED[0] <= here <= SUPPORTED[1]
    ):
        text = f"{found}: the tests run on CPython {least} to {most}, with its GIL"
        yield Finding("note", "Python", text)
    else:
        yield Finding("ok", "Python", f"{found}, {sys.executable}")
    libc = " ".join(platform.libc_ver()).strip()
    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if not sys.platform.startswith("linux"):
        yield Finding(
            "fault", "platform", f"{system}: Rankscope needs Linux (docs/install.md)"
        )
    else:
        yield Finding("ok", "platform", f"{system}{libc and ', '}{libc}")


# -- backends --------------------------------------------------------------------


def check_backends() -> Iterator[Finding]:
    """Check which backends can be used; all but tcp are optional."""
    for name in known_backends():
        reason = unavailable_reason(name)
        if reason is not None:
            yield Finding("none", name, reason)
            continue
        devices = resolve(name).devices
        launcher = resolve(name).launcher
        needs = f"; its ranks are started by {launcher}" if launcher else ""
        yield Finding("ok", name, f"for {', '.join(devices)} arrays{needs}")


_READ_PROBE = (
    "import sys; from rankscope.backends.tcp.peer_memory import Probe\n"
    "print(Probe.memory(bytes.fromhex(sys.argv[1]), int(sys.argv[2])) is not None)"
)


def check_tcp() -> Iterator[Finding]:
    """Check what the default for host arrays uses, within this host and beyond it."""
    chosen = chosen_transports()
    if "unix" not in chosen:
        text = f"TCP on loopback, as {TRANSPORTS} says"
    elif "cma" not in chosen:
        text = f"Unix sockets, as {TRANSPORTS} says"
    elif _can_be_read():
        text = "Unix sockets, and reads of the sender's memory (process_vm_readv)"
    else:
        text = (
            "Unix sockets alone, slower for large arrays: this system forbids ranks to "
            "read each other's memory (process_vm_readv)"
        )
    yield Finding("ok", "one host", text)
    address = own_address()
    interface = interface_of(address)
    text = f"TCP at {address} ({interface})" + ", encrypted" * wants_encryption()
    yield Finding("ok", "other hosts", text)


def _can_be_read() -> bool:
    """Return whether another process can read this one's memory, as a rank does."""
    allow_siblings()
    probe = Probe(readable=True)
    message, pid = probe.message.hex(), str(os.getpid())
    return _run(sys.executable, "-c", _READ_PROBE, message, pid).stdout == "True\n"


def check_gloo() -> Iterator[Finding]:
    if unavailable_reason("gloo") is not None:
        return
    info = gloo_info()
    yield Finding(
        "ok", "library", f"{info.library} {info.version} over {info.transport}"
    )
    yield Finding(
        "ok",
        "interface",
        f"{info.interface} ({info.address}), for ranks of other hosts",
    )
    for name, library in installed().items():
        if name != info.library:
            text = f"{library} is installed, too: {VARIABLE}={name} chooses it"
            yield Finding("note", "library", text)


def check_ucx() -> Iterator[Finding]:
    if unavailable_reason("ucx") is not None:
        return
    info = ucx_info()
    yield Finding("ok", "library", f"UCX {info.version} in {info.path}")
    for name, value in info.settings.items():
        yield Finding("note", "setting", f"{name}={value}")


# -- MPI -------------------------------------------------------------------------

_MPI_LIBRARY = (
    "import mpi4py; mpi4py.rc.initialize = False\n"
    "from mpi4py import MPI\n"
    "print(mpi4py.__version__); print(MPI.Get_library_version().splitlines()[0])"
)


def check_mpi() -> Iterator[Finding]:
    if unavailable_reason("mpi") is not None:
        return
    # A process of its own: a broken MPI library may end the process that loads it.
    done = _run(sys.executable, "-c", _MPI_LIBRARY)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding("fault", "library", f"mpi4py does not load: {last}")
        return
    version, library = done.stdout.splitlines()[:2]
    yield Finding("ok", "library", f"{library.strip(chr(0))}, mpi4py {version}")
    from rankscope.engines.launch.clusters import find_mpiexec

    mpiexec = find_mpiexec()
    if mpiexec is None:
        yield Finding(
            "note",
            "launcher",
            "no mpiexec beside this Python or on PATH: "
            f"{pip_install(with_extra('mpi'))}",
        )
        return
    reported = (_run(mpiexec, "--version").stdout.strip().splitlines() or [""])[0]
    yield Finding("ok", "launcher", f"{mpiexec} ({reported or 'no version reported'})")


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60
    )


# -- GPUs ------------------------------------------------------------------------


_CUDA = (
    *("cupy", "cupy-cuda12x", "cupy-cuda13x", "nccl4py", "cuda-bindings"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)


def check_gpus() -> Iterator[Finding]:
    if not has_driver():
        yield Finding("none", "GPU", "this host has no driver of an NVIDIA GPU")
    elif shutil.which("nvidia-smi"):
        for line in _run("nvidia-smi", "-L").stdout.splitlines():
            yield Finding("ok", "GPU", line.partition(" (UUID")[0])
    else:
        yield Finding("ok", "GPU", "a driver is installed, nvidia-smi is not")
    for package in _CUDA:
        version = _version(package)
        if version is not None:
            yield Finding("ok", package, version)


# -- Jupyter ---------------------------------------------------------------------

_NO_SUBSHELLS = (
    "no subshells: a click on the board waits for the end of a cell, %%distributed "
    "excepted"
)

_NO_END = (sys.maxsize,)
_IPYPARALLEL = pip_install("'ipyparallel>=9,<10'")

#: Package, the first affected version and the first one after, the level, the advice.
_KNOWN = (
    (
        *("ipykernel", (7, 0), (7, 4), "note"),
        "7.0 to 7.3 can stop answering after many short cells; %load_ext rankscope "
        "prevents that in its kernel. 7.4, for Python 3.11 and later, is free of it",
    ),
    ("ipykernel", (), (7, 0), "note", _NO_SUBSHELLS),
    ("ipyparallel", (), (9,), "fault", _IPYPARALLEL),
    ("ipyparallel", (10,), _NO_END, "fault", _IPYPARALLEL),
    ("anywidget", (), (0, 9), "fault", pip_install("'anywidget>=0.9'")),
    ("jupyterlab", (), (4, 4), "note", _NO_SUBSHELLS),
)
_OPTIONAL = ("jupyterlab", "notebook")


def _optional(package: str, missing: str, about: str) -> Iterator[Finding]:
    version = _version(package)
    if version is None:
        yield Finding("none", package, missing)
    else:
        yield Finding("ok", package, f"{version}{about}")


def check_torch() -> Iterator[Finding]:
    """Check whether ranks can begin with torch, whose version is read without it."""
    missing = f"not in this environment: {pip_install('torch')}"
    about = "; %dist_init -n 4 --torch starts ranks with its default group"
    return _optional("torch", missing, about)


def check_stacks() -> Iterator[Finding]:
    """Check what ``rankscope diagnose --jobs`` reads the stacks of processes with."""
    try:
        py_spy = find_py_spy()
    except PySpyError as error:
        yield Finding("none", "py-spy", str(error))
        return
    try:
        dump(py_spy, os.getpid())
    except PySpyError as error:
        yield Finding("note", "py-spy", f"{py_spy} reads no process: {error}")
    else:
        yield Finding("ok", "py-spy", f"{py_spy}, for rankscope diagnose --jobs")


def check_top() -> Iterator[Finding]:
    about = ", for rankscope top"
    missing = f"not installed: {pip_install(with_extra('top'))}{about}"
    return _optional("textual", missing, about)


def check_jupyter() -> Iterator[Finding]:
    needed = ("ipyparallel", "ipykernel", "IPython", "ipywidgets", "anywidget")
    for name in (*needed, *_OPTIONAL):
        version = _version(name)
        if version is None:
            optional = name in _OPTIONAL
            yield Finding(
                "none" if optional else "fault",
                name,
                "not in this environment; the server may run in another one"
                if optional
                else f"not installed: {pip_install(name)}",
            )
            continue
        level, text = "ok", version
        for known, first, after, severity, advice in _KNOWN:
            if known == name and first <= _numbers(version) < after:
                level, text = severity, f"{version}: {advice}"
        yield Finding(level, name, text)
    if find_spec("ipyparallel") is not None:
        from rankscope.engines.errors import ClusterError
        from rankscope.engines.wire import ipyparallel_private

        try:
            ipyparallel_private.check()
        except ClusterError as error:
            yield Finding("fault", "ipyparallel", str(error))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (7, 4) of ``7.4.0rc1``."""
    return tuple(map(int, takewhile(str.isdigit, version.split(".")[:2])))


# -- limits ----------------------------------------------------------------------


def check_limits() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    text = f"{bytes_text(memory.available)} of {bytes_text(memory.total)} available"
    yield Finding("ok", "memory", text)
    limit = _memory_limit()
    if limit is not None:
        yield Finding("ok", "its limit", f"{bytes_text(limit)} for this control group")
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        small = free < SHARED_MEMORY
        yield Finding(
            "note" if small else "ok",
            "/dev/shm",
            f"{bytes_text(free)} free"
            + ("; MPI and NCCL need more (docker run --shm-size)" if small else ""),
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < DESCRIPTORS
    yield Finding(
        "fault" if few else "ok",
        "descriptors",
        f"{_count(soft)} per process, at most {_count(hard)}"
        + (f"; a rank needs up to {DESCRIPTORS}: ulimit -n 1024" if few else ""),
    )


def _memory_limit() -> int | None:
    """Return the bytes that the control group of this process may use, if limited."""
    path = Path("/sys/fs/cgroup/memory.max")
    text = path.read_text().strip() if path.is_file() else "max"
    return int(text) if text.isdigit() else None


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


# -- the report ------------------------------------------------------------------

Check = Callable[[], Iterator[Finding]]

#: Heading and check, in the order of the report.
CHECKS: tuple[tuple[str, Check], ...] = (
    ("Python and platform", check_python),
    ("Backends", check_backends),
    ("tcp", check_tcp),
    ("gloo", check_gloo),
    ("UCX", check_ucx),
    ("MPI", check_mpi),
    ("GPUs and NCCL", check_gpus),
    ("PyTorch", check_torch),
    ("Stacks of processes", check_stacks),
    ("Live view in a terminal", check_top),
    ("Jupyter", check_jupyter),
    ("Limits", check_limits),
)


def examine(check: Check) -> list[Finding]:
    """Return the findings of `check`; an exception that it raises is one more fault."""
    found = []
    try:
        for finding in check():
            found.append(finding)
    except Exception as error:  # noqa: BLE001 - any part of the machine may be broken
        found.append(Finding("fault", "this check", f"{type(error).__name__}: {error}"))
    return found


def main() -> int:
    """Print the report; return 1 if there is a fault, else 0."""
    print(f"Rankscope {__version__}, {Path(__file__).parent}")
    faults = []
    for heading, check in CHECKS:
        found = examine(check)
        if not found:
            continue
        print(f"\n{heading}")
        for finding in found:
            print(finding, flush=True)
        faults += [f"{heading}: {one.name}" for one in found if one.level == "fault"]
    if not faults:
        print("\nNo faults: %dist_init -n 4 starts ranks here.")
        return 0
    print(f"\n{len(faults)} fault{'s' * (len(faults) > 1)}: {'; '.join(faults)}")
    return 1
