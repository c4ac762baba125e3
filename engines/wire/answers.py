"""Answers: what ranks answered to a request, or why they did not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ..errors import ClusterError, group_by_message

__all__ = ["Answers", "wait_for_answers"]

A = TypeVar("A")

#: Ranks that answer in the time of one: those of a machine take turns at its cores.
AT_ONCE = 8


def wait_for_answers(futures: Collection[Future[Any]], timeout: float) -> float:
    """Wait for the answers of ranks; return the seconds that they were given.

    These are `timeout`, and as many again for each further `AT_ONCE` ranks, while
    answers arrive: 64 ranks on two cores that all abort at once need longer than four,
    and a frozen one among them must not be waited for as long as they might take. The
    first answer of many ranks may take twice as long on a busy machine.
    """
    pending = set(futures)
    allowed = 0.0
    for turn in range(max(1, -(-len(pending) // AT_ONCE))):
        allowed += timeout
        done, pending = wait(pending, timeout)
        if not pending or (turn and not done):
            break
    return allowed


@dataclass
class Answers(Generic[A]):
    """The answers of the ranks, and why some gave none."""

    results: dict[int, A] = field(default_factory=dict)
    #: Rank → why the rank gave no result.
    errors: dict[int, str] = field(default_factory=dict)

    def all(self) -> dict[int, A]:
        """Return the results; raise `ClusterError` if a rank gave none."""
        if self.errors:
            raise ClusterError(group_by_message(self.errors))
        return self.results

    @classmethod
    def of(cls, futures: Mapping[int, Future[Any]]) -> Answers[Any]:
        found: Answers[Any] = cls()
        for rank, future in futures.items():
            if future.done():
                found._record(rank, future)
        return found

    @classmethod
    def wait(
        cls,
        futures: Mapping[int, Future[Any]],
        timeout: float,
        give_up: Callable[[int, Future[Any]], str | None],
    ) -> Answers[Any]:
        """Wait for answers; ``give_up(rank, future)`` may say where a late one is."""
        allowed = wait_for_answers(futures.values(), timeout)
        found = cls.of(futures)
        for rank in futures.keys() - found.results.keys() - found.errors.keys():
            place = give_up(rank, futures[rank])
            found.errors[rank] = f"no answer within {allowed:.3g} s{place or ''}"
        return found

    def _record(self, rank: int, reply: Future[Any]) -> None:
        error = reply.exception()
        if error is not None:
            self.errors[rank] = str(error)
            return
        content = reply.result()["content"]
        if content["ok"]:
            self.results[rank] = content["result"]
        else:
            self.errors[rank] = _format_error(content["ename"], content["evalue"])


def _format_error(ename: str, evalue: str) -> str:
    """Return an agent's error as text, without the class of an error of Rankscope."""
    ours = ename.startswith(("ClusterError", "Dist"))
    return evalue if ours and evalue else f"{ename}: {evalue}"
