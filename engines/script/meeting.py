"""How the ranks of a script find the channel that rank 0 opens: by a group's store."""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rankscope import __version__
from rankscope.backends.errors import DistError, DistNetworkError
from rankscope.backends.groups.launched import LaunchedStore, is_launched
from rankscope.backends.groups.world import world
from rankscope.backends.stores.tcp import TCPStore
from rankscope.backends.torch_watch.watch import TorchWatch

from ..wire.job_channel import JOB
from ..wire.job_file import JobFile, is_out_of_reach
from ..wire.job_keys import channel_key
from .options import JobOptions

__all__ = ["Channel", "meet"]

_log = logging.getLogger(__name__)

#: The key of the group's store with the address of the channel.
_ADDRESS = "rankscope/job"
#: Seconds between two looks for a default group, or for the address.
_LOOK = 0.1
#: Seconds that the address may take: rank 0 may not be watched.
_ADDRESS_WAIT = 60.0
#: Seconds that connecting to the channel may take, and an answer of it.
TIMEOUT = 10.0


@dataclass(frozen=True)
class _Address:
    """What rank 0 tells the others; no secret, as anyone may read the group's store."""

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


@dataclass(frozen=True)
class _DefaultGroup:
    """A default group of this rank, torch's or our own: its ranks meet in `store`."""

    store: Any
    rank: int
    world_size: int

    def tell(self, address: str) -> bool:
        """Tell the other ranks `address`; return whether the group is still there."""
        try:
            self.store.set(_ADDRESS, address)
        except DistError as error:
            _log.debug("the address of the channel is not told: %s", error)
            return False
        return True

    def ask(self) -> str | None:
        """Return what rank 0 has told last, ``None`` before that."""
        try:
            # `get` would hold the connection, and with it torch's own calls.
            if self.store.check([_ADDRESS]):
                return str(self.store.get(_ADDRESS).decode())
        except DistError as error:
            # The group was destroyed a moment ago, or rank 0 has ended.
            _log.debug("the address of the channel is not to be had: %s", error)
        return None


def _default_groups(torch: TorchWatch) -> Iterator[_DefaultGroup]:
    """Yield torch's default group and our own, those that there are just now."""
    ours = world.store
    if isinstance(ours, LaunchedStore):
        # A fresh process comes to later rounds than the others.
        ours = ours.underlying_store
    for store, rank, size in (
        (torch.store(), torch.rank, torch.world_size),
        (ours, world.rank, world.size),
    ):
        if store is not None and rank is not None and size is not None:
            yield _DefaultGroup(store, rank, size)


def meet(
    torch: TorchWatch,
    options: JobOptions,
    stopped: threading.Event,
    lost: Collection[str] = (),
) -> Channel | None:
    """Open the job's channel on rank 0, connect to it on the other ranks.

    `lost` are the addresses of those before, whose rank 0 has died: a fresh one opens
    another.
    Waits for a default group, torch's or our own. Rank 0 tells the others the address
    in the one that it sees first, and they look in both, as they may see them in
    another order.
    ``None`` where `stopped` was set before, or the address is not to be had. Raises
    `DistError` if rank 0 cannot listen, or refuses this rank, and torch's
    `RuntimeError` if its store is gone.
    """
    gone, deadline = set(lost), math.inf
    while True:
        for group in _default_groups(torch):
            # Since the first one was seen.
            deadline = min(deadline, time.monotonic() + _ADDRESS_WAIT)
            if group.rank == 0:
                opened = _open_in(group, options)
                if opened is not None:
                    return opened
                continue
            told = group.ask()
            if told is None or told in gone:
                continue
            try:
                return _connect(told, group.rank, group.world_size)
            except DistNetworkError:
                if not is_launched():
                    raise
                # Of a rank 0 that died before this process began.
                gone.add(told)
        if stopped.wait(_LOOK):
            return None
        # A fresh rank 0 may load data for minutes before it makes its group.
        if not gone and time.monotonic() > deadline:
            _log.warning(
                "this rank is not shown to notebooks: rank 0 has not opened the job's "
                "channel within %g s; every rank has to call rankscope.torch.watch(), "
                "or run under python -m rankscope.torch",
                _ADDRESS_WAIT,
            )
            return None


def _open_in(group: _DefaultGroup, options: JobOptions) -> Channel | None:
    """Open the channel and tell its address; ``None`` if the group is gone."""
    nonce = "" if os.environ.get("RANKSCOPE_KEY") else secrets.token_hex(16)
    channel = _open(options, nonce, group.world_size)
    address = _Address(options.host, channel.store.port, nonce, socket.gethostname())
    told = json.dumps(asdict(address))
    if not group.tell(told):
        channel.store.close()
        return None
    return replace(channel, address=told)


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
    if is_out_of_reach(address.host, address.node):
        _log.warning(
            "rank %d on %s is not shown to notebooks: the job listens at %s on %s; "
            "give an address of that host (RANKSCOPE_HOST)",
            *(rank, socket.gethostname(), address.host, address.node),
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
