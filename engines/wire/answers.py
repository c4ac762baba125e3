"""Answers: what ranks answered to a request, or why they did not."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ..errors import ClusterError, group_by_message

__all__ = ["Answers"]

A = TypeVar("A")


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

    def record(self, rank: int, reply: Future[Any]) -> None:
        """Take the reply of `rank`, which is done: a result, or an error."""
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
