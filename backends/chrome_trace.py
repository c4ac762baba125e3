"""What all ranks did, on one clock, as a Chrome trace: for Perfetto.

The result is the JSON object that https://ui.perfetto.dev and chrome://tracing
open (the "Trace Event Format"). Pure: rings and clock samples come from
whoever can reach the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

__all__ = ["chrome_trace", "estimate_offset"]

_BAD_ENDS = ("failed", "timed_out", "aborted")

# The end of what has not ended: a lane is taken until the trace ends.
_NEVER = 1 << 63


def estimate_offset(samples: Iterable[tuple[int, int, int]]) -> int:
    """Return how many ns a remote clock is ahead of the local one.

    A sample is ``(t0, remote, t1)``, all in ns: a request left at the local
    time `t0`, was answered at the remote time `remote`, and the answer came
    at the local time `t1`. Of all samples the one with the shortest way there
    and back is believed, as in NTP's clock filter (RFC 5905, section 10), and
    half of that time each way is assumed: the result is off by no more than
    half of it. Raises `ValueError` if there is no sample or one ends before
    it begins (the local clock was set back).
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
    """What is drawn as one bar: an op, or ops that one backend call did."""

    lane: str
    start: int
    end: int
    records: list[Mapping[str, Any]]


def chrome_trace(
    dumps: Mapping[int, Sequence[Mapping[str, Any]]], offsets_ns: Mapping[int, int]
) -> dict[str, Any]:
    """Return the Chrome trace of all ranks' flight recorders, on one clock.

    `dumps` maps ranks to their records (`Record.as_dict`, oldest first),
    `offsets_ns` to the ns their clocks are ahead (:func:`estimate_offset`);
    a rank that is not in it has the reference clock.

    One process per rank, in it one lane per group and one for the group's
    sends and receives. An op reaches from its start to its end; one that is
    in flight is left open. What waits to start, or ended before it did, is in
    a lane ``… queued``; how long others waited is in their arguments. Ops that
    overlap without one holding the other take further lanes. A failure, a
    timeout or an abort is an instant event with its error.

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
    events: list[dict[str, Any]] = []
    for rank in sorted(dumps):
        events += _process(rank, dumps[rank], origin + offsets_ns.get(rank, 0))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "clock_origin_ns": origin,
            "clock_offsets_ns": {str(rank): offsets_ns.get(rank, 0) for rank in dumps},
        },
    }


def _process(
    rank: int, records: Sequence[Mapping[str, Any]], origin: int
) -> Iterator[dict[str, Any]]:
    """The events of one rank, whose clock was at `origin` at time 0."""
    yield _name("process_name", rank, 0, f"rank {rank}")
    yield {**_name("process_sort_index", rank, 0, ""), "args": {"sort_index": rank}}
    spans = [_span(list(run)) for _, run in groupby(records, _one_call)]
    lanes = sorted({span.lane for span in spans})
    thread = 0
    for lane in lanes:
        tracks = _nest([span for span in spans if span.lane == lane])
        for number, track in enumerate(tracks, 1):
            thread += 1
            label = lane if number == 1 else f"{lane} ({number})"
            yield _name("thread_name", rank, thread, label)
            sort = {"args": {"sort_index": thread}}
            yield {**_name("thread_sort_index", rank, thread, ""), **sort}
            for span in track:
                yield from _events(span, rank, thread, origin)


def _name(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}}


def _seq(record: Mapping[str, Any]) -> int:
    return record["p2p_seq_id"] if record["is_p2p"] else record["collective_seq_id"]


def _one_call(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for the ops of a batch that one backend call did, together."""
    return (
        record["group"],
        record["generation"],
        record["op"],
        _seq(record),
        record["time_started_ns"],
        record["time_ended_ns"],
    )


def _span(records: list[Mapping[str, Any]]) -> _Span:
    first = records[0]
    lane = first["group"] + (" p2p" if first["is_p2p"] else "")
    start, end = first["time_started_ns"], first["time_ended_ns"]
    if not start:
        start = first["time_created_ns"]
        if first["state"] != "completed":
            lane += " queued"
    # A clock that is set back makes no bar of negative length.
    return _Span(lane, start, max(start, end) if end else _NEVER, records)


def _nest(spans: Iterable[_Span]) -> list[list[_Span]]:
    """Distribute spans over tracks, in each of which they nest or follow.

    Bars of one track that overlap otherwise are an error in the format.
    """
    tracks: list[list[_Span]] = []
    open_until: list[list[int]] = []  # the ends of what is open in each track
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
        "name": f"{count}{first['op']} #{_seq(first)}",
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
