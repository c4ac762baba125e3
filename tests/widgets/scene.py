"""A board in a browser, with a kernel that the test plays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rankscope.backends.observe.verdicts import Verdict
from rankscope.engines import ClusterStatus, RankStatus
from rankscope.widgets.board.model import BoardModel
from rankscope.widgets.board.timeline import timeline
from tests.widgets import simulated, statuses

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.widgets.bare_page import BarePage

__all__ = ["Scene", "idle", "lanes"]


class Scene:
    """A page, and the model whose messages it gets."""

    def __init__(self, browser: Browser, **options: Any) -> None:
        from tests.widgets.bare_page import BarePage

        self.model = BoardModel()
        self.now = 100.0
        self.model.update(statuses.cluster(*idle(4)), self.now)
        self.page: BarePage = BarePage(browser, snapshot=self.model.full(), **options)
        self.page.play()

    def take(
        self,
        status: ClusterStatus,
        verdicts: Sequence[Verdict] = (),
        after: float = 0.1,
    ) -> None:
        """Let the kernel take in a status and tell what changed."""
        self.now += after
        self.model.show_verdicts(verdicts)
        self.model.update(status, self.now)
        self.page.play(self.model.delta())

    def texts(self, name: str) -> list[str]:
        """The texts of the elements of a class that are in sight."""
        return self.page.board().locator(f".{name}:visible").all_inner_texts()

    def button(self, name: str) -> Any:
        """A button by what it says."""
        return self.page.board().get_by_role("button", name=name, exact=True)

    def close(self) -> None:
        """End the page; nothing may have gone wrong in it."""
        assert self.page.errors == []
        self.page.close()


def idle(size: int) -> list[RankStatus]:
    """The statuses of `size` idle ranks."""
    return [statuses.rank(n, statuses.group(ranks=range(size))) for n in range(size)]


def lanes(
    late: int | None = None, absent: int | None = None, count: int = 8, size: int = 4
) -> dict[str, Any]:
    """The timeline of some ranks: `late` comes late, `absent` is missing at the end."""
    rings = {
        rank: simulated.ring(
            rank,
            size,
            late=late,
            count=count,
            absent=absent is not None and rank != absent,
        )
        for rank in range(size)
    }
    records = [one for ring in rings.values() for one in ring["records"]]
    now = max(one["time_created_ns"] for one in records) + 30_000_000
    return {"type": "timeline", "now": 100.0, **timeline(rings, {}, now)}
