"""A connection that a peer closed, and what gloo says of it."""

from __future__ import annotations

import os
import re
import signal

import numpy as np
import pytest

from rankscope.backends.conformance.ranks import Rank, Ranks
from rankscope.backends.conformance.waiting import until
from rankscope.backends.errors import ConnectionLostError, DistError
from rankscope.backends.gloo.backend import GlooBackend, Reduction
from rankscope.backends.gloo.library import gloo_options, installed

pytestmark = pytest.mark.processes


def survivor(me: Rank) -> str:
    """Rank 1's side process is killed while rank 0 waits for it, over tcp."""
    causes: list[str | DistError] = []
    with me.store("gloo") as store, gloo_options(library="xoscar"):
        made = GlooBackend(store, me.rank, me.size)
        made.on_failure = causes.append
        made.barrier().wait()
        side = made._side
        assert side is not None
        if me.rank:
            assert side.pid
            os.kill(side.pid, signal.SIGKILL)
            until(lambda: causes)
            made.shutdown()
            return str(causes[0])
        total = Reduction(np.add, "float64", "SUM")
        work = made.all_reduce(np.ones(1 << 20), total)
        until(lambda: causes and work.is_completed())
        with pytest.raises(ConnectionLostError):
            work.wait()
        with pytest.raises(ConnectionLostError):
            made.barrier().wait()
        made.shutdown()
        assert isinstance(causes[0], ConnectionLostError)
        return str(causes[0])


@pytest.mark.skipif("xoscar" not in installed(), reason="xoscar is not installed")
def test_a_closed_socket_is_reported_as_a_lost_connection() -> None:
    with Ranks(2, survivor) as ranks:
        zero, one = ranks.wait()
    # A reset where bytes were on their way to the killed process.
    assert re.search("Connection (closed|reset) by peer", zero), zero
    assert "GLHF" not in zero
    assert "typically" not in zero
    # The end of a killed side process is no lost connection.
    assert "was killed by SIGKILL" in one
