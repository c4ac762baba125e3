"""Session: the one cluster that the magics of this notebook work on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import InteractiveShell

from rankscope.engines import Cluster, StallWatch

if TYPE_CHECKING:
    from rankscope.widgets.board import Board

__all__ = ["Session", "current_cluster", "session", "use_cluster"]


class Session:
    """Which cluster there is, and what it was asked to be."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None
        #: What `%dist_init` was given, to tell the same from another.
        self.request: dict[str, Any] | None = None
        self._board: Board | None = None
        self._watch: StallWatch | None = None

    @property
    def cluster(self) -> Cluster | None:
        """The cluster, unless it was shut down."""
        if self._cluster is not None and self._cluster.closed:
            self.forget()
        return self._cluster

    def use(self, cluster: Cluster, request: dict[str, Any] | None = None) -> None:
        """Have the magics work on `cluster` from now on."""
        if cluster is not self._cluster:
            self.forget()
        self._cluster = cluster
        self.request = request

    def forget(self) -> None:
        """Have no cluster any more; its board keeps the state that was last."""
        self._cluster = self.request = None
        board, self._board = self._board, None
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        if board is not None:
            board.close()

    def show_board(self, shell: InteractiveShell) -> None:
        """Show the cluster's board below the cell that runs."""
        # Where there is no front end, nobody needs a widget.
        from rankscope.widgets.board import Board

        assert self._cluster is not None
        if self._board is None:
            self._board = Board(self._cluster, shell, self._cluster.diagnose)
            self._watch = StallWatch(self._cluster, self._board.judge)
        self._board.show()

    def serve_messages(self) -> None:
        """Handle clicks that wait for the main thread, which calls this."""
        if self._board is not None:
            self._board.serve_messages()


#: It outlives ``%reload_ext``, as the cluster does.
session = Session()


def use_cluster(cluster: Cluster) -> None:
    """Have the magics work on a cluster that was made in Python."""
    session.use(cluster)


def current_cluster() -> Cluster | None:
    """Return the cluster that the magics work on, if there is one."""
    return session.cluster
