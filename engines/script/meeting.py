"""How the ranks of a script find the channel that rank 0 opens: by torch's store."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace

from rankscope import __version__
from rankscope.backends.errors import DistNetworkError
from rankscope.backends.groups.launched import is_launched
from rankscope.backends.stores.tcp import TCPStore
from rankscope.backends.torch_watch.watch import TorchWatch

from ..wire.job_channel import JOB
from ..wire.job_file import JobFile
from ..wire.job_keys import channel_key
from .options import JobOptions

__all__ = ["Channel", "meet"]

_log = logging.getLogger(__name__)

#: The key of torch's store with the address of the channel.
_ADDRESS = "rankscope/job"
#: Seconds between two looks for torch's default group, or for the address.
_LOOK = 0.1
#: Seconds that the address may take: rank 0 may not be watched.
_ADDRESS_WAIT = 60.0
#: Seconds that connecting to the channel may take, and an answer of it.
TIMEOUT = 10.0

#: Addresses at which only processes of the same host connect.
_LOOPBACK = ("127.", "localhost", "::1")


@dataclass(frozen=True)
class _Address:
    """What rank 0 tells the others; no secret, as anyone may read torch's store."""

    host: str
    port: int
    nonce: str
    node: str


@dataclass(frozen=True)
class Channel:
    """This rank's connection to its job's channel."""

    store: TCPStore
    nonce: str
    rank: int
    world_size: int
    #: What rank 0 has told of it.
    address: str
    #: On rank 0, where notebooks find the channel; ``None`` elsewhere.
    file: JobFile | None


def meet(
    torch: TorchWatch, options: JobOptions, stopped: threading.Event, lost: str = ""
) -> Channel | None:
    """Open the job's channel on rank 0, connect to it on the other ranks.

    `lost` is the address of the one before, whose rank 0 has died: a fresh one opens
    another.
    Waits for torch's default group, which has the store in which the ranks meet.
    ``None`` where `stopped` was set before, or the address is not to be had. Raises
    `DistError` if rank 0 cannot listen, or refuses this rank, and torch's
    `RuntimeError` if its store is gone.
    """
    while torch.rank is None:
        if stopped.wait(_LOOK):
            return None
    store, rank, world_size = torch.store(), torch.rank, torch.world_size
    if store is None or rank is None or world_size is None:
        # The group was destroyed a moment ago.
        return None
    if rank == 0:
        nonce = "" if os.environ.get("RANKSCOPE_KEY") else secrets.token_hex(16)
        channel = _open(options, nonce, world_size)
        address = _Address(
            options.host, channel.store.port, nonce, socket.gethostname()
        )
        told = json.dumps(asdict(address))
        store.set(_ADDRESS, told)
        return replace(channel, address=told)
    deadline = time.monotonic() + _ADDRESS_WAIT
    # `get` would hold the connection, and with it torch's own calls.
    while not store.check([_ADDRESS]) or store.get(_ADDRESS).decode() == lost:
        if stopped.wait(_LOOK):
            return None
        # A fresh rank 0 may load data for minutes before it makes its group.
        if not lost and time.monotonic() > deadline:
            _log.warning(
                "rank %d is not shown to notebooks: rank 0 does not call "
                "rankscope.torch.watch()",
                rank,
            )
            return None
    told = store.get(_ADDRESS).decode()
    try:
        return _connect(told, rank, world_size)
    except DistNetworkError:
        if lost or not is_launched():
            raise
        # Of a rank 0 that died before this process began.
        return meet(torch, options, stopped, told)


def _open(options: JobOptions, nonce: str, world_size: int) -> Channel:
    key = channel_key(nonce)
    store = TCPStore(
        options.host,
        options.port,
        is_master=True,
        timeout=TIMEOUT,
        key=bytes.fromhex(key),
        reports_deaths=True,
    )
    script = sys.argv[0] if sys.argv else ""
    file = JobFile(
        options.host, store.port, key, script, os.getpid(), socket.gethostname()
    )
    about = {
        "version": __version__,
        "world_size": world_size,
        "script": script,
        "allow_abort": options.allow_abort,
    }
    store.set(JOB, json.dumps(about))
    return Channel(store, nonce, 0, world_size, "", file)


def _connect(told: str, rank: int, world_size: int) -> Channel | None:
    address = _Address(**json.loads(told))
    node = socket.gethostname()
    if address.host.startswith(_LOOPBACK) and address.node != node:
        _log.warning(
            "rank %d on %s is not shown to notebooks: the job listens at %s on %s; "
            "give an address of that host (RANKSCOPE_HOST)",
            *(rank, node, address.host, address.node),
        )
        return None
    store = TCPStore(
        address.host,
        address.port,
        timeout=TIMEOUT,
        key=bytes.fromhex(channel_key(address.nonce)),
        reports_deaths=True,
    )
    return Channel(store, address.nonce, rank, world_size, told, None)
