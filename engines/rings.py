"""Rings: the flight recorders of all ranks, and how their clocks differ."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankscope.backends.chrome_trace import chrome_trace, estimate_offset
from rankscope.backends.export import save_flight_recorder
from rankscope.backends.fr_format import flight_recorder

from .roster import Roster

__all__ = ["Rings", "fetch"]

#: Seconds that a rank gets to send its ring, and to say what time it is.
TIMEOUT = 5.0
CLOCK_TIMEOUT = 1.0
#: Times that a rank on another host is asked for its clock.
SAMPLES = 5


@dataclass
class Rings:
    """What the flight recorders held at one moment."""

    #: Rank → what `rankscope.backends.export.ring` returned there.
    rings: dict[int, dict[str, Any]] = field(default_factory=dict)
    #: Rank → ns that its clock is ahead of the one here.
    offsets_ns: dict[int, int] = field(default_factory=dict)
    #: Rank → why its ring is not here.
    errors: dict[int, str] = field(default_factory=dict)

    def chrome_trace(self) -> dict[str, Any]:
        """All of it on one clock, as a Chrome trace, which Perfetto opens."""
        records = {rank: ring["records"] for rank, ring in self.rings.items()}
        return chrome_trace(records, self.offsets_ns)

    def save(self, path: str | Path) -> list[Path]:
        """Write what is here; return the files.

        A `path` that ends with ``.json`` becomes one Chrome trace of all
        ranks on one clock. Any other is the folder, or the prefix, of one
        dump per rank in PyTorch's Flight Recorder format.
        """
        if str(path).endswith(".json"):
            file = Path(path)
            file.write_text(json.dumps(self.chrome_trace()), encoding="utf-8")
            return [file]
        return [
            save_flight_recorder(flight_recorder(**ring), str(path), rank)
            for rank, ring in self.rings.items()
        ]


def fetch(roster: Roster, ranks: Iterable[int], last: int | None) -> Rings:
    """Fetch the rings of `ranks`; see `Ranks.rings`."""
    chosen = list(ranks)
    answers = roster.ask("ring", {"last": last}, chosen, timeout=TIMEOUT)
    dead = {
        seat.rank: str(seat.death)
        for seat in roster.seats
        if not seat.alive and seat.rank in chosen
    }
    return Rings(
        dict(sorted(answers.results.items())),
        _offsets(roster, answers.results),
        {**answers.errors, **dead},
    )


def _offsets(roster: Roster, ranks: Iterable[int]) -> dict[int, int]:
    here = socket.gethostname()
    there = [rank for rank in ranks if roster.seats[rank].host != here]
    samples: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in there}
    for _ in range(SAMPLES if there else 0):
        for rank, sample in _sample(roster, there).items():
            samples[rank].append(sample)
    # One host has one clock.
    offsets = dict.fromkeys(ranks, 0)
    offsets.update(
        {rank: estimate_offset(some) for rank, some in samples.items() if some}
    )
    return offsets


def _sample(roster: Roster, ranks: Iterable[int]) -> dict[int, tuple[int, int, int]]:
    """Ask `ranks` once for the time; return (sent, their time, received) in ns."""
    received: dict[int, int] = {}

    def note(rank: int) -> Callable[[Future[Any]], None]:
        def at(done: Future[Any]) -> None:
            received[rank] = time.time_ns()

        return at

    sent = time.time_ns()
    futures = roster.post("clock", {}, ranks)
    for rank, future in futures.items():
        future.add_done_callback(note(rank))
    wait(futures.values(), CLOCK_TIMEOUT)
    found = {}
    for rank, future in futures.items():
        if future.done() and future.exception() is None:
            content = future.result()["content"]
            if content["ok"]:
                found[rank] = (sent, content["result"], received[rank])
    return found
