"""Session: the one cluster or job that the magics of this notebook use."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import InteractiveShell

from rankscope.backends.observe.verdicts import Fault, Verdict
from rankscope.engines import Cluster, Job, StallWatch
from rankscope.engines.observe.spans import Spans, spans_if_installed

if TYPE_CHECKING:
    from rankscope.engines.observe.metrics import MetricsServer
    from rankscope.widgets.board.widget import Board

__all__ = ["Session", "current_cluster", "session", "use_cluster"]


class Session:
    """The present cluster, its board, and the `%dist_init` that made it."""

    def __init__(self) -> None:
        self._cluster: Cluster | Job | None = None
        #: Why there is no cluster or job any more, if the last one ended by itself.
        self.ended: str | None = None
        #: The values given to `%dist_init`, to compare with those of a second one.
        self.request: dict[str, Any] | None = None
        self._board: Board | None = None
        # Whether the next board is pinned, as the last one was.
        self._pinned = False
        #: Whether a cell that hangs shows why below itself.
        self.in_cells = True
        self._watch: StallWatch | None = None
        self._spans: Spans | None = None
        self._metrics: MetricsServer | None = None
        # Each with the time of day, and with when it was told (``time.monotonic()``).
        self._verdicts: Sequence[tuple[Verdict, str, float]] = ()

    @property
    def cluster(self) -> Cluster | Job | None:
        """The present cluster or job; ``None`` after its end."""
        if self._cluster is not None and self._cluster.closed:
            ended = self._cluster
            self.ended = ended.ended
            self.drop()
            # Where another process stopped it, its threads are still here.
            if ended.owned:
                ended.shutdown()
            else:
                ended.close()
        return self._cluster

    def use(
        self, cluster: Cluster | Job, request: dict[str, Any] | None = None
    ) -> None:
        self.ended = None
        if cluster is not self._cluster:
            self.drop()
        self._cluster = cluster
        self.request = request

    def drop(self) -> None:
        """Drop the cluster and close its board, which keeps the last state."""
        self._cluster = self.request = None
        self._verdicts = ()
        if self._board is not None:
            self._pinned = self._board.pinned
        ending = self._metrics, self._watch, self._spans, self._board
        self._metrics = self._watch = self._spans = self._board = None
        for one in ending:
            if one is not None:
                one.close()

    def show_board(
        self, shell: InteractiveShell, note_letters: Callable[[int], None]
    ) -> None:
        """Show the cluster's board below the cell that runs; see `Board`."""
        # Imported here: without a front end there is no board.
        from rankscope.widgets.board.widget import Board

        assert self._cluster is not None
        if self._board is None:
            self._board = Board(
                *(self._cluster, shell, self._cluster.diagnose, self._pinned),
                note_letters=note_letters,
            )
            self._board.show_verdicts([one for one, *_ in self._verdicts])
            self.watch()
        self._board.show()

    def watch(self) -> None:
        """Diagnose ops that are in flight for long, from now on."""
        if self._watch is None and self._cluster is not None:
            self._spans = spans_if_installed(self._cluster)
            self._watch = StallWatch(self._cluster, self._tell)

    def serve_metrics(self, port: int) -> str:
        """Serve the metrics of the cluster until it is dropped; return the address."""
        # Imported here: prometheus_client is an extra.
        from rankscope.engines.observe.metrics import MetricsServer

        assert self._cluster is not None
        metrics = self._metrics
        if metrics is None or port not in (0, metrics.port):
            self._metrics = MetricsServer(self._cluster, port)
            if metrics is not None:
                metrics.close()
            metrics = self._metrics
        return metrics.address

    def _tell(self, verdicts: Sequence[Verdict]) -> None:
        now = time.strftime("%H:%M:%S"), time.monotonic()
        known = {str(one): (when, told) for one, when, told in self._verdicts}
        self._verdicts = [(one, *known.get(str(one), now)) for one in verdicts]
        if self._spans is not None:
            self._spans.note_verdicts(verdicts)
        if self._board is not None:
            self._board.show_verdicts(verdicts)

    def hang(self, ranks: Collection[int], began: float) -> Mapping[str, str] | None:
        """Return why a cell on `ranks`, that `began` then, hangs, as an output."""
        for one, when, told in self._verdicts if self.in_cells else ():
            # Else it is why an earlier cell hung.
            if told < began or self._is_outdated(one):
                continue
            if not {*one.waiting, *one.culprits}.isdisjoint(ranks):
                text = f"{one.fault.value.capitalize()}: {one}"
                bundle = {"text/plain": f"{text} (an interrupt ends the cell)"}
                if self._board is not None:
                    # With the present time it would be a new output each second.
                    bundle["text/html"] = self._board.hang_html(text, one, when)
                return bundle
        return None

    def _is_outdated(self, verdict: Verdict) -> bool:
        """Return whether a rank that it calls dead was restarted since."""
        if verdict.fault is not Fault.RANK_DEAD or self._cluster is None:
            return False
        status = self._cluster.glance(verdict.culprits)
        return any(one.alive for one in status.ranks)

    def pin_board(self, pinned: bool) -> None:
        """Keep the board in sight, and later boards, or no more."""
        self._pinned = pinned
        if self._board is not None:
            self._board.pin(pinned)

    def serve_messages(self) -> None:
        """Handle clicks that wait for the main thread; to be called on that thread."""
        if self._board is not None:
            self._board.serve_messages()


#: Kept over ``%reload_ext``, as the cluster is.
session = Session()


def use_cluster(cluster: Cluster | Job) -> None:
    """Make the magics use a cluster that was made in Python, or a job."""
    session.use(cluster)


def current_cluster() -> Cluster | Job | None:
    """Return the cluster or job that the magics use, if there is one."""
    return session.cluster
