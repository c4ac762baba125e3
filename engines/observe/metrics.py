"""The metrics of a cluster or a job, for Prometheus: what a scrape finds.

Nothing is measured for them. While they are served, the ranks send their status every
`STATUS_INTERVAL` seconds at most; their newest records are fetched when somebody
scrapes.
Series are bounded: of more than `SERIES` pairs of group and rank, the groups that come
last are left out, and ``rankscope_groups_left_out`` says how many.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rankscope.backends.groups.key import GroupKey
from rankscope.backends.groups.summary import since
from rankscope.backends.observe.lateness import Lateness
from rankscope.backends.observe.verdicts import Fault, Verdict
from rankscope.backends.rank_sets import format_ranks
from rankscope.backends.work.op_type import OpType, busbw

from ..errors import ClusterError
from ..status import ClusterStatus, GroupStatus, RankStatus, Summary
from .diagnosing import STATUS_INTERVAL, StallWatch
from .lateness import take
from .observed_ranks import FRESH, ObservedRanks
from .spans import Spans

__all__ = ["ADDRESS", "SERIES", "ClusterCollector", "Events", "MetricsServer"]

T = TypeVar("T")
_Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]
_Row = tuple[str, str, str, Callable[[T], float | None]]

#: Where the metrics are served: programs of this host can read them, no others.
ADDRESS = "127.0.0.1"
#: Pairs of group and rank of which there are series.
SERIES = 4096
#: Seconds that a scrape waits for ranks whose last status is old.
ANSWER = 0.8
#: Records of a rank that a scrape asks for: what is judged is kept until the next.
LAST = 40
#: Seconds without a further collective after which a rank is behind others: the numbers
#: of ranks in step differ, too, since their statuses come one by one, and each may be
#: so old as no scrape asks for a newer one.
STANDSTILL = 1.0 + FRESH
#: The longest label.
LONGEST = 80

_STATES = ("idle", "busy", "unreachable", "dead")
_PER_RANK = ("group", "rank")
_PER_OP = (*_PER_RANK, "op")


class Events:
    """Counts what happens between two scrapes: stalls, aborts and rebuilds."""

    def __init__(self) -> None:
        #: Fault → how many ops hung by it.
        self.stalls = Counter[str]()
        #: Group → how many of its generations were aborted, and made anew.
        self.aborts = Counter[GroupKey]()
        self.rebuilds = Counter[GroupKey]()
        self._hung: set[tuple[GroupKey, int]] = set()
        # Group → its newest generation.
        self._newest: dict[GroupKey, int] = {}
        # Rank and group → what the rank has reported last, and the sum of its aborts:
        # a fresh process begins with 0.
        self._reported = Counter[tuple[int, GroupKey]]()
        self._summed = Counter[tuple[int, GroupKey]]()
        # The same → its last collective, and since when it is that.
        self._issued: dict[tuple[int, GroupKey], tuple[int | None, float]] = {}

    def note_status(self, rank: int, summary: Summary) -> None:
        for group in summary.groups:
            key, generation = group.key, group.generation
            newest = self._newest.setdefault(key, generation)
            if generation > newest:
                self.rebuilds[key] += generation - newest
                self._newest[key] = generation
            place = rank, key
            self._summed[place] += since(self._reported[place], group.aborts)
            self._reported[place] = group.aborts
            if self._issued.get(place, (None,))[0] != group.issued:
                self._issued[place] = group.issued, time.monotonic()
            self.aborts[key] = max(self.aborts[key], self._summed[place])

    def stands_still(self, rank: int, key: GroupKey) -> bool:
        """Return whether the rank has issued no further collective for a while."""
        _, seen = self._issued.get((rank, key), (None, -math.inf))
        return time.monotonic() - seen >= STANDSTILL

    def note_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        """Take in the verdicts that hold now; each op that hangs counts once."""
        now = {(one.group, one.seq) for one in verdicts}
        for one in verdicts:
            if (one.group, one.seq) not in self._hung:
                self.stalls[one.fault.value] += 1
        self._hung = now


class ClusterCollector(Collector):
    """What a scrape of `cluster` finds; `events` is what has happened before."""

    def __init__(self, cluster: ObservedRanks, events: Events) -> None:
        self._cluster, self._events = cluster, events
        self._lateness = Lateness()
        # Two programs may scrape at the same time.
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        with self._lock:
            status = self._cluster.status(timeout=ANSWER)
            if status.state == "running":
                # One that is shut down just now has its last status.
                with suppress(ClusterError):
                    take(self._cluster, self._lateness, last=LAST, timeout=ANSWER)
            yield from _of_ranks(status)
            labels = _labels(status.group_keys)
            left = GaugeMetricFamily(
                "rankscope_groups_left_out", "Groups of which there are no series."
            )
            left.add_metric([], len(status.group_keys) - len(labels))
            yield left
            yield from _of_groups(status, self._lateness, self._events, labels)
            yield from _of_events(self._events, labels)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the registry asks for it at once, and a scrape takes time."""
        return []


class MetricsServer:
    """Serves the metrics of `cluster` at a port of this host, until `close`."""

    def __init__(
        self, cluster: ObservedRanks, port: int, spans: Spans | None = None
    ) -> None:
        events, registry = Events(), CollectorRegistry()
        registry.register(ClusterCollector(cluster, events))
        try:
            self._server, self._thread = start_http_server(port, ADDRESS, registry)
        except OSError as error:
            raise ClusterError(
                f"port {port} of {ADDRESS}: {error.strerror}; another one, 0 for a "
                "free one, is chosen by --metrics PORT or RANKSCOPE_METRICS, of "
                "rankscope metrics by -p PORT"
            ) from error
        #: The port, which the system has chosen if it was to be 0.
        self.port = int(self._server.server_address[1])
        self._spans = spans

        def note(verdicts: Sequence[Verdict]) -> None:
            events.note_verdicts(verdicts)
            if spans is not None:
                spans.note_verdicts(verdicts)

        self._watch = StallWatch(cluster, note, tells=False)
        self._cancel = cluster.subscribe(events.note_status)
        cluster.follow(STATUS_INTERVAL)

    @property
    def address(self) -> str:
        """What a scraper is told."""
        return f"http://{ADDRESS}:{self.port}/metrics"

    def close(self) -> None:
        """Serve no more."""
        self._watch.close()
        self._cancel()
        if self._spans is not None:
            self._spans.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _family(
    kind: _Kind,
    name: str,
    about: str,
    labels: Sequence[str],
    values: Iterable[tuple[Sequence[str], float | None]],
    unit: str = "",
) -> Metric:
    """Return a family of the values that are known, each with its labels."""
    family = kind(f"rankscope_{name}", about, labels=labels, unit=unit)
    for names, value in values:
        if value is not None:
            family.add_metric(names, value)
    return family


def _of_ranks(status: ClusterStatus) -> Iterator[Metric]:
    states = Counter(one.state for one in status.ranks)
    counts = (([state], states[state]) for state in _STATES)
    yield _family(GaugeMetricFamily, "ranks", "Ranks by state.", ["state"], counts)
    reported = [([str(one.rank)], one) for one in status.ranks if one.alive]
    for name, unit, about, value_of in _RANK_ROWS:
        values = ((names, value_of(one)) for names, one in reported)
        yield _family(GaugeMetricFamily, name, about, ["rank"], values, unit)


def _of_groups(
    status: ClusterStatus,
    lateness: Lateness,
    events: Events,
    labels: dict[GroupKey, str],
) -> Iterator[Metric]:
    reported = [
        ([labels[group.key], str(one.rank)], group)
        for one in status.ranks
        for group in one.groups
        if group.key in labels
    ]
    # They begin anew where the group is rebuilt. Of what another version of Rankscope
    # reports, only names that are known.
    moved = [
        ([*names, op.value], *group.moved[op.value])
        for names, group in reported
        for op in OpType
        if op.value in group.moved
    ]
    ops = ((names, count) for names, count, _ in moved)
    yield _family(CounterMetricFamily, "ops", "Ops completed, by kind.", _PER_OP, ops)
    nbytes = ((names, size) for names, _, size in moved)
    about = "Bytes of completed ops."
    yield _family(CounterMetricFamily, "op", about, _PER_OP, nbytes, "bytes")
    for kind, rows in _GROUP_ROWS.items():
        for name, unit, about, value_of in rows:
            values = ((names, value_of(one)) for names, one in reported)
            yield _family(kind, name, about, _PER_RANK, values, unit)
    # Each generation counts anew: a rank that tells of an earlier one is not compared.
    front: dict[GroupKey, tuple[int, int]] = {}
    for _, group in reported:
        ahead = group.generation, group.issued or 0
        front[group.key] = max(front.get(group.key, ahead), ahead)
    lags = (
        (
            names,
            front[one.key][1] - one.issued
            if events.stands_still(int(names[1]), one.key)
            else 0,
        )
        for names, one in reported
        if one.issued is not None and one.generation == front[one.key][0]
    )
    about = "Collectives behind the rank that is ahead, once it stands still."
    yield _family(GaugeMetricFamily, "lag", about, _PER_RANK, lags)
    ranks = [
        ([labels[found.key], str(rank)], one)
        for found in lateness.groups()
        if found.key in labels
        for rank, one in found.ranks.items()
    ]
    late = ((names, one.late / one.of if one.of else 0.0) for names, one in ranks)
    about = "Part of its last ops that the rank entered after the others."
    yield _family(GaugeMetricFamily, "late_ratio", about, _PER_RANK, late)
    waits = ((names, one.waits) for names, one in ranks)
    about = "Part of its time that the rank waited for late ones."
    yield _family(GaugeMetricFamily, "waiting_ratio", about, _PER_RANK, waits)


def _of_events(events: Events, labels: dict[GroupKey, str]) -> Iterator[Metric]:
    # Zeros, too: Prometheus sees no increase in a series that begins with 1.
    stalls = (([fault.value], events.stalls[fault.value]) for fault in Fault)
    yield _family(CounterMetricFamily, "stalls", "Ops that hung.", ["fault"], stalls)
    for name, about, counts in (
        ("aborts", "Aborts of the group.", events.aborts),
        ("rebuilds", "Rebuilds of the group.", events.rebuilds),
    ):
        of_groups = (([label], counts[key]) for key, label in labels.items())
        yield _family(CounterMetricFamily, name, about, ["group"], of_groups)


def _labels(keys: Sequence[GroupKey]) -> dict[GroupKey, str]:
    """Return what each group is called: its name, with its ranks if others have it.

    No two have one label: Prometheus would refuse the whole scrape. Groups are left out
    from that on whose ranks are too many.
    """
    names = Counter(key.name for key in keys)
    labels: dict[GroupKey, str] = {}
    taken, pairs = set[str](), 0
    for number, key in enumerate(keys):
        pairs += len(key.ranks)
        if pairs > SERIES:
            break
        label = key.name
        if names[label] > 1:
            label = f"{label[:LONGEST]} ({format_ranks(key.ranks)})"
        label = label[: 2 * LONGEST]
        if label in taken:
            label = f"{label[:LONGEST]} #{number}"
        taken.add(label)
        labels[key] = label
    return labels


def _is_aborted(group: GroupStatus) -> float:
    return float(group.state == "aborted")


def _age(group: GroupStatus) -> float | None:
    return 0.0 if group.oldest is None else group.oldest.elapsed


def _duration(group: GroupStatus) -> float | None:
    return None if group.completed is None else group.completed.duration


def _speed(group: GroupStatus) -> float | None:
    done = group.completed
    if done is None or not done.duration or done.duration < 0 or done.nbytes is None:
        return None
    return 1e9 * busbw(done.op, done.nbytes, done.duration, len(group.ranks))


# A name, a unit, what it is, and the value for one that reports.
_RANK_ROWS: tuple[_Row[RankStatus], ...] = (
    ("cpu_cores", "", "Cores kept busy.", lambda one: one.cpu),
    ("memory", "bytes", "Resident memory.", lambda one: one.memory),
    ("gpu_memory", "bytes", "Memory held on the GPU.", lambda one: one.gpu_memory),
    ("silence", "seconds", "Since the last status.", lambda one: one.heartbeat_age),
)
_OP_SECONDS = "From start to end of all ops; ops at a time add up."
_BLOCKED = "For which threads waited for ops."
_BUS = "Of the last op on the bus; that the rank waited for late ones is part of it."
_GROUP_ROWS: dict[_Kind, tuple[_Row[GroupStatus], ...]] = {
    CounterMetricFamily: (
        ("collectives", "", "Collectives issued.", lambda one: one.issued),
        ("op", "seconds", _OP_SECONDS, lambda one: one.op_seconds),
        ("blocked", "seconds", _BLOCKED, lambda one: one.blocked_seconds),
    ),
    GaugeMetricFamily: (
        ("in_flight", "", "Ops in flight.", lambda one: one.in_flight),
        ("in_flight", "seconds", "Age of the oldest op in flight.", _age),
        ("last_op", "seconds", "Duration of the last op.", _duration),
        ("bus_bandwidth", "bytes_per_second", _BUS, _speed),
        ("aborted", "", "Whether the group is aborted.", _is_aborted),
    ),
}
