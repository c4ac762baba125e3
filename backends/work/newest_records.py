"""The newest records of a rank, and what a diagnosis needs of older ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

__all__ = ["Course", "newest"]

T = TypeVar("T")


class Course(NamedTuple):
    """Where a record belongs, and the state of its op."""

    group_id: str
    generation: int
    is_p2p: bool
    state: str

    @property
    def in_flight(self) -> bool:
        """Whether the op is not over."""
        return self.state in ("scheduled", "started")


def newest(records: Sequence[T], count: int, course: Callable[[T], Course]) -> list[T]:
    """Return the newest `count` records, those in flight, and the last of each group.

    The last ones of a group are its last collective and its last send or receive: of a
    group that is not there, no op was recorded.
    """
    first = max(0, len(records) - count)
    courses = [course(one) for one in records]
    latest = {one[:3]: number for number, one in enumerate(courses)}
    kept = set(latest.values())
    return [
        record
        for number, (record, one) in enumerate(zip(records, courses, strict=True))
        if number >= first or number in kept or one.in_flight
    ]
