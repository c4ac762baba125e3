"""Connecting the ranks of a group: each publishes the address of its UCX worker."""

from __future__ import annotations

import json
import threading

from ..errors import DistBackendError, DistError
from ..rank_sets import name_ranks
from ..stores.base import Store
from .library import UCXError, load
from .settings import chosen, network_settings, own_loopback
from .transport import UCXTransport
from .worker import Worker

__all__ = ["UCXConnector"]

# A wait that only an abort ends: the deadlines of ops are the group's.
_FOREVER = 1e7


class UCXConnector:
    """Makes the transport of a group once all its members are there."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank, self._size = rank, size
        self._cancelled = False
        #: What `connect` has returned.
        self.transport: UCXTransport | None = None

    def connect(self) -> UCXTransport | None:
        """Return the transport, or ``None`` after `cancel`.

        Raises `DistError` if UCX or the store fails, or if the ranks have different
        versions of UCX. Blocks until every rank has published its address.
        """
        version = load().version
        network_settings()  # its error is raised before this rank waits for others
        own = {"version": version, "loopback": own_loopback()}
        given = self._gather("rank", json.dumps(own))
        if given is None:
            return None
        members = [json.loads(one) for one in given]
        _check_versions([member["version"] for member in members])
        settings = network_settings([member["loopback"] for member in members])
        try:
            worker = Worker(self._size, settings)
        except UCXError as error:
            raise DistBackendError(
                f"UCX {version} cannot be used on rank {self._rank}: {error}{chosen()}"
            ) from error
        try:
            addresses = self._gather("address", worker.address.hex())
            if addresses is not None:
                worker.connect([bytes.fromhex(one.decode()) for one in addresses])
                self.transport = UCXTransport(worker, self._rank)
                return self.transport
        except BaseException:
            worker.destroy()
            raise
        worker.destroy()
        return None

    def _gather(self, name: str, own: str) -> list[bytes] | None:
        """Return what every rank has given under `name`; ``None`` after `cancel`."""
        keys = [f"{name}/{rank}" for rank in range(self._size)]
        try:
            self._store.set(keys[self._rank], own)
            values = self._store.multi_get(keys, _FOREVER)
        except DistError:
            if self._cancelled:
                return None
            raise
        return None if self._cancelled else values

    def cancel(self) -> None:
        """End `connect` from another thread; returns at once."""
        self._cancelled = True
        # On a thread: the store may be in use, and this may be a signal handler.
        threading.Thread(
            target=self._store.close, name="rankscope-ucx-cancel", daemon=True
        ).start()


def _check_versions(versions: list[str]) -> None:
    """Raise `DistBackendError` if the ranks (by rank) have different major versions.

    Those of one major version understand each other, and one rank may have that of its
    MPI: 1.20 and 1.22 were tried.
    """
    majors = [version.partition(".")[0] for version in versions]
    if len(set(majors)) > 1:
        users = {
            version: name_ranks(
                rank for rank, other in enumerate(versions) if other == version
            )
            for version in sorted(set(versions))
        }
        raise DistBackendError(
            "the ranks of the group use different versions of UCX: "
            + "; ".join(f"{ranks}: {version}" for version, ranks in users.items())
            + ". Install the same one for all"
        )
