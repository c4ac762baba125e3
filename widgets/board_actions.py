"""What the board's buttons do, each on a thread of its own.

A click may come in while the main thread is blocked in a cell, on whatever
thread serves messages then; it is answered at once, and its outcome follows.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rankscope.backends.diagnosis import Verdict
from rankscope.engines import ClusterError, Rings

from .board_model import BoardModel, Message
from .ranks import name_ranks
from .timeline_model import timeline

__all__ = ["BoardActions", "Commanded"]

_log = logging.getLogger(__name__)

#: Records that the timeline shows of each rank at most, of all of them together,
#: and of each however many there are.
MOST, IN_ALL, LEAST = 200, 12_800, 20

#: How the abort says who did it.
REASON = "aborted from the board"

_LINE = re.compile(r"cell (\d+) line (\d+)")


class Commanded(Protocol):
    """What the buttons need of a cluster."""

    def abort(
        self, group: str | None = None, reason: str = "", ranks: Any = None
    ) -> dict[int, list[str]]: ...

    def rebuild(self, group: str | None = None) -> None: ...

    def restart(self, ranks: Any = None) -> None: ...

    def rings(self, ranks: Any = None, *, last: int | None = None) -> Rings: ...


class BoardActions:
    """Does what a page asks for and tells it what became of it.

    `say` sends a message to the pages, `find` gives the state of the board,
    `judge` gets what a diagnosis finds, `acted` is called when ranks were acted
    upon, and `source` returns a line of a cell of the notebook, by their numbers.
    """

    def __init__(
        self,
        cluster: Commanded,
        diagnose: Callable[[], Sequence[Verdict]] | None,
        say: Callable[[Message], None],
        find: Callable[[], BoardModel],
        judge: Callable[[Sequence[Verdict]], None],
        acted: Callable[[], None],
        source: Callable[[int, int], str],
    ) -> None:
        self._cluster = cluster
        self._diagnosis = diagnose
        self._say = say
        self._find = find
        self._judge = judge
        self._acted = acted
        self._source = source
        self._deeds: dict[str, Callable[[Message], Message]] = {
            "abort": self._abort,
            "rebuild": self._rebuild,
            "restart": self._restart,
            "diagnose": self._diagnose,
            "records": self._records,
            "trace": self._trace,
            "source": self._line,
        }

    def start(self, request: Message) -> None:
        """Begin to do what `request` asks for; anything unknown is refused."""
        threading.Thread(
            target=self._do, args=(request,), name="rankscope-board-action", daemon=True
        ).start()

    def _do(self, request: Message) -> None:
        deed = self._deeds.get(str(request.get("do")))
        try:
            if deed is None:
                raise ValueError(f"the board cannot do {request.get('do')!r}")
            answer = {"ok": True, **deed(request)}
        except (ClusterError, TimeoutError, ValueError) as error:
            answer = {"ok": False, "text": str(error)}
        except Exception as error:  # noqa: BLE001
            # Nobody waits for this thread: the page is where it can be told.
            _log.exception("the board could not do %s", request.get("do"))
            answer = {"ok": False, "text": f"{type(error).__name__}: {error}"}
        self._say({"type": "did", "id": str(request.get("id")), **answer})

    # -- groups -------------------------------------------------------------

    def _group(self, request: Message) -> tuple[str | None, list[int] | None]:
        """The name and the living ranks of the group that a request is about."""
        wanted = request.get("group")
        model = self._find()
        for group in model.groups:
            if group.id == wanted and group.ranks:
                alive = [r for r, row in group.base.items() if row["state"] != "dead"]
                return group.name, sorted(alive)
        raise ValueError("that group is not there any more")

    def _abort(self, request: Message) -> Message:
        name, ranks = self._group(request)
        self._cluster.abort(name, REASON, ranks)
        self._acted()
        return {"text": f"Group {name!r} aborted; Rebuild makes it usable again."}

    def _rebuild(self, request: Message) -> Message:
        name, _ = self._group(request)
        self._cluster.rebuild(name)
        self._acted()
        return {"text": f"Group {name!r} rebuilt."}

    def _restart(self, request: Message) -> Message:
        """Give the dead ranks fresh engines, then rebuild all their groups."""
        dead = self._find().head.get("dead", [])
        if not dead:
            return self._rebuild(request)
        self._cluster.restart(dead)
        self._cluster.rebuild()
        self._acted()
        lost = "its variables are" if len(dead) == 1 else "their variables are"
        text = (
            f"{name_ranks(dead).capitalize()} restarted, {lost} gone; groups rebuilt."
        )
        return {"text": text}

    def _diagnose(self, request: Message) -> Message:
        if self._diagnosis is None:
            raise ValueError("this board was made without a diagnosis")
        verdicts = self._diagnosis()
        self._judge(verdicts)
        if not verdicts:
            return {"text": "Nothing is wrong: no op is stuck, every rank answers."}
        faults = dict.fromkeys(verdict.fault.value for verdict in verdicts)
        return {"text": f"Diagnosis: {', '.join(faults)}."}

    # -- timeline -----------------------------------------------------------

    def _records(self, request: Message) -> Message:
        model = self._find()
        last = max(LEAST, min(MOST, IN_ALL // max(1, len(model.ranks))))
        rings = self._cluster.rings(last=last)
        lanes = timeline(rings.rings, rings.offsets_ns, time.time_ns(), last)
        self._say({"type": "timeline", "now": time.monotonic(), **lanes})
        return {}

    def _trace(self, request: Message) -> Message:
        rings = self._cluster.rings()
        trace = json.dumps(rings.chrome_trace(), separators=(",", ":"))
        when = time.strftime("%Y%m%d-%H%M%S")
        return {"name": f"rankscope-{when}.json", "json": trace}

    def _line(self, request: Message) -> Message:
        found = _LINE.fullmatch(str(request.get("line")))
        if found is None:
            return {"text": ""}
        return {"text": self._source(int(found[1]), int(found[2]))}
