"""FlightRecords: the flight recorder dumps of ranks, and their clock offsets."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rankscope.backends.observe.chrome_trace import chrome_trace, estimate_offset
from rankscope.backends.observe.export import save_flight_recorder
from rankscope.backends.observe.torch_format import flight_recorder

from ..wire.answers import Answers
from ..wire.requests import GetClock, GetFlightRecord
from .rank_registry import RankRegistry

__all__ = ["FlightRecords", "fetch"]

#: Seconds that a rank gets to send its dump, and to return its time.
TIMEOUT = 5.0
CLOCK_TIMEOUT = 1.0
#: Clock samples of each rank on another host.
SAMPLES = 5


@dataclass
class FlightRecords:
    """The contents of the ranks' flight recorders at one moment."""

    #: Rank → a dict: ``records``, a dict for each op, oldest first; ``groups``, the
    #: name and the global ranks of each group by its id; and ``rank``.
    dumps: dict[int, dict[str, Any]] = field(default_factory=dict)
    #: Rank → ns that its clock is ahead of this process's clock.
    offsets_ns: dict[int, int] = field(default_factory=dict)
    #: Rank → why its dump is missing.
    errors: dict[int, str] = field(default_factory=dict)

    def chrome_trace(self) -> dict[str, Any]:
        """Return all records on one clock as a Chrome trace, which Perfetto opens.

        `save` writes it as JSON.
        """
        records = {rank: dump["records"] for rank, dump in self.dumps.items()}
        return chrome_trace(records, self.offsets_ns)

    def save(self, path: str | Path) -> list[Path]:
        """Write the records to files; return the paths.

        Parameters
        ----------
        path : str or pathlib.Path
            One that ends with ``.json`` becomes one Chrome trace of all ranks on one
            clock. Any other is the folder, or the prefix, of one dump per rank in
            PyTorch's Flight Recorder format.
        """
        if str(path).endswith(".json"):
            file = Path(path)
            file.write_text(json.dumps(self.chrome_trace()), encoding="utf-8")
            return [file]
        return [
            save_flight_recorder(flight_recorder(**dump), str(path), rank)
            for rank, dump in self.dumps.items()
        ]


def fetch(
    registry: RankRegistry,
    ranks: Iterable[int],
    last: int | None,
    timeout: float = TIMEOUT,
) -> FlightRecords:
    chosen = list(ranks)
    answers = registry.ask(GetFlightRecord(last), chosen, timeout)
    return FlightRecords(
        dict(sorted(answers.results.items())),
        _offsets(registry, answers.results),
        {**answers.errors, **registry.deaths(chosen)},
    )


def _offsets(registry: RankRegistry, ranks: Iterable[int]) -> dict[int, int]:
    there = [rank for rank in ranks if not registry.slots[rank].is_here]
    samples: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in there}
    for _ in range(SAMPLES if there else 0):
        for rank, sample in _sample(registry, there).items():
            samples[rank].append(sample)
    # Ranks on one host share its clock.
    offsets = dict.fromkeys(ranks, 0)
    offsets.update(
        {rank: estimate_offset(some) for rank, some in samples.items() if some}
    )
    return offsets


def _sample(
    registry: RankRegistry, ranks: Iterable[int]
) -> dict[int, tuple[int, int, int]]:
    """Ask `ranks` once for the time; return (sent, their time, received) in ns."""
    received: dict[int, int] = {}

    def note(rank: int, done: Future[Any]) -> None:
        received[rank] = time.time_ns()

    sent = time.time_ns()
    futures = registry.post(GetClock(), ranks)
    for rank, future in futures.items():
        future.add_done_callback(partial(note, rank))
    wait(futures.values(), CLOCK_TIMEOUT)
    times = Answers.of(futures).results
    # The wait may end before the callback has noted when the answer came.
    return {
        rank: (sent, time, received[rank])
        for rank, time in times.items()
        if rank in received
    }
