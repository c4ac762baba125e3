"""RankService: serves what an engine and a script's rank are both asked for."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from rankscope.backends.errors import DistError
from rankscope.backends.groups.inquiry import handled_exception
from rankscope.backends.groups.world import world
from rankscope.backends.observe.export import local_dump
from rankscope.backends.observe.stacks import Frame, StackSampler, ThreadStacks

from ..errors import ClusterError
from . import requests

__all__ = ["RankService", "answer"]

#: Samplings at a time: each costs the main thread some of its time.
MOST = 4


def answer(
    handlers: Mapping[str, Callable[[Any], Any]], request: Mapping[str, Any]
) -> dict[str, Any]:
    """Serve a request; return its result or its error as the content of a message."""
    try:
        handler = handlers.get(request["op"])
        if handler is None:
            raise DistError(f"this rank does not serve {request['op']!r}")
        return {"ok": True, "result": handler(request["args"])}
    except Exception as error:  # noqa: BLE001 - the error is the answer
        return {
            "ok": False,
            "ename": type(error).__name__,
            "evalue": str(error),
            "traceback": traceback.format_exc(),
        }


class RankService:
    """The status, flight recorder, stacks and aborts of this process."""

    def __init__(
        self,
        summary: Callable[[], requests.EncodedSummary],
        threads: ThreadStacks,
        location: Callable[[], str] = lambda: "",
        abort_refused: str = "",
    ) -> None:
        self._summary = summary
        self._threads = threads
        self._location = location
        self._abort_refused = abort_refused
        self._lock = threading.Lock()
        self._samplers: dict[str, StackSampler] = {}

    @requests.GetClock.handler
    def _clock(self, wanted: requests.GetClock) -> int:
        return time.time_ns()

    @requests.GetSummary.handler
    def _get_summary(self, wanted: requests.GetSummary) -> requests.EncodedSummary:
        return self._summary()

    @requests.GetFlightRecord.handler
    def _flight_record(self, wanted: requests.GetFlightRecord) -> dict[str, Any]:
        return local_dump(wanted.last)

    @requests.Abort.handler
    def _abort(self, wanted: requests.Abort) -> requests.Aborted:
        if self._abort_refused:
            raise DistError(self._abort_refused)
        names = world.abort(
            wanted.groups,
            wanted.reason,
            by=wanted.by,
            culprits=wanted.culprits,
            dead=wanted.dead,
            diagnosis=wanted.diagnosis,
        )
        return {"groups": names, "summary": self._summary()}

    @requests.GetStacks.handler
    def _stacks(self, wanted: requests.GetStacks) -> requests.StackList:
        stacks = self._threads.now(wanted.every)
        return {
            "location": self._location(),
            "exception": handled_exception(),
            "thread_exception": world.thread_exception,
            "stacks": stacks,
        }

    @requests.StartSampling.handler
    def _start(self, wanted: requests.StartSampling) -> None:
        with self._lock:
            # Results that were not taken: the notebook is gone, or was interrupted.
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

    @requests.TakeSamples.handler
    def _take(self, wanted: requests.TakeSamples) -> requests.SampledStacks:
        with self._lock:
            sampler = self._samplers.pop(wanted.key, None)
        if sampler is None:
            raise ClusterError("this rank has no such profile: was it restarted?")
        seconds, looks, weights, course = sampler.result()
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
            "course": course,
            "frames": list(frames),
        }
