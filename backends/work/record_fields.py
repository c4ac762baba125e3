"""The form of a flight record as plain data: of our own ops, and of torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Frame", "Splits", "fields_of", "record_fields"]

#: File, line and function.
Frame = tuple[str, int, str]

#: The rows that a rank receives from each rank of its group, and those that it sends;
#: an empty list where all parts are of one size.
Splits = tuple[Sequence[int], Sequence[int]]


def record_fields(
    *,
    record_id: int,
    group: str,
    group_id: str,
    op: str,
    state: str,
    timeout: float,
    created_ns: int,
    started_ns: int,
    ended_ns: int,
    frame: Frame | None,
    name_source: Callable[[Frame], str],
    generation: int = 0,
    collective_seq_id: int = 0,
    p2p_seq_id: int = 0,
    op_id: int = -1,
    backend: str = "",
    is_p2p: bool = False,
    sizes: Sequence[Sequence[int]] = (),
    dtypes: Sequence[str] = (),
    peer: int | None = None,
    reduce_op: str | None = None,
    tag: int | None = None,
    splits: Splits | None = None,
    error: str | None = None,
) -> dict[str, Any]:
    """Return a record as plain data (JSON-able).

    A time of 0 is not known; a `frame` of ``None`` neither. `name_source` returns what
    people read for a line.
    """
    file, line, function = frame or ("", 0, "")
    return {
        "record_id": record_id,
        "group": group,
        "group_id": group_id,
        "generation": generation,
        "collective_seq_id": collective_seq_id,
        "p2p_seq_id": p2p_seq_id,
        "op_id": op_id,
        "op": op,
        "backend": backend,
        "is_p2p": is_p2p,
        "state": state,
        "sizes": [list(size) for size in sizes],
        "dtypes": list(dtypes),
        "peer": peer,
        "reduce_op": reduce_op,
        "tag": tag,
        "splits": splits and [list(rows) for rows in splits],
        "timeout": timeout,
        "time_created_ns": created_ns,
        "time_started_ns": started_ns,
        "time_ended_ns": ended_ns,
        "duration_ns": ended_ns - started_ns if started_ns and ended_ns else None,
        "frame": {
            "file": file,
            "line": line,
            "function": function,
            "source": "" if frame is None else name_source(frame),
        },
        "error": error,
    }


def fields_of(record: Any, **own: Any) -> dict[str, Any]:
    """Return `record_fields` of a record that is an object: one of ours, or torch's.

    `own` are the fields that the two have in different forms.
    """
    return record_fields(
        op=record.op_type.value,
        is_p2p=record.op_type.is_p2p,
        **{name: getattr(record, name) for name in _SHARED},
        **own,
    )


_SHARED = (
    *("record_id", "collective_seq_id", "p2p_seq_id", "op_id"),
    *("backend", "sizes", "peer", "tag", "splits", "timeout"),
    *("created_ns", "started_ns", "ended_ns", "frame", "error"),
)
