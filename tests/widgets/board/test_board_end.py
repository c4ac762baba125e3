"""The board of a cluster that is shut down by a call: it shows the last state."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster
from rankscope.widgets.board.feed import BoardFeed

pytestmark = pytest.mark.processes

WAIT = 60
#: What a rank says that has run a cell.
DONE = "left its cell at its end"
#: A cell after which each answer of its rank takes 0.5 s, as one on a busy machine may.
SLOW = """
import time
from rankscope.backends.groups.world import world
summary = world.summary
world.summary = lambda: time.sleep(0.5) or summary()
"""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """One rank; of its status is known what it answers, and not what it publishes."""
    with Cluster.start(1) as started:
        started._registry._unlisten()
        yield started


def _shown(feed: BoardFeed) -> tuple[str, str, str]:
    """What the board has of the rank, and its banner."""
    status = feed.model.ranks[0]
    return status.state, status.last_cell_exit, feed.model.banner().title


def test_a_board_that_no_page_shows(cluster: Cluster) -> None:
    feed = BoardFeed(cluster, lambda message: None, lambda: None)
    feed.refresh()
    assert _shown(feed) == ("idle", "", "Idle")
    cluster.execute("1").result(WAIT)
    cluster.shutdown()
    assert feed.read(lambda model: model.banner().title) == "Ended"
    assert feed.closed
    feed.close()
    assert _shown(feed) == ("idle", DONE, "Ended")


def test_a_board_that_a_page_shows(cluster: Cluster) -> None:
    settled = threading.Event()
    feed = BoardFeed(cluster, lambda message: None, settled.set)
    feed.watch("page")
    try:
        assert _shown(feed) == ("idle", "", "Idle")
        cluster.execute(SLOW).result(WAIT)
        settled.clear()
        cluster.shutdown()
        assert settled.wait(WAIT)
        until(lambda: not feed.running, WAIT)
        assert _shown(feed) == ("idle", DONE, "Ended")
    finally:
        feed.close()


def test_ranks_that_are_ended_are_not_shown_as_dead(cluster: Cluster) -> None:
    """Their ends are reported while `shutdown` runs, and afterwards."""
    feed = BoardFeed(cluster, lambda message: None, lambda: None)
    feed.refresh()
    cluster.shutdown()
    cluster._registry.on_engine_exit(cluster.pids[0], -9)
    assert not cluster._registry.slots[0].alive
    feed.close()
    assert _shown(feed)[0] == "idle"
    status = cluster.status(fresh=True)
    assert (status.state, status.dead) == ("stopped", [])
    assert cluster.glance(0).ranks == status.ranks
