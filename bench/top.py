"""Cost of ``rankscope top`` with 64 ranks, simulated as those of the board."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from rankscope.engines import RankStacks

from .board import STEPS, Ranks, messages
from .table import Row

__all__ = ["measure"]

RANKS = 64
BUDGET = 0.03
#: Columns and lines of the terminal.
SIZE = 140, 40


class _Attached(Ranks):
    """What top asks of ranks, beside their status."""

    #: Seconds between two statuses of each.
    interval = 0.0

    def follow(self, interval: float) -> None:
        self.interval = interval

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
    what = f"rankscope top, {RANKS} ranks, an update a second: CPU"
    return [Row.share(what, busy, BUDGET)]


async def _run(seconds: float) -> float:
    from rankscope.widgets.board.arrange import View
    from rankscope.widgets.top.app import TopApp

    ranks = _Attached(RANKS)
    made = messages(RANKS)
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
