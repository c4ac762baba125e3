"""StackService: serves the requests for stacks, in an engine and in a script's rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rankscope.backends.observe.stacks import Frame, StackSampler, ThreadStacks

from ..errors import ClusterError
from . import requests

__all__ = ["StackService"]

#: Samplings at a time: each costs the main thread some of its time.
MOST = 4


class StackService:
    """Stacks of this process for `GetStacks`, `StartSampling` and `TakeSamples`.

    Parameters
    ----------
    threads
        Looks at the threads.
    location
        Returns the innermost line of the user's code, or an empty text.
    """

    def __init__(self, threads: ThreadStacks, location: Callable[[], str]) -> None:
        self._threads = threads
        self._location = location
        self._lock = threading.Lock()
        self._samplers: dict[str, StackSampler] = {}

    def handlers(self) -> list[tuple[str, Callable[[Any], Any]]]:
        """Return the ops and the functions that serve them."""
        return [
            requests.GetStacks.served_by(self._stacks),
            requests.StartSampling.served_by(self._start),
            requests.TakeSamples.served_by(self._take),
        ]

    def _stacks(self, wanted: requests.GetStacks) -> requests.StackList:
        return {
            "location": self._location(),
            "stacks": [
                (thread, [list(frame) for frame in frames])
                for thread, frames in self._threads.now(wanted.every)
            ],
        }

    def _start(self, wanted: requests.StartSampling) -> None:
        with self._lock:
            # What nobody took: its notebook is gone, or was interrupted too early.
            for key in list(self._samplers):
                if len(self._samplers) >= MOST and not self._samplers[key].is_running:
                    del self._samplers[key]
            if len(self._samplers) >= MOST:
                raise ClusterError(
                    f"{MOST} profiles are being taken of this rank: wait for one to end"
                )
            self._samplers[wanted.key] = StackSampler(
                self._threads, wanted.seconds, wanted.rate, wanted.every
            )

    def _take(self, wanted: requests.TakeSamples) -> requests.SampledStacks:
        with self._lock:
            sampler = self._samplers.pop(wanted.key, None)
        if sampler is None:
            raise ClusterError("this rank has no such profile: was it restarted?")
        seconds, looks, weights = sampler.result()
        frames: dict[Frame, int] = {}
        stacks = [
            (
                stack.thread,
                [frames.setdefault(frame, len(frames)) for frame in stack.frames],
                weight,
            )
            for stack, weight in weights
        ]
        return {
            "seconds": seconds,
            "looks": looks,
            "stacks": stacks,
            "frames": [list(frame) for frame in frames],
        }
