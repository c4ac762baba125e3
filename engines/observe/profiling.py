"""Where ranks are: the stacks of their threads, now or sampled for some seconds."""

from __future__ import annotations

import contextlib
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

import msgspec

from rankscope.backends.observe.stacks import Frame, Stack

from ..errors import ClusterError, group_by_message
from ..wire import requests
from .rank_registry import RankRegistry

__all__ = [
    "LONGEST",
    "RATE",
    "Profile",
    "RankStacks",
    "Sampled",
    "Sampling",
    "file_name",
    "innermost_line",
    "is_cell",
    "is_users",
    "line_name",
    "stacks_of",
    "without_internals",
]

#: Looks a second, which cost a rank about half a percent of a core.
RATE = 100.0
#: Seconds of a profile at most: nobody meant more.
LONGEST = 3600.0
#: Seconds that a rank gets to send what it has seen.
ANSWER = 10.0
#: Seconds between two calls of ``on_progress``.
STEP = 0.2

_CELL = re.compile(r"Cell In\[(.*)\]$")
#: Parts of paths of what is installed, and of Python's own library.
_INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")


@dataclass(frozen=True)
class RankStacks:
    """The stacks of ranks at one moment."""

    #: Rank → the stacks of its threads, the main thread's first: ``thread`` is the
    #: name, ``frames`` are the calls, the innermost last.
    stacks: dict[int, list[Stack]]
    #: Rank → the innermost line of the script; cells have it in their stack.
    locations: dict[int, str] = field(default_factory=dict)
    #: Rank → why it did not answer.
    errors: dict[int, str] = field(default_factory=dict)
    #: Rank → the exception that its main thread handles, and the line that raised it.
    exceptions: dict[int, tuple[str, str]] = field(default_factory=dict)
    #: Rank → the last exception that ended a thread of it, with the line.
    thread_exceptions: dict[int, str] = field(default_factory=dict)

    def main_frames(self, rank: int) -> tuple[Frame, ...]:
        """Return the calls of a rank's main thread; none where it did not answer."""
        return self.stacks[rank][0].frames if rank in self.stacks else ()

    def main_text(self, rank: int) -> str:
        """Return the stack of a rank's main thread as lines, ``"idle"`` without one.

        Parameters
        ----------
        rank : int
            The rank.

        Returns
        -------
        str
            The stack; of a rank that did not answer, why it did not.
        """
        if rank in self.errors:
            return self.errors[rank]
        frames = self.main_frames(rank)
        lines = [self.locations[rank]] if self.locations.get(rank) else []
        for one in frames:
            lines.append(f"{frame_place(one)}, in {one.function}")
            if one.text:
                lines.append(f"    {one.text}")
        return "\n".join(lines) or "idle"


@dataclass(frozen=True)
class Sampled:
    """Where one rank spent its time."""

    #: Seconds that its sampler looked for.
    seconds: float
    #: How often the sampler could look.
    looks: int
    #: Each stack and the seconds that its thread spent there.
    weights: Sequence[tuple[Stack, float]]
    #: When it looked at last, in ns on the clock of the rank, and what it saw.
    course: Sequence[tuple[int, Stack]] = ()


@dataclass(frozen=True)
class Profile:
    """Where ranks spent their time."""

    #: Rank → what its sampler saw: ``weights`` has pairs of a stack and the seconds
    #: that its thread spent there; ``looks`` is how often it looked, in ``seconds``.
    ranks: dict[int, Sampled]
    #: Rank → why nothing is known of it.
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds that the sampling took, on the rank where it took longest."""
        return max((one.seconds for one in self.ranks.values()), default=0.0)


def is_cell(frame: Frame) -> bool:
    return _CELL.match(frame.place) is not None


def is_users(frame: Frame) -> bool:
    """Whether the code is the user's: of a cell, or of a file that is not installed."""
    return not frame.internal and not any(one in frame.place for one in _INSTALLED)


def innermost_line(frames: Sequence[Frame]) -> tuple[Frame | None, Sequence[Frame]]:
    """Return the innermost call of the user's own code, and the calls it has made."""
    for place in reversed(range(len(frames))):
        if is_users(frames[place]):
            return frames[place], frames[place + 1 :]
    return None, frames


def frame_place(frame: Frame) -> str:
    """Return ``Cell In[7], line 3`` or ``File "train.py", line 3``."""
    place = frame.place if is_cell(frame) else f'File "{frame.place}"'
    return f"{place}, line {frame.line}"


def file_name(frame: Frame) -> str:
    """Return ``cell 7`` or ``train.py``."""
    cell = _CELL.match(frame.place)
    return f"cell {cell[1]}" if cell else PurePath(frame.place).name


def line_name(frame: Frame) -> str:
    """Return ``cell 7 line 3`` or ``train.py line 3``."""
    return f"{file_name(frame)} line {frame.line}"


def without_internals(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """Return `frames` with Rankscope's function that was called, not what it does.

    How an op waits, on which line of its loop, differs between ranks and moments, and
    is of no interest to who called it.
    """
    kept: list[Frame] = []
    for frame in frames:
        if not frame.internal:
            kept.append(frame)
        elif not (kept and kept[-1].internal):
            kept.append(frame._replace(line=0, text=""))
    return tuple(kept)


def stacks_of(registry: RankRegistry, ranks: Sequence[int], every: bool) -> RankStacks:
    answers = registry.ask(requests.GetStacks(every), ranks)
    found = {
        rank: msgspec.convert(answer["stacks"], list[Stack])
        for rank, answer in answers.results.items()
    }
    locations = {rank: answer["location"] for rank, answer in answers.results.items()}
    return RankStacks(
        found,
        locations,
        {**answers.errors, **registry.deaths(ranks)},
        {
            rank: (one["exception"][0], one["exception"][1])
            for rank, one in answers.results.items()
        },
        {rank: one["thread_exception"] for rank, one in answers.results.items()},
    )


class Sampling:
    """Samples of the stacks of ranks that are being taken, until `take` or `wait`.

    Raises what `ObservedRanks.sample` does.
    """

    def __init__(
        self,
        registry: RankRegistry,
        ranks: Sequence[int],
        seconds: float = LONGEST,
        rate: float = RATE,
        every: bool = False,
    ) -> None:
        if (
            not 0 < seconds <= LONGEST
            or not math.isfinite(rate)
            or not 0 < rate <= 1000
        ):
            raise ValueError(
                f"a profile of {seconds:g} s at {rate:g} looks a second: expected up "
                f"to {LONGEST:g} s, and up to 1000 looks a second"
            )
        self._registry = registry
        self._key = secrets.token_hex(8)
        request = requests.StartSampling(self._key, seconds, rate, every)
        started = registry.ask(request, ranks)
        #: When all had begun: one that was late to begin has its seconds, too.
        self.began = time.monotonic()
        self._seconds = seconds
        self._ranks = list(started.results)
        self._errors = {**started.errors, **registry.deaths(ranks)}
        if not self._ranks:
            raise ClusterError(group_by_message(self._errors))

    def stop(self) -> None:
        """End it without a result, and without waiting."""
        self._registry.post(requests.TakeSamples(self._key), self._ranks)

    def wait(self, on_progress: Callable[[float], None] | None = None) -> Profile:
        """Wait for all of its seconds, or for a `KeyboardInterrupt`; see `take`.

        `on_progress` is called with the seconds so far.
        """
        wait, end = threading.Event(), self.began + self._seconds
        # After an interrupt: the ranks have seen something.
        with contextlib.suppress(KeyboardInterrupt):
            while (left := end - time.monotonic()) > 0:
                if on_progress is not None:
                    on_progress(self._seconds - left)
                wait.wait(min(left, STEP))
        return self.take()

    def take(self) -> Profile:
        """End it, and return what was seen."""
        registry = self._registry
        answers = registry.ask(requests.TakeSamples(self._key), self._ranks, ANSWER)
        dead = registry.deaths(self._ranks)
        errors = {**self._errors, **answers.errors, **dead}
        if not answers.results:
            raise ClusterError(group_by_message(errors))
        found = {rank: _sampled(one) for rank, one in sorted(answers.results.items())}
        return Profile(found, errors)


def _sampled(answer: requests.SampledStacks) -> Sampled:
    frames = msgspec.convert(answer["frames"], list[Frame])
    weights = [
        (Stack(thread, tuple(frames[place] for place in places)), weight)
        for thread, places, weight in answer["stacks"]
    ]
    course = [(at, weights[place][0]) for at, place in answer["course"]]
    return Sampled(answer["seconds"], answer["looks"], weights, course)
