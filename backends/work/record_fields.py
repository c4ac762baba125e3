"""Flight records, our own and torch's, as plain data; and the newest of many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

__all__ = ["UNSEEN", "Course", "Frame", "Splits", "newest", "record_fields"]

#: File, line and function.
Frame = tuple[str, int, str]

#: The rows that a rank receives from each rank of its group, and those that it sends;
#: an empty list where all parts are of one size.
Splits = tuple[Sequence[int], Sequence[int]]

#: In place of the time since when an op is waited for: its caller polled it, or had a
#: callback called at its end, and may have waited for that.
UNSEEN = -1

T = TypeVar("T")


def record_fields(
    record: Any,
    *,
    group: str,
    group_id: str,
    generation: int,
    state: str,
    dtypes: Sequence[str],
    reduce_op: str | None,
    name_source: Callable[[Frame], str],
    waited_ns: int | None = None,
    device_ns: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Return a record, one of ours or of torch's, as plain data (JSON-able).

    `waited_ns` is when its caller began to wait for it; 0: it did not wait, `UNSEEN`,
    or ``None``: its library does not record that.
    """

    def plain(frame: Frame, issuer: str = "") -> dict[str, Any]:
        file, line, function = frame
        source = name_source(frame) if file else ""
        if issuer:
            source += f" in {issuer}"
        return {"file": file, "line": line, "function": function, "source": source}

    frame, *callers = record.frames or (("", 0, ""),)
    started_ns, ended_ns = record.started_ns, record.ended_ns
    return {
        "record_id": record.record_id,
        "group": group,
        "group_id": group_id,
        "generation": generation,
        "collective_seq_id": record.collective_seq_id,
        "p2p_seq_id": record.p2p_seq_id,
        "op_id": record.op_id,
        "op": record.op_type.value,
        "backend": record.backend,
        "is_p2p": record.op_type.is_p2p,
        "state": state,
        "sizes": [list(size) for size in record.sizes],
        "dtypes": list(dtypes),
        "peer": record.peer,
        "reduce_op": reduce_op,
        "tag": record.tag,
        "message": record.message,
        "splits": record.splits and [list(rows) for rows in record.splits],
        "timeout": record.timeout,
        "time_created_ns": record.created_ns,
        "time_started_ns": started_ns,
        "time_ended_ns": ended_ns,
        "time_waited_ns": waited_ns,
        "duration_ns": ended_ns - started_ns if started_ns and ended_ns else None,
        "device_ns": device_ns,
        "frame": plain(frame, record.issuer),
        # The lines that called its function, the innermost first.
        "callers": [plain(one) for one in callers],
        "error": record.error,
    }


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
    """Return the newest `count` records, those in flight, the last of each group."""
    first = max(0, len(records) - count)
    courses = [course(one) for one in records]
    latest = {one[:3]: number for number, one in enumerate(courses)}
    kept = set(latest.values())
    return [
        record
        for number, (record, one) in enumerate(zip(records, courses, strict=True))
        if number >= first or number in kept or one.in_flight
    ]
