"""Rendezvous without settings: rank 0 broadcasts the store's address over MPI."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from typing import Any

import numpy as np

from ..errors import DistBackendError, DistNetworkTimeoutError
from ..launch_variables import OPEN_MPI, PMI, first_number, ranks, sizes
from ..routes import any_address
from ..stores.tcp import TCPStore
from .job import initialise, unavailable_reason

__all__ = ["mpi_rendezvous"]

_SIZE = 512

# The broadcast of an earlier call that timed out, its memory, and the store whose
# address rank 0 sends: MPI writes to the memory as soon as rank 0 calls, and there is
# no second broadcast to receive.
_pending: tuple[Any, np.ndarray, TCPStore | None] | None = None


def mpi_rendezvous(
    timeout: float, key: bytes | None
) -> tuple[TCPStore, int, int] | None:
    """Return a store hosted by rank 0 of the MPI job, this rank and the job's size.

    ``None`` if mpiexec did not start this process or mpi4py is missing. Initialises
    MPI; every process of the job has to call it.
    """
    launched = any(name in os.environ for name in ranks(OPEN_MPI, PMI))
    if not launched or unavailable_reason() is not None:
        return None
    global _pending
    deadline = time.monotonic() + timeout
    mpi = initialise()
    world = mpi.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    found = (first_number((name,)) for name in sizes(OPEN_MPI, PMI))
    told = {one for one in found if one is not None}
    if size == 1 and told and 1 not in told:
        raise DistBackendError(
            f"mpiexec has started {max(told)} ranks, and {mpi.get_vendor()[0]}, the "
            "library of MPI in this Python, found this one alone: mpiexec belongs to "
            "another library. Start the ranks with the one beside this Python; or set "
            "MASTER_ADDR and MASTER_PORT, with which they meet by any mpiexec"
        )
    if _pending is None:
        message, store = np.zeros(_SIZE, np.uint8), None
        if rank == 0:
            store = _serve(size, timeout, key, message)
        _pending = world.Ibcast([message, mpi.BYTE], 0), message, store
    request, message, store = _pending
    while not request.Test():
        if time.monotonic() > deadline:
            raise DistNetworkTimeoutError(
                f"rank {rank} received no address of rank 0 within {timeout:g} s: "
                "every process of the MPI job has to call init_process_group()"
            )
        time.sleep(0.001)
    _pending = None
    if store is None:
        host, port, text = json.loads(message.tobytes().rstrip(b"\0"))
        secret = bytes.fromhex(text)
        store = TCPStore(
            host, port, size, False, timeout, False, key=secret, reports_deaths=True
        )
    return store, rank, size


def _serve(size: int, timeout: float, key: bytes | None, message: Any) -> TCPStore:
    """Return a store of this process; write into `message` where it is, and its key."""
    secret = secrets.token_bytes(32) if key is None else key
    store = TCPStore(
        _address(size), 0, size, True, timeout, False, key=secret, reports_deaths=True
    )
    text = json.dumps([store.host, store.port, secret.hex()]).encode()
    message[: len(text)] = np.frombuffer(text, np.uint8)
    return store


def _address(size: int) -> str:
    """Return an address of this host that all ranks of the job can reach."""
    if first_number((OPEN_MPI.local_size, PMI.local_size)) == size:
        return "127.0.0.1"
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
        # As on Debian the host's name may be that of loopback.
        if not named.startswith("127."):
            return named
    return any_address()
