"""Cost of ``rankscope top`` with 64 ranks, simulated as those of the board."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from rankscope.engines import ClusterStatus, RankStacks

from .board import Ranks, status_message
from .table import Row

__all__ = ["measure"]

RANKS = 64
BUDGET = 0.03
#: Different messages of each rank; then they come again.
STEPS = 10
#: Columns and lines of the terminal.
SIZE = 140, 40


class _Attached(Ranks):
    """What top asks of ranks, beside their status."""

    #: Seconds between two statuses of each.
    interval = 0.0

    def follow(self, interval: float) -> None:
        self.interval = interval

    def status(self, *, fresh: bool = False, timeout: float = 0.8) -> ClusterStatus:
        return self.glance()

    def diagnose(self) -> list[Any]:
        return []

    def stacks(self, ranks: Any = None) -> RankStacks:
        return RankStacks({})

    def nccl_report(self, rank: int) -> None:
        return None

    def close(self) -> None:
        pass


def measure(seconds: float, left_out: Callable[[str], None]) -> list[Row]:
    """Return the share of a core with a row for each rank."""
    if find_spec("textual") is None:
        left_out("rankscope top: Textual is not installed")
        return []
    busy = asyncio.run(_run(seconds))
    return [
        Row(
            f"rankscope top, {RANKS} ranks, an update a second: CPU",
            f"{100 * busy:.1f} % of a core",
            budget=f"≤ {100 * BUDGET:.0f} %",
            passed=busy <= BUDGET,
        )
    ]


async def _run(seconds: float) -> float:
    from rankscope.widgets.board.arrange import View
    from rankscope.widgets.top.app import TopApp

    ranks = _Attached(RANKS)
    made = [
        [status_message(r, step, RANKS) for r in range(RANKS)] for step in range(STEPS)
    ]
    for rank, one in enumerate(made[0]):
        ranks.receive(rank, one)
    app = TopApp("bench", lambda: ranks)  # type: ignore[arg-type, return-value]
    app.view = View(fold=False)
    ended = threading.Event()

    def send() -> None:
        step = 0
        while not ended.wait(ranks.interval):
            step += 1
            for rank, one in enumerate(made[step % STEPS]):
                ranks.receive(rank, one)

    async with app.run_test(size=SIZE) as pilot:
        while not app.table.items:
            await pilot.pause(0.05)
        sender = threading.Thread(target=send)
        sender.start()
        used, began = time.process_time(), time.monotonic()
        await asyncio.sleep(seconds)
        share = (time.process_time() - used) / (time.monotonic() - began)
        ended.set()
        sender.join()
        app.exit()
    app.close()
    return share
