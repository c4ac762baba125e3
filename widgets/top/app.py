"""TopApp: the board of a cluster or a job in a terminal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message as TextualMessage
from textual.widgets import Footer, Input, Static

from rankscope.backends.printable import printable
from rankscope.backends.thread_start import start_thread
from rankscope.engines import ClusterError

from ..board.arrange import View
from ..board.columns import COLUMNS
from .dialogs import GroupList, Question, Reading
from .table import SHAPES, RankTable
from .theme import THEME

if TYPE_CHECKING:
    from rankscope.engines import Cluster, Job

    from ..board.model import Message
    from .live import Live

__all__ = ["INTERVAL", "TopApp"]

#: Seconds between two updates, as long as nothing else is asked for.
INTERVAL = 1.0

_KEYS = """\
↑ ↓     choose a row (also j k PgUp PgDn Home End, and the mouse)
Enter   the Python stacks of the rank; of equal ranks, a row for each
s       the Python stacks of the ranks of the row
S       the Python stacks of all ranks
v       the whole of what the line at the top says
Tab     the next group (Shift+Tab: the one before)
g       the list of groups
/       filter: ranks (17, 32-39), or a part of a cell (in flight)
< >     sort by the column to the left, to the right (or click a title)
r       the highest first, or the lowest
f       equal ranks in one row, or each in its own
c       only what is at fault
Esc     no filter, and the usual order
d       diagnose now
a       abort what is in flight
b       rebuild what was aborted
q       quit: the ranks go on
"""


class Changed(TextualMessage):
    """There is a new state."""


class Answered(TextualMessage):
    """A request was done; `outcome` is the board's message about it."""

    def __init__(self, outcome: Message) -> None:
        super().__init__()
        self.outcome = outcome


class TopApp(App[str]):
    """Shows a cluster or a job until the user quits.

    ``attach()`` attaches to it, on a thread, while the terminal shows `name` already.
    What it raises is the result of ``run()``, as text.
    """

    TITLE = "rankscope top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #head, #group, #note { text-wrap: nowrap; text-overflow: ellipsis; }
    #head { height: 1; text-style: dim; }
    #banner { height: auto; max-height: 5; }
    #banner.error { color: $error; }
    #banner.warning { color: $warning; }
    #banner.working, #banner.busy { color: $primary; }
    #group { height: 1; margin-top: 1; text-style: bold; }
    #filter { display: none; height: 1; border: none; padding: 0; }
    #filter.shown { display: block; }
    #note { height: 1; text-style: dim; display: none; }
    #note.shown { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "Quit", key_display="q"),
        Binding("question_mark", "help", "Help", key_display="?"),
        # What ends a hang comes first: a narrow terminal cuts the others off.
        Binding("a", "abort", "Abort"),
        Binding("b", "rebuild", "Rebuild"),
        Binding("d", "diagnose", "Diagnose"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("less_than_sign", "sort(-1)", "Sort", key_display="< >"),
        Binding("greater_than_sign", "sort(1)", "sort right", show=False),
        Binding("r", "reverse", "reverse", show=False),
        Binding("g", "groups", "Groups"),
        Binding("tab", "group(1)", "next group", show=False, priority=True),
        Binding("shift+tab", "group(-1)", "group before", show=False, priority=True),
        # Not among the keys at the bottom, for which 80 columns have no room.
        Binding("f", "fold", "fold", show=False),
        Binding("c", "culprits", "culprits", show=False),
        Binding("s", "stacks", "stacks", show=False),
        Binding("S", "stacks(True)", "all stacks", show=False),
        Binding("v", "verdict", "verdict", show=False),
        Binding("ctrl+z", "suspend_process", "suspend", show=False),
        Binding("escape", "plain", "no filter", show=False),
    ]

    def __init__(
        self,
        name: str,
        attach: Callable[[], Cluster | Job],
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Said here, too: NO_COLOR is taken in before there is a theme, and would make
        # the terminal's own colours black on black.
        super().__init__(ansi_color=True)
        self.register_theme(THEME)
        self.theme = THEME.name
        self._get, self._interval, self._clock = attach, interval, clock
        # Not queried: a timer may fire while the app ends.
        self._head = Static(Content(f"{self.TITLE} · {printable(name)}"), id="head")
        self._banner = Static(Content("Attaching…"), id="banner")
        self._about = Static(Content(), id="group")
        self.table = RankTable()
        self._note = Static(Content(), id="note")
        wanted = "filter: 17, 32-39, in flight, node-3"
        self._filter = Input(placeholder=wanted, id="filter", compact=True)
        self._live: Live | None = None
        self._cluster: Cluster | Job | None = None
        self.state: Message | None = None
        self.view = View()
        self._group = ""
        self._asked: set[str] = set()
        # When the ranks were last there.
        self._now = 0.0
        # What the keys at the bottom depend on.
        self._offered: tuple[bool, bool] | None = None

    def compose(self) -> ComposeResult:
        yield from (self._head, self._banner, self._about, self.table)
        yield from (self._note, self._filter, Footer(compact=True))

    def on_mount(self) -> None:
        self.table.focus()
        # After the first screen, which its imports would delay; and on a thread that
        # nobody waits for who leaves meanwhile.
        self.call_after_refresh(start_thread, "attach", self._begin)
        self.set_interval(self._interval, self._update)

    def _begin(self) -> None:
        from rankscope.engines.observe.diagnosing import STATUS_INTERVAL

        from .live import Live

        self.table.least_shown = STATUS_INTERVAL + self._interval
        try:
            self._cluster = cluster = self._get()
            if not self.is_running:
                cluster.close()
                return
            self._live = Live(cluster, self._take, self._answer, self._interval)
        except (ClusterError, TimeoutError, OSError, ValueError) as error:
            # Who has left meanwhile wants to know nothing of it.
            if self.is_running:
                self.call_from_thread(self.exit, str(error))

    def close(self) -> None:
        """End what the app has started; to be called after `run`."""
        # The cluster first: that ends what threads wait for, as ranks that are silent.
        if self._cluster is not None:
            self._cluster.close()
        if self._live is not None:
            self._live.close()

    # -- messages of the feed, on its threads -----------------------------------

    def _take(self, state: Message) -> None:
        before, self.state = self.state, state
        if before is None or before["banner"]["title"] != state["banner"]["title"]:
            self.post_message(Changed())

    def _answer(self, outcome: Message) -> None:
        self.post_message(Answered(outcome))

    def on_changed(self, message: Changed) -> None:
        """Show at once what is new in the banner."""
        self._draw()

    def on_answered(self, message: Answered) -> None:
        outcome = message.outcome
        self._asked.discard(outcome["id"])
        if "stacks" in outcome:
            self.push_screen(Reading(outcome["title"], outcome["stacks"]))
        elif outcome.get("text"):
            severity = "information" if outcome["ok"] else "error"
            self.notify(
                printable(outcome["text"]),
                severity=severity,  # type: ignore[arg-type]
                timeout=10,
                markup=False,
            )
        self._draw()

    # -- drawing --------------------------------------------------------------------

    def _update(self) -> None:
        # Of a terminal that is gone Textual would read the end of file again and again,
        # where no SIGHUP has come, as with nohup.
        if not self.is_headless and not os.isatty(0):
            self.exit()
        self._draw()

    @property
    def group(self) -> dict[str, Any] | None:
        """What the board says of the group that is shown."""
        groups = self.state["groups"] if self.state is not None else []
        found = (one for one in groups if one["id"] == self._group)
        return next(found, groups[0] if groups else None)

    def _draw(self) -> None:
        state = self.state
        if state is None or len(self.screen_stack) > 1:
            return
        head, banner = state["head"], state["banner"]
        offered = len(state["groups"]) > 1, "rebuild" in head["refused"]
        if offered != self._offered:
            self._offered = offered
            self.refresh_bindings()
        facts = [self.TITLE, head["title"], *head["facts"]]
        _say(self._head, " · ".join(facts))
        shape = SHAPES.get(banner["mood"], "○")
        said = " ".join(_sentences(banner))
        _say(self._banner, f": {said}", f"{shape} {banner['title']}")
        self._banner.set_classes(banner["mood"])
        self._draw_group(state)

    def _draw_group(self, state: Message) -> None:
        group = self.group
        if group is None:
            return
        about = [group["label"]]
        if len(state["groups"]) > 1:
            number = [one["id"] for one in state["groups"]].index(group["id"]) + 1
            about.append(f"group {number} of {len(state['groups'])}")
        # Of a narrow terminal the facts are cut off first.
        about += [*filter(None, [group["verdict"]]), *group["facts"]]
        _say(self._about, " · ".join(about))
        rows = state["rows"].get(group["id"], {})
        if state["head"]["state"] == "running":
            self._now = self._clock()
        self.table.show(group["id"], rows, self._now, self.view)
        text = self._noted(len(rows))
        _say(self._note, text)
        self._note.set_class(bool(text), "shown")

    def _noted(self, count: int) -> str:
        """Return what the user sees less of, and in which order."""
        said = []
        shown = len({rank for item in self.table.items for rank in item.ranks})
        if shown < count:
            said.append(f"{shown} of {count} ranks")
        if self.view.filter:
            said.append(f"filter {self.view.filter!r}")
        if self.view.culprits:
            said.append("only what is at fault")
        if self.view.sort:
            title = next(one.title for one in COLUMNS if one.key == self.view.sort)
            order = "the highest first" if self.view.descending else "the lowest first"
            said.append(f"by {title}, {order}")
        return f"{' · '.join(said)}   (Esc: as it was)" if said else ""

    def _look(self, **changes: Any) -> None:
        self.view = replace(self.view, **changes)
        self._draw()

    # -- keys -------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave out what cannot be done to these ranks, and what is behind a text."""
        if action in ("group", "filter", "plain") and len(self.screen_stack) > 1:
            return False
        if self.state is None:
            return True
        if action == "rebuild":
            return "rebuild" not in self.state["head"]["refused"]
        return action != "groups" or len(self.state["groups"]) > 1

    def action_filter(self) -> None:
        self._filter.add_class("shown")
        self._filter.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._look(filter=event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter, and give the keys back to the table."""
        self._end_filter()

    def _end_filter(self) -> None:
        self._filter.remove_class("shown")
        self.table.focus()

    def action_plain(self) -> None:
        self._filter.value = ""
        self._end_filter()
        self._look(filter="", culprits=False, sort="", descending=False)

    def action_sort(self, by: int) -> None:
        """Sort by the next column; behind the last one, in the usual order."""
        keys = ["", *(one.key for one in self.table.columns)]
        place = keys.index(self.view.sort) if self.view.sort in keys else 0
        self._look(sort=keys[(place + by) % len(keys)], descending=False)

    def action_reverse(self) -> None:
        self._look(sort=self.view.sort or "rank", descending=not self.view.descending)

    def on_rank_table_title_pressed(self, message: RankTable.TitlePressed) -> None:
        """Sort by a column: the lowest first, then the highest, then as before."""
        if self.view.sort != message.key:
            self._look(sort=message.key, descending=False)
        elif self.view.descending:
            self._look(sort="", descending=False)
        else:
            self._look(descending=True)

    def action_fold(self) -> None:
        self._look(fold=not self.view.fold)

    def action_culprits(self) -> None:
        self._look(culprits=not self.view.culprits)

    def action_group(self, by: int) -> None:
        group = self.group
        if self.state is None or group is None:
            return
        ids = [one["id"] for one in self.state["groups"]]
        self._group = ids[(ids.index(group["id"]) + by) % len(ids)]
        self._draw()

    def action_groups(self) -> None:
        group = self.group
        if self.state is not None and group is not None:
            self.push_screen(GroupList(self.state["groups"], group["id"]), self._choose)

    def _choose(self, group: str | None) -> None:
        self._group = group or self._group
        self._draw()

    def on_rank_table_opened(self, message: RankTable.Opened) -> None:
        """Show the rows of a fold, or the stacks of a rank."""
        item = message.item
        if item.fold:
            self._look(opened=self.view.opened ^ {item.key})
        else:
            self._request("profile", ranks=list(item.ranks))

    def action_stacks(self, every: bool = False) -> None:
        """Show the stacks of the ranks of the row, or of all."""
        chosen = self.table.chosen
        if every or chosen is not None:
            ranks = None if every or chosen is None else list(chosen.ranks)
            self._request("profile", ranks=ranks)

    def action_verdict(self) -> None:
        if self.state is not None:
            banner = self.state["banner"]
            self.push_screen(Reading(banner["title"], "\n\n".join(_sentences(banner))))

    def action_help(self) -> None:
        width = max(len(one.title) for one in COLUMNS)
        columns = [f"{one.title:<{width}}  {one.about}" for one in COLUMNS]
        shapes = "● runs   ○ idle   ▲ no answer   ■ at fault, dead or aborted"
        text = "\n".join([_KEYS, shapes, "", *columns])
        self.push_screen(Reading("rankscope top: keys and columns", text))

    # -- what changes the ranks -----------------------------------------------------

    def action_diagnose(self) -> None:
        self._request("diagnose")

    def action_abort(self) -> None:
        """Abort what is in flight, once the user has said yes."""
        if self.state is None or self._is_refused("abort"):
            return
        flying = [
            one for one in self.state["groups"] if one["flight"] and not one["aborted"]
        ]
        hung = [one for one in flying if one["id"] in self.state["banner"]["groups"]]
        if not flying:
            self.notify("No op is in flight: there is nothing to abort.")
            return
        after = "Every op in flight there fails with an error that says why."
        self._ask("abort", hung or flying, after)

    def action_rebuild(self) -> None:
        """Rebuild what was aborted, once the user has said yes."""
        if self.state is None or self._is_refused("rebuild"):
            return
        aborted = [one for one in self.state["groups"] if one["aborted"]]
        if not aborted:
            self.notify("No group is aborted: there is nothing to rebuild.")
            return
        self._ask("rebuild", aborted, "The ranks can use them again.")

    def _is_refused(self, what: str) -> bool:
        """Say why `what` cannot be done to these ranks, if it cannot."""
        assert self.state is not None
        why = self.state["head"]["refused"].get(what)
        if self.state["head"]["state"] != "running":
            why = "the ranks have ended"
        if why is not None:
            self.notify(printable(why), severity="warning", timeout=10, markup=False)
        return why is not None

    def _ask(self, what: str, groups: list[dict[str, Any]], after: str) -> None:
        def answered(ids: list[str] | None) -> None:
            if ids:
                self._request(what, groups=ids)

        self.push_screen(Question(what, groups, after, self.group), answered)

    def _request(self, what: str, **parameters: Any) -> None:
        if self._live is not None and what not in self._asked:
            self._asked.add(what)
            self._live.request(what, **parameters)


def _sentences(banner: dict[str, Any]) -> list[str]:
    """Return all that the banner says below its title."""
    return [*filter(None, [banner["text"], *banner["more"], banner["last"]])]


def _say(place: Static, text: str, title: str = "") -> None:
    content = Content(printable(text))
    if title:
        content = Content.styled(printable(title), "bold") + content
    if place.content != content:
        place.update(content)
