"""Session: the one cluster that the magics of this notebook work on."""

from __future__ import annotations

from typing import Any

from rankscope.engines import Cluster

__all__ = ["Session", "current_cluster", "session", "use_cluster"]


class Session:
    """Which cluster there is, and what it was asked to be."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None
        #: What `%dist_init` was given, to tell the same from another.
        self.request: dict[str, Any] | None = None

    @property
    def cluster(self) -> Cluster | None:
        """The cluster, unless it was shut down."""
        if self._cluster is not None and self._cluster.closed:
            self.forget()
        return self._cluster

    def use(self, cluster: Cluster, request: dict[str, Any] | None = None) -> None:
        """Have the magics work on `cluster` from now on."""
        self._cluster = cluster
        self.request = request

    def forget(self) -> None:
        """Have no cluster any more."""
        self._cluster = self.request = None


#: It outlives ``%reload_ext``, as the cluster does.
session = Session()


def use_cluster(cluster: Cluster) -> None:
    """Have the magics work on a cluster that was made in Python."""
    session.use(cluster)


def current_cluster() -> Cluster | None:
    """Return the cluster that the magics work on, if there is one."""
    return session.cluster
