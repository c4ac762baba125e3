"""The cells of the board: the status of one rank in one group, as a page shows it."""

from __future__ import annotations

from rankscope.backends.work.op_type import algbw, busbw
from rankscope.engines import GroupStatus, OpStatus, RankStatus

from ..units import bandwidth_text, bytes_text, duration_text
from .messages import op_text

__all__ = ["NOT_BUILT", "SILENT", "Cells", "as_aborted", "cells", "text"]

#: A cell's name → what it shows. Names that are missing are empty cells.
Cells = dict[str, str | int | float]

#: Seconds without a heartbeat after which a rank counts as silent: three periods.
SILENT = 3.0
#: The end of a backend that has not been used yet; see `GroupStatus.devices`.
NOT_BUILT = "(not built)"
#: The longest text of a cell; the longest op has 22 characters.
LONGEST = 160


def text(value: object, longest: int = LONGEST) -> str:
    """Return `value` as one line of at most `longest` characters."""
    line = " ".join(str(value).split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def cells(rank: RankStatus, group: GroupStatus | None, now: float) -> Cells:
    """Return the row of `rank` in `group` at `now`.

    `now` is in seconds on the clock of the cell ``since``: the start of the op in
    flight, or of the cell that runs.
    """
    age = rank.heartbeat_age
    state, mood = _state(rank, group)
    row: Cells = {
        "state": state,
        "mood": mood,
        "host": text(rank.host),
        # Present only while heartbeats are missing: each would change the row.
        "silent": round(now - age, 1) if age is not None and age > SILENT else 0,
    }
    if rank.pid >= 0:
        row["pid"] = rank.pid
    if rank.reason:
        row["reason"] = text(rank.reason, 400)
    if rank.state == "busy" and rank.cell is not None:
        row["cell"] = str(rank.cell)
    if group is not None:
        _fill(row, group)
    if rank.gpu:
        known = [rank.gpu, str(row.get("device", ""))]
        row["device"] = text("; ".join(filter(None, known)), 120)
    if rank.memory is not None:
        row["memory"] = bytes_text(rank.memory)
    if rank.cpu is not None:
        row["cpu"] = text(f"{rank.cpu:.0%}", 12)
    if rank.gpu_memory:
        row["gpu_memory"] = bytes_text(rank.gpu_memory)
    left = state == "aborted" and rank.state == "busy"
    died = state == "dead" and (group is None or group.oldest is None)
    if rank.line and (mood == "busy" or left or died):
        # It computes, also after its group was aborted, or did when it died: where it
        # last issued an op is of no interest now.
        row["line"] = text(rank.line, 80)
        if rank.line_for is not None:
            row["at"] = round(now - (age or 0.0) - rank.line_for, 2)
    since = _since(rank, group, now - (age or 0.0))
    if since is not None:
        row["since"] = round(since, 2)
        oldest = None if group is None else group.oldest
        limit = None if oldest is None else oldest.timeout
        if limit is not None and limit > 0:
            row["limit"] = limit
    return row


def as_aborted(new: Cells, old: Cells, now: float) -> Cells:
    """Return the row `new` of an aborted group with what `old`, before it, showed.

    Of ops that failed, the first one and its arrays are in no status any more: one that
    was in flight when the abort came is kept. A rank that computes shows that, if it
    does for longer than a cell takes to fail.
    """
    if new["state"] != "aborted":
        return new
    if "state" not in old or old.get("generation") != new.get("generation"):
        return {**new, "ended": now - LEAVES}
    ended = float(old.get("ended", now))
    gone = _OF_OP if now - ended >= LEAVES else (*_OF_OP, *_OF_CELL)
    seen = old["mood"] == "working" or "failed" in old
    kept = {key: new[key] for key in _OF_OP if key in new}
    if seen:
        kept = {key: old[key] for key in _OF_OP if key in old}
        kept["failed"] = 1
    found = {key: value for key, value in new.items() if key not in gone}
    if "at" in found:
        kept["line"] = new["line"]
    return {**found, **kept, "ended": ended}


#: The cells that an abort leaves as they were; `failed`: an op was in flight.
_OF_OP = ("op", "seq", "line", "size", "dtype", "shape", "failed")
#: What a rank shows that goes on in its cell, `LEAVES` seconds after the abort.
_OF_CELL = ("cell", "at", "since")
LEAVES = 1.0


def _state(rank: RankStatus, group: GroupStatus | None) -> tuple[str, str]:
    if not rank.alive:
        return "dead", "error"
    if rank.state == "unreachable":
        return "no answer", "error"
    if rank.reason:
        return "unreadable", "warning"
    if group is not None and group.state == "aborted":
        return "aborted", "error"
    if group is not None and group.oldest is not None:
        # Whether a backend reports a start is no difference to who waits.
        return "in flight", "working"
    if rank.state == "busy":
        # A script has no cells.
        return "running" if rank.cell is None else f"in cell {rank.cell}", "busy"
    if (rank.heartbeat_age or 0.0) > SILENT:
        return "silent", "warning"
    return text(rank.state, 16), "calm"


def _since(
    rank: RankStatus, group: GroupStatus | None, reported_at: float
) -> float | None:
    """Return when the op in flight or the cell began, by a status of `reported_at`."""
    if not rank.alive:
        return None
    if group is not None and group.oldest is not None:
        elapsed = group.oldest.elapsed
    elif group is not None and group.state == "aborted" and rank.state != "busy":
        return None
    else:
        elapsed = rank.busy_for
    return None if elapsed is None else reported_at - elapsed


def _fill(row: Cells, group: GroupStatus) -> None:
    row["generation"] = group.generation
    row["device"] = text(_device(group), 60)
    row["queue"] = group.in_flight
    if group.issued is not None:
        row["issued"] = group.issued
    op = group.oldest or group.completed
    if group.state == "aborted":
        op = group.oldest or group.started or group.completed
    if op is not None:
        # A status from another process may have any number.
        peer = -1 if op.peer is None else op.peer
        others = group.ranks[peer : peer + 1] if peer >= 0 else ()
        row["op"] = text(op_text(op.op, others, op.tag), 60)
        if op.seq is not None:
            row["seq"] = f"#{op.seq}"
        if op.source:
            row["line"] = text(op.source, 80)
        _measure(row, op)
    done = group.completed
    if done is not None:
        _speed(row, done, len(group.ranks))


def _measure(row: Cells, op: OpStatus) -> None:
    if op.nbytes is not None:
        row["size"] = bytes_text(op.nbytes)
    if op.dtypes:
        row["dtype"] = text(op.dtypes[0], 16)
    if op.sizes:
        row["shape"] = text("×".join(map(str, op.sizes[0][:8])) or "scalar", 60)


def _speed(row: Cells, done: OpStatus, ranks: int) -> None:
    seconds, size = done.duration, done.nbytes
    if seconds is None or seconds < 0:
        # The clock was set back.
        return
    row["last"] = duration_text(seconds)
    if size is None or not seconds:
        return
    row["algbw"] = bandwidth_text(algbw(size, seconds))
    row["busbw"] = bandwidth_text(busbw(done.op, size, seconds, ranks))


def _device(group: GroupStatus) -> str:
    """Return ``cpu:tcp`` for a device in use, ``cpu`` for one not used yet."""
    shown: list[tuple[bool, str]] = []
    for device, backend in group.devices.items():
        idle = backend.endswith(NOT_BUILT)
        shown.append((idle, device if idle else f"{device}:{backend}"))
    shown.sort(key=lambda one: one[0])
    return ", ".join(name for _, name in shown)
