"""How long a rebuild waits for ranks of hosts that were out of reach."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from rankscope.engines import ClusterError
from rankscope.engines.cluster import recovery
from rankscope.engines.observe.rank_slots import RankSlot
from rankscope.engines.wire.answers import Answers


@pytest.mark.parametrize(
    ("host", "silent", "patience"),
    [
        (socket.gethostname(), 20.0, 2.0),
        ("far", 0.5, 2.0),
        ("far", 20.0, 20.0),
        ("far", 500.0, recovery.RETURN_WAIT),
        ("far", None, 2.0),
    ],
)
def test_a_rebuild_waits_for_a_host_as_long_as_it_was_silent(
    host: str, silent: float | None, patience: float
) -> None:
    """TCP sends again what it could not deliver after as long as it has waited."""
    heard = None if silent is None else time.monotonic() - silent
    asked: list[float] = []

    def ask(request: Any, timeout: float) -> Answers[Any]:
        asked.append(timeout)
        return Answers({}, {0: "no answer"})

    slots = [RankSlot(0, host=host, summary_at=heard)]
    # One that has died is not waited for.
    slots.append(RankSlot(1, host="far", summary_at=0.0, death="rank 1 is dead"))
    registry: Any = SimpleNamespace(slots=slots, ask=ask)
    with pytest.raises(ClusterError, match="no answer"):
        recovery.rebuild(registry, None)
    assert asked == [pytest.approx(patience, abs=1.0)]
