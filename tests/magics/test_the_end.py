"""The end of a notebook's ranks: what is asked of them, and what is kept."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from rankscope.engines import Cluster
from rankscope.engines.cluster.registry import EngineRegistry
from rankscope.engines.wire.answers import Answers
from rankscope.engines.wire.requests import GetSummary
from rankscope.magics import use_cluster

pytestmark = pytest.mark.processes

WAIT = 60


@pytest.mark.parametrize("how", ["%dist_shutdown", "shutdown()", "with"])
def test_a_rank_is_asked_for_its_last_status_once(
    ipython: InteractiveShell, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Each request to one that does not answer delays the end."""
    requests: list[Any] = []
    ask = EngineRegistry.ask

    def asking(*args: Any, **options: Any) -> Answers[Any]:
        requests.append(args[1])
        return ask(*args, **options)

    with Cluster.start(1) as cluster:
        # What it publishes is not heard: only an answer has its last state.
        cluster._registry._unlisten()
        cluster.execute("1").result(WAIT)
        monkeypatch.setattr(EngineRegistry, "ask", asking)
        if how == "%dist_shutdown":
            use_cluster(cluster)
            with capture_output() as seen:
                assert ipython.run_cell(how).success
            assert "1 rank ended" in seen.stdout
        elif how == "shutdown()":
            cluster.shutdown()
    assert cluster.closed
    assert [one for one in requests if isinstance(one, GetSummary)] == [GetSummary()]
    last = cluster.glance().ranks[0]
    assert last.last_cell_exit == "left its cell at its end"
