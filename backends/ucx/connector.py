"""Connecting the ranks of a group: each publishes the address of its UCX worker."""

from __future__ import annotations

import json

from ..errors import DistBackendError, DistError
from ..messaging.connecting import MeetingConnector, Namer, different
from .library import UCXError, load
from .settings import chosen, network_settings, own_loopback
from .transport import UCXTransport
from .worker import Worker

__all__ = ["UCXConnector"]


class UCXConnector(MeetingConnector):
    """Makes the transport of a group once all its members are there."""

    #: What `connect` has returned.
    transport: UCXTransport | None = None

    def connect(self) -> UCXTransport | None:
        """Return the transport, or ``None`` after `cancel`.

        Raises `DistError` if UCX or the store fails, or if the ranks have different
        versions of UCX. Blocks until every rank has published its address.
        """
        version = load().version
        network_settings()  # its error is raised before this rank waits for others
        try:
            own = {"version": version, "loopback": own_loopback()}
            given = self._gather("rank", json.dumps(own))
            members = [json.loads(one) for one in given]
            _check_versions([member["version"] for member in members], self._name)
            settings = network_settings([member["loopback"] for member in members])
            worker = self._make_worker(version, settings)
            try:
                addresses = self._gather("address", worker.address.hex())
                worker.connect([bytes.fromhex(one.decode()) for one in addresses])
            except BaseException:
                worker.destroy()
                raise
        except DistError:
            if self._cancelled:
                return None
            raise
        if self._cancelled:
            worker.destroy()
            return None
        self.transport = UCXTransport(worker, self._rank)
        return self.transport

    def _make_worker(self, version: str, settings: dict[str, str]) -> Worker:
        try:
            return Worker(self._size, settings)
        except UCXError as error:
            raise DistBackendError(
                f"UCX {version} cannot be used on {self._name([self._rank])}: "
                f"{error}{chosen()}"
            ) from error


def _check_versions(versions: list[str], name: Namer) -> None:
    """Raise `DistBackendError` if the ranks (by rank) have different major versions.

    Those of one major version understand each other, and one rank may have that of its
    MPI: 1.20 and 1.22 were tried.
    """
    if len({version.partition(".")[0] for version in versions}) > 1:
        raise DistBackendError(different(versions, "versions of UCX", name))
