"""The board in a terminal: what it shows and what its keys do, without ranks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import pytest
from rich.color import ColorType
from rich.segment import Segment
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static

from rankscope.backends.observe.verdicts import Verdict
from rankscope.engines import ClusterError, ClusterStatus
from rankscope.widgets.board.arrange import View
from rankscope.widgets.top import live
from rankscope.widgets.top.app import TopApp
from rankscope.widgets.top.dialogs import GroupList, Question, Reading
from rankscope.widgets.top.table import RankTable
from tests.widgets import simulated, statuses
from tests.widgets.top.ranks import Ranks

WAIT = 30.0


@pytest.fixture(autouse=True)
def _told_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the verdicts of the ranks found at once: a diagnosis has its own tests."""

    class Told:
        def __init__(
            self,
            ranks: Ranks,
            show: Callable[[Sequence[Verdict]], None],
            tells: bool,
        ) -> None:
            assert not tells
            show(ranks.verdicts)

        def close(self) -> None:
            pass

    monkeypatch.setattr(live, "StallWatch", Told)


class Screen:
    """A terminal with the board of some ranks, and what is to be read there."""

    def __init__(self, ranks: Ranks, pilot: Pilot[str]) -> None:
        self.ranks, self.pilot = ranks, pilot
        app = pilot.app
        assert isinstance(app, TopApp)
        self.app = app

    @property
    def table(self) -> RankTable:
        return self.app.table

    def text(self, name: str) -> str:
        """The text of a part of the screen that is on top."""
        return str(self.app.screen.query_one(name, Static).content)

    def lines(self) -> list[str]:
        """The lines of the table, the titles first."""
        shown = [self.table.render_line(y).text.rstrip() for y in range(40)]
        return [line for line in shown if line]

    def screen_lines(self) -> list[str]:
        """The lines of the whole terminal."""
        lines = self.app.screen._compositor.render_strips()
        return [line.text.rstrip() for line in lines]

    def segments(self) -> list[Segment]:
        """All that the terminal gets."""
        lines = self.app.screen._compositor.render_strips()
        return [segment for line in lines for segment in line]

    def ranks_shown(self) -> list[str]:
        return [line.strip().split("  ")[0] for line in self.lines()[1:]]

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WAIT
        while not condition():
            assert loop.time() < deadline, f"not seen: {what}"
            await self.pilot.pause(0.02)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def over(self, kind: type) -> Any:
        """What lies over the table, once it is there."""
        await self.until(lambda: isinstance(self.app.screen, kind), kind.__name__)
        await self.pilot.pause()
        return self.app.screen

    async def asked(self, *call: Any) -> None:
        await self.until(lambda: call in self.ranks.calls, str(call))


def on_screen(
    ranks: Ranks,
    body: Callable[[Screen], Awaitable[None]],
    size: tuple[int, int] = (120, 30),
) -> TopApp:
    """Run `body` with the board of `ranks` on the screen."""
    app = TopApp("rankscope-aa11", lambda: ranks, interval=0.05)  # type: ignore[arg-type, return-value]

    async def run() -> None:
        async with app.run_test(size=size, notifications=True) as pilot:
            screen = Screen(ranks, pilot)
            await screen.until(lambda: app.state and screen.table.items, "the ranks")
            if ranks.verdicts:
                title = ranks.verdicts[0].fault.value.capitalize()
                await screen.until(
                    lambda: title in screen.text("#banner"), "the verdict"
                )
            await body(screen)

    try:
        asyncio.run(run())
    finally:
        app.close()
    return app


def hung(size: int, absent: int) -> Ranks:
    return Ranks(*simulated.hang(size, absent))


def script(ranks: Ranks, **refused: str) -> Ranks:
    """The ranks of a script, with what cannot be done to them."""
    status = replace(ranks.status, script="train.py", refused=refused)
    return Ranks(status, ranks.verdicts)


class TestShown:
    def test_a_hang_has_its_verdict_and_its_culprit(self) -> None:
        async def body(screen: Screen) -> None:
            assert screen.text("#head").startswith("rankscope top · 2 ranks · local")
            said = screen.text("#banner")
            assert said.startswith("■ Missing ranks: Rank 1 has not entered all_reduce")
            assert "missing ranks: rank 1" in screen.text("#group")
            titles, zero, one = screen.lines()
            assert titles.split()[:3] == ["rank", "state", "op"]
            assert "● in flight" in zero
            assert "waits for rank 1" in zero
            assert "○ idle" in one
            assert "not entered" in one

        on_screen(hung(2, 1), body)

    def test_no_time_passes_for_ranks_that_have_ended(self) -> None:
        async def body(screen: Screen) -> None:
            screen.ranks.ended, screen.ranks.closed = "the job has ended", True
            await screen.until(lambda: "Ended" in screen.text("#banner"), "the end")
            before = screen.lines()
            screen.app._clock = lambda: time.monotonic() + 3600
            screen.app._draw()
            assert screen.lines() == before

        on_screen(hung(4, 2), body)

    def test_equal_ranks_of_many_are_one_row_and_open(self) -> None:
        async def body(screen: Screen) -> None:
            assert screen.ranks_shown() == ["513", "▸ ranks 0–512, 514–1023"]
            await screen.press("down", "enter")
            assert screen.ranks_shown()[:4] == [
                "513",
                "▾ ranks 0–512, 514–1023",
                "0",
                "1",
            ]
            await screen.press("end")
            assert "1023" in screen.ranks_shown()
            await screen.press("home", "f")
            assert screen.ranks_shown()[:3] == ["0", "1", "2"]
            assert len(screen.table.items) == 1024

        on_screen(hung(1024, 513), body)

    def test_what_changes_is_shown(self) -> None:
        async def body(screen: Screen) -> None:
            assert screen.text("#banner").startswith("● Running")
            screen.ranks.take(simulated.hang(4, 2, elapsed=1.5)[0])
            await screen.until(
                lambda: "In flight" in screen.text("#banner"), "the op in flight"
            )
            screen.ranks.ended = "the job has ended: exit code 0"
            screen.ranks.closed = True
            screen.ranks.take(screen.ranks.status)
            await screen.until(
                lambda: "Ended: The job has ended" in screen.text("#banner"), "the end"
            )

        on_screen(Ranks(simulated.Simulation(4).step()), body)

    @pytest.mark.parametrize("width", [20, 44, 80, 200])
    def test_columns_give_way_where_the_terminal_is_narrow(self, width: int) -> None:
        async def body(screen: Screen) -> None:
            titles = screen.lines()[0].split()
            assert titles[:2] == ["rank", "pid" if width > 120 else "state"]
            assert ("verdict" in titles) == (width > 30)
            assert ("op" in titles) == (width > 60)
            lines = screen.lines()
            assert all(len(line) <= width for line in lines)
            # A cell that is cut is marked: "rank 2" may not be the whole of it.
            assert width in (20, 44) or not any("…" in line for line in lines)
            assert width != 20 or all(line.endswith("…") for line in lines)
            (about,) = (
                line
                for line in screen.screen_lines()
                if line.startswith("default · missing ranks: rank 2"[: width - 1])
            )
            assert about.endswith("…" if width < 60 else "timeout 5 min")

        on_screen(hung(4, 2), body, size=(width, 20))

    def test_names_from_elsewhere_move_no_cursor(self) -> None:
        one = statuses.group(name="a\x1b[2Jb[red]", ranks=range(2))
        ranks = [statuses.rank(n, one, host="h\x1b]0;x\x07") for n in range(2)]

        async def body(screen: Screen) -> None:
            assert "a\\x1b[2Jb[red]" in screen.text("#group")
            everything = "".join(one.text for one in screen.segments())
            assert "\x1b" not in everything
            assert "\x07" not in everything

        on_screen(Ranks(statuses.cluster(*ranks)), body)

    @pytest.mark.parametrize("wanted", [True, False])
    def test_colours_are_those_of_the_terminal_or_none(
        self, monkeypatch: pytest.MonkeyPatch, wanted: bool
    ) -> None:
        """Textual takes `NO_COLOR` in for themes that it knows: black on black."""

        async def body(screen: Screen) -> None:
            colours = {
                None if colour.is_default else (colour.type, colour.number)
                for one in screen.segments()
                if one.style is not None
                for colour in (one.style.color, one.style.bgcolor)
                if colour is not None
            }
            red = ColorType.STANDARD, 1
            assert colours == ({None, red} if wanted else {None})

        monkeypatch.delenv("NO_COLOR", raising=False)
        if not wanted:
            monkeypatch.setenv("NO_COLOR", "1")
        on_screen(hung(2, 1), body)

    def test_the_footer_has_what_can_be_done(self) -> None:
        def keys(screen: Screen) -> list[Any]:
            return list(screen.app.query("FooterKey"))

        def shown(screen: Screen) -> set[str]:
            return {one.description for one in keys(screen)}

        async def job(screen: Screen) -> None:
            wanted = {"Quit", "Help", "Filter", "Sort", "Abort"}
            await screen.until(lambda: wanted <= shown(screen), "the keys")
            await screen.until(lambda: "Rebuild" not in shown(screen), "fewer keys")

        async def cluster(screen: Screen) -> None:
            await screen.until(lambda: "Rebuild" in shown(screen), "the keys")
            await screen.until(lambda: "Groups" not in shown(screen), "fewer keys")
            # Cyan is hardly to be seen on white.
            key = keys(screen)[0].get_component_rich_style("footer-key--key")
            assert key.color.is_default

        async def groups(screen: Screen) -> None:
            wanted = {"Groups", "Rebuild"}
            await screen.until(lambda: wanted <= shown(screen), "the keys")
            await screen.until(
                lambda: all(0 < one.region.right <= 80 for one in keys(screen)), "room"
            )

        async def narrow(screen: Screen) -> None:
            def fit() -> set[str]:
                return {k.description for k in keys(screen) if 0 < k.region.right <= 50}

            await screen.until(lambda: {"Abort", "Rebuild"} <= fit(), "the way out")

        on_screen(hung(2, 1), narrow, (50, 16))
        size = 80, 24
        on_screen(script(hung(2, 1), rebuild="it is a script"), job, size)
        on_screen(hung(64, 17), cluster, size)
        two = [statuses.group(name=name, ranks=range(2)) for name in ("tp", "dp")]
        rows = [statuses.rank(rank, *two) for rank in range(2)]
        on_screen(Ranks(statuses.cluster(*rows)), groups, size)

    def test_columns_leave_room_for_the_scroll_bar(self) -> None:
        async def body(screen: Screen) -> None:
            await screen.press("f")
            await screen.until(lambda: len(screen.table.items) == 64, "each rank")
            for width in range(80, 130):
                await screen.pilot.resize_terminal(width, 20)
                await screen.until(lambda: screen.table.size.width == width, "a size")  # noqa: B023
                assert screen.table.virtual_size.width <= width - 2

        on_screen(hung(64, 17), body)

    def test_a_late_rank_is_coloured_where_its_column_has_no_room(self) -> None:
        async def body(screen: Screen) -> None:
            assert screen.app.state is not None
            ((group, rows),) = screen.app.state["rows"].items()
            rows = {rank: dict(row) for rank, row in rows.items()}
            rows[2]["awaited"] = True
            screen.table.show(group, rows, 0.0, View(fold=False))
            assert "late" not in screen.lines()[0]
            yellow = {
                segment.text.strip()
                for y in range(1, 5)
                for segment in screen.table.render_line(y)
                if segment.style is not None
                and segment.style.color is not None
                and segment.style.color.number == 3
            }
            assert yellow == {"2"}

        on_screen(Ranks(simulated.Simulation(4).step()), body, (80, 24))


class TestView:
    def test_a_filter_leaves_the_ranks_that_are_wanted(self) -> None:
        async def body(screen: Screen) -> None:
            await screen.press("slash", *"3,8-9")
            assert screen.ranks_shown() == ["▸ ranks 3, 8–9"]
            assert "3 of 64 ranks" in screen.text("#note")
            await screen.press("enter")
            assert screen.table.has_focus
            await screen.press("slash")
            screen.app.query_one("#filter", Input).value = "not entered"
            await screen.pilot.pause()
            assert screen.ranks_shown() == ["17"]
            await screen.press("escape")
            assert screen.ranks_shown()[0] == "17"
            assert len(screen.ranks_shown()) == 2
            await screen.press("c")
            assert screen.ranks_shown() == ["17"]

        on_screen(hung(64, 17), body)

    def test_a_column_sorts_and_the_cursor_stays_at_its_rank(self) -> None:
        made = [
            statuses.rank(n, statuses.group(), memory=(4 - n) << 20) for n in range(4)
        ]

        async def body(screen: Screen) -> None:
            await screen.press("down")
            places = [one.key for one in screen.table.columns]
            await screen.press(*["greater_than_sign"] * (1 + places.index("memory")))
            assert screen.ranks_shown() == ["3", "2", "1", "0"]
            assert "memory ▲" in screen.lines()[0]
            chosen = screen.table.chosen
            assert chosen is not None
            assert chosen.ranks == (1,)
            await screen.press("r")
            assert screen.ranks_shown() == ["0", "1", "2", "3"]
            assert "by memory, the highest first" in screen.text("#note")
            await screen.press("escape", "less_than_sign")
            assert screen.app.view.sort == places[-1]

        on_screen(Ranks(statuses.cluster(*made)), body)

    def test_a_click_on_a_title_sorts_and_on_a_row_chooses(self) -> None:
        async def body(screen: Screen) -> None:
            for expected in (("rank", False), ("rank", True), ("", False)):
                await screen.pilot.click(RankTable, offset=(1, 0))
                await screen.pilot.pause()
                view = screen.app.view
                assert (view.sort, view.descending) == expected
            await screen.pilot.click(RankTable, offset=(1, 3))
            await screen.pilot.pause()
            chosen = screen.table.chosen
            assert chosen is not None
            assert chosen.ranks == (2,)

        on_screen(hung(4, 2), body)

    def test_groups_are_shown_in_turn_and_from_a_list(self) -> None:
        made = [
            statuses.rank(
                n, statuses.group(), statuses.group("tp", (n // 2 * 2, n // 2 * 2 + 1))
            )
            for n in range(4)
        ]

        async def body(screen: Screen) -> None:
            assert "default · group 1 of 3" in screen.text("#group")
            await screen.press("tab")
            assert "tp (0–1) · group 2 of 3" in screen.text("#group")
            assert screen.ranks_shown() == ["0", "1"]
            await screen.press("shift+tab", "shift+tab")
            assert screen.ranks_shown() == ["2", "3"]
            await screen.press("g")
            groups = (await screen.over(GroupList)).query_one(OptionList)
            styles = [segment.style for segment in groups.render_line(2)]
            assert all(one is not None and one.bold for one in styles)
            assert not any(one.style.bold for one in groups.render_line(1))
            await screen.press("up", "enter")
            await screen.until(
                lambda: screen.ranks_shown() == ["0", "1"], "the group before"
            )

        on_screen(Ranks(statuses.cluster(*made)), body)


class TestAsked:
    def test_enter_shows_where_a_rank_is(self) -> None:
        async def body(screen: Screen) -> None:
            await screen.press("down", "enter")
            await screen.over(Reading)
            assert "dist.all_reduce(x[0])" in screen.text("#text")
            assert screen.ranks.calls == [("follow",), ("stacks", (1,))]
            await screen.press("escape", "S")
            await screen.over(Reading)
            assert screen.ranks.calls[2:] == [("stacks", (0, 1, 2, 3))]

        on_screen(hung(4, 2), body)

    def test_help_says_what_columns_and_keys_are(self) -> None:
        async def body(screen: Screen) -> None:
            await screen.press("question_mark")
            await screen.over(Reading)
            text = screen.text("#text")
            assert "ops it enters after the others" in text
            for key in ("Enter", "Tab", "Esc", "/", "< "):
                assert f"\n{key}" in text
            await screen.press("q", "v")
            await screen.over(Reading)
            assert "Rank 2 has not entered" in screen.text("#text")

        on_screen(hung(4, 2), body)

    def test_an_abort_asks_first(self) -> None:
        async def body(screen: Screen) -> None:
            await screen.press("a")
            await screen.over(Question)
            asked = screen.text("#question")
            assert asked.startswith("Abort group 'default' of ranks 0–3? Every op")
            # Neither a stray key nor Enter is a yes.
            await screen.press("a", "enter", "n")
            assert not isinstance(screen.app.screen, Question)
            assert screen.ranks.calls == [("follow",)]
            await screen.press("a", "y")
            reason = "abort requested from a terminal"
            await screen.asked("abort", ["default"], reason, "a terminal")
            await screen.until(lambda: screen.app._notifications, "the outcome")
            (said,) = screen.app._notifications
            assert said.message == "Group 'default' aborted."

        on_screen(hung(4, 2), body)

    def test_of_several_groups_the_one_that_is_shown_may_be_meant_alone(self) -> None:
        now = simulated.op(3, state="started", elapsed=2.0)
        groups = [
            statuses.group(name, (0, 1), oldest=now, in_flight=1)
            for name in ("default", "dp", "tp")
        ]
        made = [statuses.rank(n, *groups, state="busy") for n in range(2)]

        async def body(screen: Screen) -> None:
            await screen.press("tab", "a")
            await screen.over(Question)
            asked = screen.text("#question")
            assert asked.startswith("Abort groups 'default', 'dp', 'tp' of ranks 0–1?")
            await screen.press("o")
            reason = "abort requested from a terminal"
            await screen.asked("abort", ["dp"], reason, "a terminal")

        on_screen(Ranks(statuses.cluster(*made)), body)

    def test_an_abort_that_fails_says_so(self) -> None:
        async def body(screen: Screen) -> None:
            screen.ranks.fails = "rank 2 does not answer [red]"
            await screen.press("a", "y")
            await screen.until(lambda: screen.app._notifications, "the error")
            (said,) = screen.app._notifications
            assert (said.message, said.severity) == (screen.ranks.fails, "error")

        on_screen(hung(4, 2), body)

    def test_what_a_script_refuses_is_not_asked(self) -> None:
        async def body(screen: Screen) -> None:
            await screen.press("a")
            (said,) = screen.app._notifications
            assert said.message == "train.py does not allow it"
            assert not isinstance(screen.app.screen, Question)
            assert screen.ranks.calls == [("follow",)]

        on_screen(script(hung(4, 2), abort="train.py does not allow it"), body)

    def test_without_an_op_there_is_nothing_to_abort(self) -> None:
        async def body(screen: Screen) -> None:
            await screen.press("a", "b")
            said = [one.message for one in screen.app._notifications]
            assert said == [
                "No op is in flight: there is nothing to abort.",
                "No group is aborted: there is nothing to rebuild.",
            ]

        on_screen(Ranks(_idle(2)), body)

    def test_a_rebuild_and_a_diagnosis(self) -> None:
        one = statuses.group(ranks=range(2), state="aborted", reason="by hand")
        made = [statuses.rank(n, one) for n in range(2)]

        async def body(screen: Screen) -> None:
            await screen.press("b")
            await screen.over(Question)
            await screen.press("y")
            await screen.asked("rebuild", ["default"])
            await screen.press("d")
            await screen.asked("diagnose")

        on_screen(Ranks(statuses.cluster(*made)), body)


class TestEnd:
    @pytest.mark.parametrize("key", ["q", "ctrl+c"])
    def test_a_key_ends_it_and_leaves_the_ranks(self, key: str) -> None:
        async def body(screen: Screen) -> None:
            await screen.press(key)
            await screen.until(lambda: not screen.app.is_running, "the end")

        ranks = hung(2, 1)
        app = on_screen(ranks, body)
        assert app.return_value is None
        assert app.return_code == 0
        assert ranks.closed

    def test_what_cannot_be_attached_to_is_an_error(self) -> None:
        def attach() -> NoReturn:
            raise ClusterError("nobody answers")

        app = TopApp("rankscope-aa11", attach)

        async def run() -> None:
            async with app.run_test() as pilot:
                while app.is_running:
                    await pilot.pause(0.02)

        asyncio.run(asyncio.wait_for(run(), WAIT))
        app.close()
        assert app.return_value == "nobody answers"

    def test_it_can_be_left_while_it_attaches(self) -> None:
        asked, answers, ended = (threading.Event() for _ in range(3))

        def attach() -> NoReturn:
            asked.set()
            answers.wait(WAIT)
            ended.set()
            raise ClusterError("nobody answers")

        app = TopApp("rankscope-aa11", attach)

        async def run() -> None:
            async with app.run_test() as pilot:
                while not asked.is_set():
                    await pilot.pause(0.02)
                assert "rankscope-aa11" in str(app.screen.query_one("#head").render())
                await pilot.press("q")
                while app.is_running:
                    await pilot.pause(0.02)

        asyncio.run(asyncio.wait_for(run(), WAIT))
        app.close()
        assert not ended.is_set()
        assert app.return_value is None
        answers.set()
        assert ended.wait(WAIT)

    def test_it_can_be_left_while_a_rank_is_silent(self) -> None:
        asked, left, seen = threading.Event(), threading.Event(), list[bool]()

        class Silent(Ranks):
            def flight_records(self, *args: Any, **options: Any) -> NoReturn:
                asked.set()
                seen.append(left.wait(WAIT))
                raise ClusterError("closed")

            def close(self) -> None:
                left.set()
                super().close()

        async def body(screen: Screen) -> None:
            await screen.until(asked.is_set, "the look at who is late")
            await screen.press("q")

        on_screen(Silent(statuses.cluster(*simulated.hang(2, 1)[0].ranks)), body)
        assert seen == [True]

    @pytest.mark.processes
    def test_it_ends_with_its_terminal(self) -> None:
        """Where no SIGHUP tells it of that: it has no controlling terminal."""
        code = (
            "import threading\n"
            "from rankscope.widgets.top.app import TopApp\n"
            "TopApp('bench', lambda: threading.Event().wait(), 0.1).run()"
        )
        terminal, its_end = os.openpty()
        top = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=its_end,
            stdout=its_end,
            stderr=its_end,
            start_new_session=True,
        )
        os.close(its_end)
        shown = b""
        while b"Attaching" not in shown:
            shown += os.read(terminal, 65536)
        os.close(terminal)
        try:
            top.wait(WAIT)
        finally:
            top.kill()
            top.wait()


def _idle(size: int) -> ClusterStatus:
    one = statuses.group(ranks=range(size))
    return statuses.cluster(*(statuses.rank(n, one) for n in range(size)))
