"""The board at each verdict: pictures for the docs, and what is to be read on them.

``make pictures`` takes them; the tests compare the text of the page with that in
`TEXTS`, which was written with the pictures.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image  # matplotlib brings it
from playwright.sync_api import FloatRect

from rankscope.backends.observe.verdicts import Fault, Verdict
from rankscope.engines import ClusterStatus, GroupStatus, OpStatus, RankStatus
from rankscope.widgets.board.model import BoardModel
from tests.backends.observe.hang_scenes import SCENES, scene
from tests.backends.observe.test_diagnosis import Simulated
from tests.widgets import statuses
from tests.widgets.scene import Scene

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = [
    "NAMES",
    "PICTURES",
    "TEXTS",
    "file_of",
    "hung",
    "read",
    "reduced",
    "shown",
    "take",
]

PICTURES = Path(__file__).resolve().parents[3] / "docs" / "_static"
#: What the page said when the pictures were taken.
TEXTS = Path(__file__).with_name("gallery.json")

#: A group that was aborted has no verdict any more, and a picture nevertheless.
ABORTED = "aborted"
#: Every picture: the verdicts, and what comes after them.
NAMES = (*(fault.value for fault in SCENES), ABORTED)

#: Seconds for which the ops are in flight.
ELAPSED = 7.2
#: The columns that a board of this width always has room for.
_COLUMNS = (
    *("rank", "state", "op", "seq", "lag"),
    *("line", "elapsed", "silent", "verdict"),
)
#: In pixels: as wide as a page of the site has room for.
_WIDTH = 736
#: A board has no more, but for the edges of its letters.
_COLOURS = 128
_TIMEOUT = 300.0


def file_of(name: str) -> Path:
    """Return where the picture `name` is: ``docs/_static/board_missing_ranks.png``."""
    return PICTURES / f"board_{name.replace(' ', '_')}.png"


def hung(name: str) -> tuple[ClusterStatus, list[Verdict]]:
    """Return the status of the ranks, and the verdicts on them, for a picture."""
    fault = Fault.MISSING_RANKS if name == ABORTED else Fault(name)
    ranks, verdict = scene(fault)
    if name == ABORTED:
        by = "abort requested from the board at 08:12:07"
        made = [_aborted(_status(one), by, str(verdict)) for one in ranks]
        return statuses.cluster(*made), []
    made = [_status(one) for one in ranks]
    if fault is Fault.RANK_DEAD:
        # The other ranks hear of it at once, and their groups end.
        made = [_aborted(one, verdict.text) if one.alive else one for one in made]
    return statuses.cluster(*made), [verdict]


def shown(browser: Browser, name: str) -> Scene:
    """Return a page with the board of the picture `name`."""
    found = Scene(browser, width=_WIDTH, height=480)
    # No second passes between the update and the picture.
    found.page.page.evaluate(
        "() => { const now = performance.now(); performance.now = () => now; }"
    )
    status, verdicts = hung(name)
    # Another cluster than the idle one, so much later that the page takes the time of
    # the kernel over as it is.
    found.model = BoardModel()
    if name == ABORTED:
        found.take(*hung(Fault.MISSING_RANKS.value), after=10)
    found.take(status, verdicts, after=0.1 if name == ABORTED else 10)
    found.page.play(found.model.full())
    return found


def read(found: Scene) -> dict[str, list[str]]:
    """Return what the page says: the banner, and a line for each row of the table."""
    titles, *rows = found.page.rows()
    columns = [title for title in _COLUMNS if title in titles]

    def cell(title: str, row: list[str]) -> str:
        text = row[titles.index(title)]
        # Fonts decide whether there is room for a timeout, or for a time at a line.
        return re.split(" / | for ", text)[0] if title in ("line", "elapsed") else text

    return {
        "banner": [" ".join(text.split()) for text in found.texts("banner")],
        "rows": [
            " | ".join(cell(title, row) for title in columns).strip()
            for row in (titles, *rows)
        ],
    }


def cut(found: Scene) -> list[str]:
    """Return the texts of the table that have no room in their cells."""
    cells = found.page.board().locator(".row .cell:visible")
    return cells.evaluate_all(
        "cells => cells.filter(one => one.scrollWidth > one.clientWidth)"
        ".map(one => one.textContent)"
    )


def take(browser: Browser) -> None:
    """Take all pictures, and write down what is on them."""
    texts = {}
    for name in NAMES:
        found = shown(browser, name)
        texts[name] = read(found)
        box = found.page.board().bounding_box()
        assert box is not None
        height = box["height"] + 2 * box["y"]
        clip = FloatRect(x=0, y=0, width=_WIDTH, height=height)
        reduced(found.page.page.screenshot(clip=clip), _COLOURS).save(
            file_of(name), optimize=True
        )
        found.close()
    written = json.dumps(texts, indent=1, ensure_ascii=False)
    TEXTS.write_text(written + "\n", encoding="utf-8")


def reduced(picture: bytes, colours: int) -> Image.Image:
    """Return a picture with a palette of `colours`: less than half the bytes."""
    with Image.open(BytesIO(picture)) as found:
        return found.convert("RGB").quantize(colours, dither=Image.Dither.NONE)


def _status(one: Simulated) -> RankStatus:
    """Return the status that a rank with these records reports."""
    rank = one.rank
    group = _group(one)
    death = one.extra.get("death")
    if death is not None:
        return statuses.rank(rank, group, state="dead", reason=death)
    if "silent_for" in one.extra:
        age = one.extra["silent_for"]
        return statuses.rank(
            rank, group, state="unreachable", cell=7, heartbeat_age=age
        )
    line = one.extra.get("location", "").partition(" (")[0]
    if line or group.oldest is not None:
        return statuses.rank(
            rank,
            group,
            state="busy",
            cell=7,
            busy_for=ELAPSED,
            line=line,
            line_for=ELAPSED if line else None,
            heartbeat_age=0.0,
        )
    return statuses.rank(rank, group)


def _group(one: Simulated) -> GroupStatus:
    done = [
        _op(one, place)
        for place, (_, work, _) in enumerate(one.entries)
        if work.is_completed()
    ]
    flying = [
        _op(one, place)
        for place, (_, work, _) in enumerate(one.entries)
        if not work.is_completed()
    ]
    oldest = flying[0] if flying else None
    return statuses.group(
        enqueued=[*done, *flying][-1],
        started=[*done, *flying][-1],
        completed=done[-1],
        in_flight=len(flying),
        oldest=oldest,
        issued=one.status.collective_seq,
        timeout=_TIMEOUT,
    )


def _op(one: Simulated, place: int) -> OpStatus:
    record, work, source = one.entries[place]
    found = statuses.op(
        record.op_type.value,
        record.seq,
        source=source,
        peer=record.peer,
        tag=record.tag,
        **record.traffic(),
    )
    if work.is_completed():
        return replace(found, state="completed", duration=4.1e-4)
    return replace(found, state="started", elapsed=ELAPSED, timeout=_TIMEOUT)


def _aborted(one: RankStatus, reason: str, diagnosis: str = "") -> RankStatus:
    (group,) = one.groups
    told = replace(group, reason=reason, diagnosis=diagnosis)
    ended = replace(told, state="aborted", oldest=None, in_flight=0)
    return replace(
        one, state="idle", cell=None, busy_for=None, line="", groups=(ended,)
    )
