"""The actions behind the board's buttons, each on a thread of its own.

A click may arrive while a cell blocks the main thread, on the thread that serves
messages then. The call returns at once; a message with the outcome follows.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rankscope.backends.observe.verdicts import Verdict
from rankscope.backends.rank_sets import name_ranks
from rankscope.backends.thread_start import start_thread
from rankscope.engines import ClusterError
from rankscope.engines.status import name_groups

from ..profile_report import ProfileReport
from ..stack_text import stack_text
from .group import Group
from .model import BoardModel, Message
from .timeline import timeline

if TYPE_CHECKING:
    from rankscope.engines import Cluster, Job

__all__ = ["BoardActions"]

_log = logging.getLogger(__name__)

#: Limits of the timeline: records of one rank at most, of all ranks together, and
#: the records of one rank that are shown however many ranks there are.
MOST, IN_ALL, LEAST = 200, 12_800, 20

#: Seconds of a flame graph at most, and characters of stacks: both go to every page.
LONGEST, STACKS = 60, 200_000
TRUNCATED = "(the stacks are longer: `rankscope profile` in a terminal prints all)"

#: The author of an abort, as the errors on the ranks show it.
BY = "the board"

_LINE = re.compile(r"cell (\d+) line (\d+)")


class BoardActions:
    """Executes the requests of a page and sends it the outcome.

    `diagnose` finds the verdicts for the button Diagnose; ``None`` where there is no
    button. `send` sends a message to every page. `on_done` is called after a group was
    aborted or rebuilt, or ranks were restarted. ``source_line(cell, line)`` returns the
    source of a line. `by` is the author of an abort.
    """

    def __init__(
        self,
        cluster: Cluster | Job,
        *,
        diagnose: Callable[[], Sequence[Verdict]] | None,
        send: Callable[[Message], None],
        get_model: Callable[[], BoardModel],
        show_verdicts: Callable[[Sequence[Verdict]], None],
        on_done: Callable[[], None],
        source_line: Callable[[int, int], str],
        by: str = BY,
    ) -> None:
        self._cluster = cluster
        self._find_verdicts = diagnose
        self._send = send
        self._get_model = get_model
        self._show_verdicts = show_verdicts
        self._on_done = on_done
        self._source_line = source_line
        self._by = by
        # Rank → its last records, and by how much its clock is ahead.
        self._dumps: dict[int, Mapping[str, Any]] = {}
        self._offsets_ns: dict[int, int] = {}
        self._handlers: dict[str, Callable[[Message], Message]] = {
            "abort": self._abort,
            "rebuild": self._rebuild,
            "restart": self._restart,
            "diagnose": self._diagnose,
            "dismiss": self._dismiss,
            "profile": self._profile,
            "records": self._records,
            "trace": self._trace,
            "source": self._source_text,
        }

    def start(self, request: Message) -> None:
        """Execute `request` on a new thread; an unknown request gets an error."""
        start_thread("board-action", self._run, request)

    def _run(self, request: Message) -> None:
        handler = self._handlers.get(str(request.get("do")))
        try:
            if handler is None:
                raise ValueError(f"the board cannot do {request.get('do')!r}")
            answer = {"ok": True, **handler(request)}
        except (ClusterError, TimeoutError, ValueError) as error:
            answer = {"ok": False, "text": str(error)}
        except Exception as error:  # noqa: BLE001
            # No caller waits for this thread: the error is for the page.
            _log.exception("the board could not do %s", request.get("do"))
            answer = {"ok": False, "text": f"{type(error).__name__}: {error}"}
        self._send({"type": "did", "id": str(request.get("id")), **answer})

    # -- groups -------------------------------------------------------------

    def _groups(self, request: Message) -> list[Group]:
        """Return the groups that a request names by the ids of their tabs."""
        wanted = request.get("groups") or ()
        found = [
            group
            for group in self._get_model().groups
            if group.id in wanted and group.ranks
        ]
        if not found or len(found) < len(wanted):
            raise ValueError("a group does not exist any more")
        return found

    def _abort(self, request: Message) -> Message:
        groups = self._groups(request)
        alive = {
            rank
            for group in groups
            for rank, row in group.base.items()
            if row["state"] != "dead"
        }
        # What the page shows; without it the cluster finds out.
        verdicts = self._get_model().verdicts or None
        keys = [group.key for group in groups]
        self._cluster.abort(
            keys,
            f"abort requested from {self._by}",
            sorted(alive),
            by=self._by,
            verdicts=verdicts,
        )
        self._on_done()
        told = f"{name_groups(group.name for group in groups)} aborted"
        if "rebuild" in self._get_model().head["refused"]:
            told += "; the script's ops end with an error that says why"
        return {"text": " ".join(_listed([told]))}

    def _rebuild(self, request: Message) -> Message:
        groups = self._groups(request)
        # An abort ends the programs of ranks anywhere: other groups may be out of step.
        uneven = [one.key for one in self._get_model().groups if one.uneven]
        keys = dict.fromkeys([*(group.key for group in groups), *uneven])
        stale = self._cluster.rebuild(list(keys))
        self._on_done()
        named = name_groups(key.name for key in keys)
        return {"text": " ".join(_listed([f"{named} rebuilt", *stale]))}

    def _restart(self, request: Message) -> Message:
        """Give the dead and frozen ranks fresh engines, then rebuild all groups."""
        head = self._get_model().head
        dead = sorted({*head.get("dead", []), *head.get("frozen", [])})
        if not dead:
            return self._rebuild(request)
        self._cluster.restart(dead)
        stale = self._cluster.rebuild()
        self._on_done()
        lost = "its variables are" if len(dead) == 1 else "their variables are"
        text = (
            f"{name_ranks(dead).capitalize()} restarted, {lost} gone; groups rebuilt."
        )
        return {"text": " ".join([text, *_listed(stale)])}

    def _diagnose(self, request: Message) -> Message:
        if self._find_verdicts is None:
            raise ValueError("this board was made without a diagnosis")
        before = list(map(_essence, self._get_model().verdicts))
        verdicts = self._find_verdicts()
        self._show_verdicts(verdicts)
        if not verdicts:
            return {"text": "Nothing is wrong: no op is stuck, every rank answers."}
        faults = dict.fromkeys(verdict.fault.value for verdict in verdicts)
        text = f"Diagnosis: {', '.join(faults)}"
        if list(map(_essence, verdicts)) == before:
            text += f", as before: asked again at {time.strftime('%H:%M:%S')}"
        return {"text": f"{text}."}

    def _dismiss(self, request: Message) -> Message:
        """Forget the hangs that are over."""
        for group in self._get_model().groups:
            if group.last_hang is not None:
                group.hang = None
        self._on_done()
        return {}

    # -- where the ranks are ------------------------------------------------

    def _profile(self, request: Message) -> Message:
        """Return the stacks of ranks now, or a flame graph of some seconds of all."""
        seconds = request.get("seconds", 0)
        if type(seconds) not in (int, float) or not 0 <= seconds <= LONGEST:
            raise ValueError(
                f"the board cannot sample for {seconds!r} s: expected 0, for the "
                f"stacks now, to {LONGEST}"
            )
        if seconds:
            report = ProfileReport(self._cluster.sample(seconds))
            return {"title": "Where the ranks spent their time", "page": report.html()}
        found = stack_text(self._cluster.stacks(request.get("ranks")))
        if len(found) > STACKS:
            found = f"{found[:STACKS]}…\n\n{TRUNCATED}"
        when = time.strftime("%H:%M:%S")
        return {"title": f"Where the ranks were at {when}", "stacks": found}

    # -- timeline -----------------------------------------------------------

    def _records(self, request: Message) -> Message:
        model = self._get_model()
        last = max(LEAST, min(MOST, IN_ALL // max(1, len(model.ranks))))
        records = self._cluster.flight_records(last=last)
        # What a rank did before it died is known from the last time.
        self._dumps = {**self._dumps, **records.dumps}
        self._offsets_ns = {**self._offsets_ns, **records.offsets_ns}
        hosts = {rank: one.host for rank, one in model.ranks.items()}
        generations = {group.key: group.generation for group in model.groups}
        now = time.time_ns()
        lanes = timeline(self._dumps, self._offsets_ns, now, last, hosts, generations)
        self._send({"type": "timeline", "now": time.monotonic(), **lanes})
        return {}

    def _trace(self, request: Message) -> Message:
        records = self._cluster.flight_records()
        trace = json.dumps(records.chrome_trace(), separators=(",", ":"))
        when = time.strftime("%Y%m%d-%H%M%S")
        return {"name": f"rankscope-{when}.json", "json": trace}

    def _source_text(self, request: Message) -> Message:
        found = _LINE.fullmatch(str(request.get("line")))
        if found is None:
            return {"text": ""}
        return {"text": self._source_line(int(found[1]), int(found[2]))}


def _essence(verdict: Verdict) -> tuple[object, ...]:
    return verdict.fault, verdict.culprits, verdict.group, verdict.seq


def _listed(sentences: Sequence[str]) -> list[str]:
    """Return `sentences` as they follow each other in a text."""
    return [f"{one[:1].upper()}{one[1:]}." for one in sentences]
