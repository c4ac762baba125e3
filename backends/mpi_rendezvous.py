"""Rendezvous without a setting: MPI itself tells the ranks where their store is."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time

import numpy as np
import psutil

from .errors import DistNetworkError
from .mpi_job import initialise, unavailable_reason
from .tcp_store import TCPStore

__all__ = ["can_meet_over_mpi", "meet_over_mpi"]

_SIZE = 512


def can_meet_over_mpi() -> bool:
    """Whether mpiexec started this process and mpi4py is there."""
    launched = "OMPI_COMM_WORLD_RANK" in os.environ or "PMI_RANK" in os.environ
    return launched and unavailable_reason() is None


def meet_over_mpi(timeout: float, key: bytes | None) -> tuple[TCPStore, int, int]:
    """Return a store hosted by rank 0 of the MPI job, this rank and the job's size.

    Every process of the job has to call it. Initialises MPI. Raises
    `DistNetworkError` if rank 0's address has not come within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    mpi = initialise()
    world = mpi.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    message = np.zeros(_SIZE, np.uint8)
    store = None
    if rank == 0:
        secret = secrets.token_bytes(32) if key is None else key
        store = TCPStore(
            _address(size), 0, size, True, timeout, key=secret, tells_deaths=True
        )
        text = json.dumps([store.host, store.port, secret.hex()]).encode()
        message[: len(text)] = np.frombuffer(text, np.uint8)
    request = world.Ibcast([message, mpi.BYTE], 0)
    while not request.Test():
        if time.monotonic() > deadline:
            raise DistNetworkError(
                f"rank {rank} heard nothing of rank 0 within {timeout:g} s: every "
                "process of the MPI job has to call init_process_group()"
            )
        time.sleep(0.001)
    if store is None:
        host, port, text = json.loads(message.tobytes().rstrip(b"\0"))
        secret = bytes.fromhex(text)
        store = TCPStore(
            host, port, size, False, timeout, key=secret, tells_deaths=True
        )
    return store, rank, size


def _address(size: int) -> str:
    """An address of this host that all ranks of the job can reach."""
    local = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or os.environ.get(
        "MPI_LOCALNRANKS"
    )
    if local == str(size):
        return "127.0.0.1"
    named = socket.gethostbyname(socket.gethostname())
    if not named.startswith("127."):
        return named
    # The host's name leads to itself alone, as on Debian: take an interface.
    for addresses in psutil.net_if_addrs().values():
        for entry in addresses:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return entry.address
    return named
