"""Cost of the board of many ranks, that publish status as often as their number allows.

The ranks are simulated: their messages, as bytes, pass through the whole kernel path
from decoding to the message for the page. The page receives the kernel's messages at
the original pace.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from rankscope.backends.rank_sets import write_members
from rankscope.engines import ClusterError, ClusterStatus, FlightRecords
from rankscope.engines.agent.publisher import MIN_INTERVAL
from rankscope.engines.cluster.registry import interval_of
from rankscope.engines.observe.profiling import Sampling
from rankscope.engines.observe.rank_slots import RankSlot
from rankscope.engines.status import GroupStatus, OpStatus, Summary, decode, encode
from rankscope.widgets.board.feed import BoardFeed
from rankscope.widgets.board.model import BoardModel

from .table import Row, Sample, duration

__all__ = ["STEPS", "Ranks", "measure", "messages"]

SIZES = (256, 1024)
#: Of a core, and seconds.
BUDGET, REFRESH = 0.10, 0.1
#: Parts of the ranks that send at a time.
PARTS = 10
#: Different messages of each rank; then they come again.
STEPS = 10

# Plays messages at their times; returns the milliseconds from each frame to the next.
_PLAY = """async (messages) => {
  const frames = [];
  let last = performance.now(), going = true;
  const count = (now) => {
    frames.push(now - last);
    last = now;
    if (going) requestAnimationFrame(count);
  };
  requestAnimationFrame(count);
  const began = performance.now();
  for (const [at, message] of messages) {
    const wait = at * 1000 - (performance.now() - began);
    if (wait > 0) await new Promise((done) => setTimeout(done, wait));
    window.play(message);
  }
  going = false;
  return frames.slice(1);
}"""


#: Is called with a rank and its status.
Callback = Callable[[int, Summary], None]


class Ranks:
    """The part of a cluster that the feed uses; `receive` is given a rank's message."""

    closed = False
    detached = False
    ended = None

    def __init__(self, n: int) -> None:
        self.n = n
        self._slots = [
            RankSlot(rank, rank, str(rank), 1000 + rank, "node1", "127.0.0.1", 0)
            for rank in range(n)
        ]
        self._callback: Callback = lambda rank, summary: None

    def receive(self, rank: int, message: bytes) -> None:
        slot = self._slots[rank]
        slot.record(decode(json.loads(message)["summary"]))
        self._callback(rank, slot.summary)

    def glance(self, ranks: Iterable[int] | None = None) -> ClusterStatus:
        now = time.monotonic()
        chosen = range(self.n) if ranks is None else sorted(ranks)
        found = tuple(self._slots[rank].status(now) for rank in chosen)
        return ClusterStatus("bench", "default", "local", "cpu:tcp", "running", found)

    def status(self, *, fresh: bool = False, timeout: float = 0.8) -> ClusterStatus:
        return self.glance()

    def flight_records(
        self, ranks: Iterable[int], *, last: int | None = None, timeout: float = 5.0
    ) -> FlightRecords:
        return FlightRecords()

    def start_sampling(self, ranks: Iterable[int], *, seconds: float) -> Sampling:
        raise ClusterError("these ranks have no process")

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        self._callback = callback
        return lambda: None


def _message(rank: int, step: int, size: int) -> bytes:
    """Return the status of a rank amid all_reduces of 4 MiB, some milliseconds each."""
    seq = 100 + step * 30 + rank % 3
    op = OpStatus(
        "all_reduce",
        seq,
        timeout=300.0,
        sizes=((1024, 1024),),
        dtypes=("float32",),
        nbytes=4 << 20,
        source="cell 7 line 5",
    )
    now = replace(op, state="started", elapsed=1e-3)
    group = GroupStatus(
        name="default",
        members=write_members(tuple(range(size))),
        backend="cpu:tcp",
        generation=0,
        state="ready",
        reason=None,
        timeout=300.0,
        devices={"cpu": "tcp"},
        enqueued=now,
        started=now,
        completed=replace(op, seq=seq - 1, duration=2e-3 + step * 1e-5),
        in_flight=1,
        oldest=now,
        issued=seq,
    )
    summary = Summary(
        pid=1000 + rank,
        busy=True,
        cell=7,
        busy_for=12.0 + step,
        groups=(group,),
    )
    return json.dumps({"summary": encode(summary)}).encode()


def measure(seconds: float, left_out: Callable[[str], None]) -> list[Row]:
    """Return the kernel's share of a core, and what an update takes, by ranks."""
    rows = []
    for size in SIZES:
        rate = 1 / max(MIN_INTERVAL, interval_of(size))
        what = f"board of {size:,} ranks, {rate:.1f} updates/s each"
        busy, sent = _feed(size, rate, seconds)
        refresh = _refresh(size)
        rows += [
            Row.share(
                f"{what}: the kernel's CPU",
                busy,
                BUDGET,
                f", {len(sent) / seconds:.1f} messages/s",
            ),
            Row(
                f"{what}: all rows anew in the kernel",
                str(refresh),
                budget=f"≤ {duration(REFRESH)}",
                passed=refresh.median <= REFRESH,
            ),
        ]
        frames = _frames(size, sent, left_out)
        if frames is not None:
            rows.append(Row(f"{what}: the page, frame to frame", str(frames)))
    return rows


def messages(size: int) -> list[list[bytes]]:
    """Return the messages of each step, by rank."""
    return [
        [_message(rank, step, size) for rank in range(size)] for step in range(STEPS)
    ]


def _refresh(size: int) -> Sample:
    """Return the seconds from the statuses of all ranks to the message for the page."""
    ranks, model = Ranks(size), BoardModel()
    times = []
    for step in messages(size):
        for rank, message in enumerate(step):
            ranks.receive(rank, message)
        began = time.process_time()
        model.update(ranks.glance(), time.monotonic())
        json.dumps(model.delta())
        times.append(time.process_time() - began)
    # The first has all that does not change later.
    return Sample([times[1:]])


def _feed(
    size: int, rate: float, seconds: float
) -> tuple[float, list[tuple[float, dict[str, Any]]]]:
    """Feed a board; return its share of a core, and what it sent when."""
    ranks, made = Ranks(size), messages(size)
    for rank, message in enumerate(made[0]):
        ranks.receive(rank, message)
    sent: list[tuple[float, dict[str, Any]]] = []
    began = time.monotonic()

    def send(message: dict[str, Any]) -> None:
        # As a comm does: into JSON, and away.
        sent.append((time.monotonic() - began, json.loads(json.dumps(message))))

    feed = BoardFeed(ranks, send, lambda: None)  # type: ignore[arg-type]
    feed.watch("bench")
    pace = threading.Event()
    used, began = time.process_time(), time.monotonic()
    sent.clear()
    # Spread over the period, as real ones are: a tenth of the ranks at a time.
    turns = int(seconds * rate * PARTS)
    for turn in range(turns):
        step, part = divmod(turn, PARTS)
        for rank in range(part, size, PARTS):
            ranks.receive(rank, made[step % STEPS][rank])
        pace.wait(max(0.0, began + (turn + 1) / rate / PARTS - time.monotonic()))
    share = (time.process_time() - used) / (time.monotonic() - began)
    feed.close()
    return share, sent


def _frames(
    size: int, sent: list[tuple[float, dict[str, Any]]], left_out: Callable[[str], None]
) -> Sample | None:
    try:
        from tests.widgets.bare_page import BarePage, chromium
    except ImportError as error:
        left_out(f"the board's page: {error}")
        return None
    if shutil.which("chromium") is None:
        left_out("the board's page: no chromium found")
        return None
    ranks = Ranks(size)
    for rank in range(size):
        ranks.receive(rank, _message(rank, 0, size))
    feed = BoardFeed(ranks, lambda message: None, lambda: None)  # type: ignore[arg-type]
    snapshot = feed.full()
    # Its numbers go on from those of the snapshot.
    first = snapshot["v"] + 1
    played = [
        (at, {**message, "v": first + place})
        for place, (at, message) in enumerate(
            one for one in sent if one[1]["type"] == "delta"
        )
    ]
    with chromium() as browser:
        page = BarePage(browser, width=1280, height=720, snapshot=snapshot)
        page.play()
        times: list[float] = page.page.evaluate(_PLAY, played)
    return Sample([[one / 1000 for one in times]])
