"""Chrome trace of the ops of all ranks, on one clock, for Perfetto.

The result is the JSON object that https://ui.perfetto.dev and chrome://tracing
open (the "Trace Event Format"). Pure functions: the caller collects records and clock
samples from the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .records import backend_calls, sequence_number

__all__ = [
    "chrome_trace",
    "estimate_offset",
    "labels_of",
    "rank_events",
    "trace_head",
]

_BAD_ENDS = ("failed", "timed_out", "aborted")

# The end of an op in flight: its bar extends to the end of the trace.
_NEVER = 1 << 63


def estimate_offset(samples: Iterable[tuple[int, int, int]]) -> int:
    """Return how many ns a remote clock is ahead of the local one.

    A sample is ``(t0, remote, t1)``, all in ns: a request was sent at the local
    time `t0`, answered at the remote time `remote`, and its answer was received
    at the local time `t1`. The sample with the shortest round trip is used, as
    in NTP's clock filter (RFC 5905, section 10), and both directions are assumed
    to take half of that round trip, so the error is at most half of it.
    Raises `ValueError` if there is no sample or one ends before it begins (the
    local clock was set back).
    """
    best: tuple[int, int] | None = None
    for t0, remote, t1 in samples:
        if t1 < t0:
            raise ValueError(
                f"estimate_offset: the sample {(t0, remote, t1)} ends "
                f"{t0 - t1} ns before it begins; take new samples"
            )
        if best is None or t1 - t0 < best[0]:
            best = t1 - t0, remote - (t0 + t1) // 2
    if best is None:
        raise ValueError("estimate_offset: no samples; expected at least one")
    return best[1]


class _Span(NamedTuple):
    """One bar of the trace: an op, or the ops that one backend call ran."""

    #: The name of its track, without the number of a further one.
    track: str
    start: int
    end: int
    records: list[Mapping[str, Any]]


def chrome_trace(
    dumps: Mapping[int, Sequence[Mapping[str, Any]]], offsets_ns: Mapping[int, int]
) -> dict[str, Any]:
    """Return the Chrome trace of all ranks' flight recorders, on one clock.

    `dumps` maps each rank to its records (`Record.as_dict`, oldest first), and
    `offsets_ns` maps a rank to the ns its clock is ahead (:func:`estimate_offset`);
    a rank that is not in `offsets_ns` has the reference clock.

    The trace has one process per rank, with one track per group and one track for
    the group's sends and receives, named by the group; by its id where groups share
    a name. The bar of an op extends from its start to its end; an op in flight is left
    open. An op that has not started, or ended
    without a start, is in a track ``… queued``; the arguments of the other ops
    state how long each was queued. Ops that overlap and do not nest take
    further tracks. A failure, a timeout or an abort is an instant event with its
    error.

    ``otherData["clock_origin_ns"]`` is the ``time.time_ns`` of time 0, on the
    reference clock. ``json.dump`` writes the result as it is.
    """
    origin = min(
        (
            record["time_created_ns"] - offsets_ns.get(rank, 0)
            for rank, records in dumps.items()
            for record in records
        ),
        default=0,
    )
    labels = labels_of(
        (record["group_id"], record["group"])
        for records in dumps.values()
        for record in records
    )
    events: list[dict[str, Any]] = []
    for rank in sorted(dumps):
        start = origin + offsets_ns.get(rank, 0)
        events += rank_events(rank, dumps[rank], start, labels)
    offsets = {rank: offsets_ns.get(rank, 0) for rank in dumps}
    return {"traceEvents": events, **trace_head(origin, offsets)}


def trace_head(origin: int, offsets_ns: Mapping[int, int]) -> dict[str, Any]:
    """Return what a trace has beside its events."""
    offsets = {str(rank): offset for rank, offset in offsets_ns.items()}
    other = {"clock_origin_ns": origin, "clock_offsets_ns": offsets}
    return {"displayTimeUnit": "ns", "otherData": other}


def labels_of(groups: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return group id → its name; the id of a group that shares its name."""
    names = dict(groups)
    uses = Counter(names.values())
    return {key: name if uses[name] == 1 else key for key, name in names.items()}


def rank_events(
    rank: int,
    records: Sequence[Mapping[str, Any]],
    origin: int,
    labels: Mapping[str, str],
) -> Iterator[dict[str, Any]]:
    """Yield the events of one rank, whose clock was at `origin` (ns) at time 0."""
    yield _name("process_name", rank, 0, f"rank {rank}")
    yield {**_name("process_sort_index", rank, 0, ""), "args": {"sort_index": rank}}
    spans = [_span(run, labels) for run in backend_calls(records)]
    thread = 0
    for name in sorted({span.track for span in spans}):
        tracks = _nest([span for span in spans if span.track == name])
        for number, track in enumerate(tracks, 1):
            thread += 1
            label = name if number == 1 else f"{name} ({number})"
            yield _name("thread_name", rank, thread, label)
            sort = {"args": {"sort_index": thread}}
            yield {**_name("thread_sort_index", rank, thread, ""), **sort}
            for span in track:
                yield from _events(span, rank, thread, origin)


def _name(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}}


def _span(records: list[Mapping[str, Any]], labels: Mapping[str, str]) -> _Span:
    first = records[0]
    track = labels[first["group_id"]] + (" p2p" if first["is_p2p"] else "")
    start, end = first["time_started_ns"], first["time_ended_ns"]
    if not start:
        start = first["time_created_ns"]
        if first["state"] != "completed":
            track += " queued"
    # A clock that was set back must not cause a bar of negative length.
    return _Span(track, start, max(start, end) if end else _NEVER, records)


def _nest(spans: Iterable[_Span]) -> list[list[_Span]]:
    """Return the spans in tracks, in each of which they nest or do not overlap."""
    tracks: list[list[_Span]] = []
    open_until: list[list[int]] = []  # ends of the open spans of each track
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        for ends in open_until:
            while ends and ends[-1] <= span.start:
                ends.pop()
        fits = (not ends or span.end <= ends[-1] for ends in open_until)
        place = next((i for i, fit in enumerate(fits) if fit), len(tracks))
        if place == len(tracks):
            tracks.append([])
            open_until.append([])
        tracks[place].append(span)
        open_until[place].append(span.end)
    return tracks


def _events(
    span: _Span, rank: int, thread: int, origin: int
) -> Iterator[dict[str, Any]]:
    first = span.records[0]
    count = f"{len(span.records)} coalesced " if len(span.records) > 1 else ""
    event = {
        "name": f"{count}{first['op']} #{sequence_number(first)}",
        "cat": "p2p" if first["is_p2p"] else "collective",
        "pid": rank,
        "tid": thread,
        "ts": (span.start - origin) / 1000,
        "args": _arguments(span),
    }
    if span.end == _NEVER:
        yield {**event, "ph": "B"}
        return
    yield {**event, "ph": "X", "dur": (span.end - span.start) / 1000}
    if first["state"] in _BAD_ENDS:
        yield {
            **event,
            "ph": "i",
            "s": "t",
            "name": f"{first['state'].replace('_', ' ')}: {event['name']}",
            "ts": (span.end - origin) / 1000,
            "args": {"error": first["error"]},
        }


def _arguments(span: _Span) -> dict[str, Any]:
    first = span.records[0]
    begun = first["time_started_ns"] or (0 if span.end == _NEVER else span.end)
    found = {
        "group": first["group"],
        "generation": first["generation"],
        "backend": first["backend"],
        "state": first["state"],
        "collective_seq_id": first["collective_seq_id"],
        "p2p_seq_id": first["p2p_seq_id"],
        "op_id": [record["op_id"] for record in span.records],
        "sizes": [record["sizes"] for record in span.records],
        "dtypes": [record["dtypes"] for record in span.records],
        "peer": first["peer"],
        "source": first["frame"]["source"],
        "timeout_s": first["timeout"],
        "queued_us": (begun - first["time_created_ns"]) / 1000 if begun else None,
        "error": first["error"],
    }
    if len(span.records) == 1:
        for key in ("op_id", "sizes", "dtypes"):
            found[key] = found[key][0]
    return {key: value for key, value in found.items() if value not in (None, "")}
