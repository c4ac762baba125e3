"""The board in a browser, with a kernel that the test plays."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.observe.lateness import Lateness
from rankscope.backends.observe.stacks import MAIN, Frame, Stack
from rankscope.backends.observe.verdicts import Fault, Verdict, Waiting
from rankscope.engines import ClusterStatus, Profile
from rankscope.engines.observe.profiling import Sampled
from rankscope.widgets import ProfileReport
from rankscope.widgets.board.html import board_html
from rankscope.widgets.board.model import BoardModel
from rankscope.widgets.board.timeline import timeline
from tests.backends.observe.late_runs import Run
from tests.widgets import simulated, statuses
from tests.widgets.bare_page import DARK
from tests.widgets.scene import Scene, idle, lanes

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.processes


@pytest.fixture
def scene(browser: Browser) -> Iterator[Scene]:
    """A board of four idle ranks."""
    made = Scene(browser, width=1280)
    yield made
    made.close()


def _focused(scene: Scene) -> str:
    """The text of the element of the board that has the focus."""
    return scene.page.page.evaluate(
        "() => document.querySelector('.rankscope-live').shadowRoot"
        ".activeElement?.textContent ?? ''"
    )


def _content(scene: Scene) -> list[dict[str, str]]:
    titles, *rows = scene.page.rows()
    return [
        {title: text for title, text in zip(titles, row, strict=True) if text}
        for row in rows
    ]


class TestTable:
    def test_a_row_for_each_rank(self, scene: Scene) -> None:
        titles, *rows = scene.page.rows()
        assert titles[0] == "rank"
        assert [row[0] for row in rows] == ["0", "1", "2", "3"]
        assert [row[titles.index("state")] for row in rows] == ["idle"] * 4
        assert scene.page.sent()[0].keys() == {"watch"}
        # Idle ranks have no line, and so no button without a name.
        buttons = scene.page.board().locator("button:visible").all_inner_texts()
        assert all(buttons)

    def test_a_hang_is_seen(self, scene: Scene) -> None:
        scene.take(*simulated.hang(4, 2))
        scene.take(*simulated.hang(4, 2), after=1.5)
        titles, *rows = scene.page.rows()
        column = {title: [row[n] for row in rows] for n, title in enumerate(titles)}
        assert column["state"] == ["in flight", "in flight", "idle", "in flight"]
        assert column["seq"] == ["#14", "#14", "#13", "#14"]
        assert column["lag"] == ["", "", "−1", ""]
        assert column["line"][0] == "cell 7 line 5"
        waits = "waits for rank 2"
        assert column["verdict"] == [waits, waits, "not entered", waits]
        assert scene.texts("banner")[0].startswith(
            "Missing ranks Rank 2 has not entered"
        )

    def test_a_deadlock_has_a_picture_that_can_be_closed(self, scene: Scene) -> None:
        cycle = (
            Waiting((0,), "recv #1", "<b>", (1,)),
            Waiting((1,), "recv #1", "pp", (0,)),
        )
        status, (verdict,) = simulated.hang(4, 2)
        scene.take(status, [replace(verdict, fault=Fault.DEADLOCK, cycle=cycle)])
        board = scene.page.board()
        picture = board.get_by_role("img", name="2 ranks wait for each other")
        assert picture.is_visible()
        assert picture.locator("b").count() == 0
        board.get_by_text("Who waits for whom").click()
        scene.take(status, [replace(verdict, cycle=cycle)])
        assert not picture.is_visible()
        scene.take(status, [verdict])
        assert not board.get_by_text("Who waits for whom").is_visible()

    def test_a_tab_says_the_state_of_its_group(self, scene: Scene) -> None:
        tab = scene.page.board().get_by_role("tab")
        assert tab.get_attribute("aria-label") == "default, 4 ranks, idle"
        scene.take(*simulated.hang(4, 2))
        assert tab.get_attribute("aria-label") == "default, 4 ranks, hung"
        # Not by a shape alone.
        assert tab.inner_text().split() == ["default", "4", "hung"]
        scene.take(simulated.hang(4, 2)[0])
        assert tab.get_attribute("aria-label") == "default, 4 ranks, in flight"

    def test_time_goes_on_without_the_kernel(self, scene: Scene) -> None:
        scene.take(simulated.hang(4, 2)[0])

        def elapsed() -> float:
            return float(scene.texts("c-elapsed")[1].split()[0])

        before = elapsed()
        until(lambda: elapsed() >= before + 0.3)

    def test_a_rank_that_computes_shows_its_line_and_since_when(
        self, scene: Scene
    ) -> None:
        busy = statuses.rank(
            0, statuses.group(), state="busy", cell=7, line="cell 7 line 4",
            line_for=1.0, busy_for=1.0,
        )  # fmt: skip
        scene.take(statuses.cluster(busy, *idle(4)[1:]))
        line = scene.page.board().locator(".c-line").nth(1)
        assert line.inner_text() == "cell 7 line 4"
        # The page's own clock goes on; it says so from 5 s on.
        until(lambda: line.inner_text().startswith("cell 7 line 4 for "), 30)

    @pytest.mark.parametrize(
        ("width", "memory", "line"),
        [
            (1400, ["memory", "312 MiB"], "cell 7 line 4 for 12 s"),
            (440, [], "cell 7 line 4"),
        ],
    )
    def test_what_has_room_is_shown(
        self, browser: Browser, width: int, memory: list[str], line: str
    ) -> None:
        """The memory on a wide page; on a narrow one the line without its time."""
        busy = statuses.rank(
            0, statuses.group(), state="busy", cell=7, line="cell 7 line 4",
            line_for=12.0, busy_for=12.0, memory=312 << 20,
        )  # fmt: skip
        scene, began = Scene(browser, width=width), time.monotonic()
        scene.take(statuses.cluster(busy, *idle(4)[1:]))
        until(lambda: len(scene.texts("c-line")) > 1, 30)
        shown = [text for text in scene.texts("c-memory") if text]
        assert shown == memory
        told = scene.texts("c-line")[1]
        # The page's own clock goes on.
        passed = range(1 + math.ceil(time.monotonic() - began))
        assert told in {line.replace("12 s", f"{12 + n} s") for n in passed}
        scene.close()

    def test_the_ranks_of_a_verdict_are_whole_on_a_narrow_page(
        self, browser: Browser
    ) -> None:
        """Below the rest of the row, in two lines; those of a recv beside it."""
        scene = Scene(browser, width=230)
        receives = statuses.op("recv", 3, state="started", elapsed=9.0, peer=12)
        group = statuses.group(
            ranks=range(16), enqueued=receives, oldest=receives, in_flight=1
        )
        late = (2, 5, 7, 9, 12, 13)
        rest = tuple(rank for rank in range(16) if rank not in late)
        said = "ranks 2, 5, 7, 9, 12–13 have not entered"
        why = (Fault.MISSING_RANKS, group.key, late, rest, "recv", 3, said)
        waiting = [statuses.rank(one, group, state="busy", cell=7) for one in rest]
        left = [statuses.rank(n, statuses.group(ranks=range(16))) for n in late]
        ranks = sorted(waiting + left, key=lambda one: one.rank)
        scene.take(statuses.cluster(*ranks), [Verdict(*why)])
        until(lambda: "waits for ranks 2, 5, 7, 9, 12–13" in scene.texts("c-verdict"))
        cut = "cells => cells.filter(c => c.scrollWidth > c.clientWidth).length"
        for name in ("c-verdict", "c-op"):
            cells = scene.page.board().locator(f".{name}:visible")
            assert cells.evaluate_all(cut) == 0
        high = "cells => cells.filter(c => c.scrollHeight > c.clientHeight).length"
        cells = scene.page.board().locator(".c-verdict:visible")
        assert cells.evaluate_all(high) == 0
        # Who is named in one line has no third one, which would be empty.
        heights = "rows => [...new Set(rows.map(row => row.offsetHeight))]"
        rows = scene.page.board().locator(".row:not(.titles)")
        assert sorted(rows.evaluate_all(heights)) == [40, 54]
        scene.close()

    @pytest.mark.parametrize("size", [4, 64])
    def test_the_transports_are_in_the_groups_line(
        self, browser: Browser, size: int
    ) -> None:
        """Once the ranks have connected; where it has no room, on hovering."""
        scene = Scene(browser, width=1280)
        per_host = max(size // 8, 2)

        def status(connected: bool) -> ClusterStatus:
            ranks = []
            for one in range(size):
                group = statuses.group(
                    ranks=range(size),
                    backend="cpu:ucx",
                    devices={"cpu": "ucx" if connected else "ucx (not built)"},
                    transports=_transports(one, size, per_host) if connected else {},
                )
                host = f"node-{one // per_host}"
                ranks.append(statuses.rank(one, group, host=host))
            return statuses.cluster(*ranks)

        facts = scene.page.board().locator(".groups .facts").last
        scene.take(status(connected=False))
        until(lambda: "connects at the first op" in facts.inner_text(), 30)
        scene.take(status(connected=True))
        said = {
            4: "shm+cma within each host, tcp between ranks 0–1 and 2–3",
            64: "shm+cma within each host, tcp between hosts",
        }[size]
        until(lambda: said in facts.inner_text(), 30)
        assert said in (facts.get_attribute("title") or "")
        scene.page.shot(f"transports-{size}")
        scene.close()

    def test_the_columns_are_the_same_for_the_length_of_a_cell(
        self, browser: Browser
    ) -> None:
        scene = Scene(browser, width=1100)
        simulation = simulated.Simulation(4)
        scene.take(simulation.step())
        first = scene.page.rows()[0]
        assert {"late", "waits", "elapsed", "busbw"} <= set(first)
        lateness = Lateness()
        run = Run(heavy=0.2).steps(41, lambda n, rank: 1 + 20 * (rank == 2))
        lateness.take(run.dumps())
        for step in range(6):
            if step == 2:
                scene.model.show_lateness(lateness.groups())
            scene.take(simulation.step(), after=3)
            assert scene.page.rows()[0] == first
        assert any("%" in one for one in scene.texts("c-late"))
        # Nor do they come and go from cell to cell.
        for status in (statuses.cluster(*idle(4)), simulation.step()):
            scene.take(status, after=30)
            assert scene.page.rows()[0] == first
        scene.close()

    def test_a_column_that_became_empty_goes_as_the_next_cell_begins(
        self, browser: Browser
    ) -> None:
        scene = Scene(browser, width=1400)
        scene.take(*simulated.hang(4, 2))
        assert "verdict" in scene.page.rows()[0]
        ended = statuses.group(state="aborted", reason="by hand", completed=None)
        scene.take(statuses.cluster(*(statuses.rank(n, ended) for n in range(4))))
        # What failed stays where it is.
        assert scene.texts("c-state")[1:] == ["aborted"] * 4
        assert "verdict" in scene.page.rows()[0]
        fresh = statuses.group(generation=1, completed=None)
        scene.take(statuses.cluster(*(statuses.rank(n, fresh) for n in range(4))))
        # A rebuilt group is as a new one.
        assert not {"verdict", "op", "elapsed"} & set(scene.page.rows()[0])
        scene.take(*simulated.hang(4, 2))
        assert "verdict" in scene.page.rows()[0]
        scene.take(statuses.cluster(*idle(4)))
        assert "verdict" in scene.page.rows()[0]
        scene.take(simulated.Simulation(4).step())
        titles = scene.page.rows()[0]
        assert "verdict" not in titles
        assert {"op", "elapsed", "queue"} <= set(titles)
        scene.close()

    def test_of_an_abort_empty_columns_go_and_no_other(self, browser: Browser) -> None:
        status, verdicts = simulated.hang(4, 2)
        ended: dict[str, Any] = {"state": "aborted", "reason": "why"}
        ended |= {"oldest": None, "in_flight": 0}
        gone = [
            replace(
                one,
                state="idle",
                groups=(replace(one.groups[0], **ended),),
            )
            for one in status.ranks
        ]
        # "aborted" and "waited for" are wider than what stood there by what is left.
        scene = Scene(browser, width=1230)
        scene.take(status, verdicts, after=9)
        before = scene.page.rows()[0]
        # As long as a rank is in the op, nothing moves.
        scene.take(statuses.cluster(*gone[:-1], status.ranks[-1]))
        assert scene.page.rows()[0] == before
        scene.take(statuses.cluster(*gone))
        assert scene.texts("c-state")[1:] == ["aborted"] * 4
        titles, *rows = scene.page.rows()
        # Others have their room.
        assert all(any(column) for column in zip(*rows, strict=True))
        empty = {"lag", "late", "waits", "elapsed", "queue"}
        assert set(before) - set(titles) <= empty
        assert not empty & set(titles)
        scene.page.shot("board-aborted")
        fresh = statuses.group(generation=1, completed=None)
        scene.take(statuses.cluster(*(statuses.rank(n, fresh) for n in range(4))))
        scene.take(simulated.Simulation(4).step())
        # There is room again for what comes while cells run.
        assert {"late", "waits", "elapsed"} <= set(scene.page.rows()[0])
        scene.close()

    def test_what_a_rank_holds_on_its_gpu_is_shown_where_one_does(
        self, browser: Browser
    ) -> None:
        scene = Scene(browser, width=1400)
        assert "GPU memory" not in scene.page.rows()[0]
        ranks = [
            statuses.rank(
                n, statuses.group(), gpu="GPU 0 · NVIDIA H200 · 13.2 of 139.8 GiB",
                memory=2 << 30, gpu_memory=(12 << 30) + (n << 28),
            )
            for n in range(2)
        ]  # fmt: skip
        scene.take(statuses.cluster(*ranks, *idle(4)[2:]))
        titles, *rows = scene.page.rows()
        place = titles.index("GPU memory")
        assert [row[place] for row in rows] == ["12 GiB", "12.2 GiB", "", ""]
        scene.page.shot("board-gpu-memory")
        scene.close()

    def test_deltas_lead_to_what_a_new_page_shows(self, browser: Browser) -> None:
        # All columns have room: one that got empty has kept its own.
        scene = Scene(browser, width=1800)
        simulation = simulated.Simulation(4)
        scenes: list[Any] = [(simulation.step([step % 4]), []) for step in range(10)]
        dead = statuses.rank(3, state="dead", reason="killed by SIGKILL")
        scenes += [
            simulated.hang(4, 1),
            (statuses.cluster(dead), []),
            (statuses.cluster(*idle(4)), []),
        ]
        for status, verdicts in scenes:
            scene.take(status, verdicts)
        fresh = Scene(browser, width=1800)
        fresh.page.play(scene.model.full())
        assert _content(fresh) == _content(scene)
        assert fresh.texts("banner") == scene.texts("banner")
        assert fresh.texts("tab") == scene.texts("tab")
        fresh.close()
        scene.close()

    def test_one_message_missed_is_asked_for(self, scene: Scene) -> None:
        scene.page.sent()
        scene.model.update(simulated.Simulation(4).step(), 101.0)
        scene.model.delta()
        scene.take(simulated.hang(4, 2)[0])
        assert {"sync": 1} in scene.page.sent()
        scene.page.play(scene.model.full())
        assert scene.texts("c-seq")[1:] == ["#14", "#14", "#13", "#14"]

    @pytest.mark.parametrize("width", [320, 480, 600, 900, 1500])
    def test_it_fits(self, browser: Browser, width: int) -> None:
        scene = Scene(browser, width=width)
        scene.take(*simulated.hang(4, 2))
        scene.take(*simulated.hang(4, 2), after=1.5)
        titles = scene.page.rows()[0]
        assert {"rank", "state", "verdict"} <= set(titles)
        assert ("algbw" in titles) == (width == 1500)
        # The op stays; the line goes last.
        assert "op" in titles
        assert ("line" in titles) == (width >= 480)
        assert ("seq" in titles) == (width >= 600)
        cut = scene.page.page.evaluate(
            """() => [...document.querySelector(".rankscope-live").shadowRoot
              .querySelectorAll(".row .cell")].filter((cell) =>
                cell.offsetParent && cell.scrollWidth > cell.clientWidth
                // Of states the shapes alone are seen there.
                && !cell.matches(".shapes .c-state")
              ).map((cell) => cell.textContent)"""
        )
        assert cut == []
        # A place that is longer than the line breaks; a shorter one does not.
        scene.page.page.set_viewport_size({"width": 160, "height": 400})
        status, (verdict,) = simulated.hang(4, 2)
        said = verdict.text.replace("cell 7 line 5", "cell 123456 line 123456")
        scene.take(status, [replace(verdict, text=said)])
        wide = "one => one.scrollWidth - one.clientWidth"
        assert scene.page.board().locator(".banner").evaluate(wide) == 0
        scene.close()


class TestButtons:
    def test_abort_asks_back_in_its_place(self, scene: Scene) -> None:
        scene.take(*simulated.hang(4, 2))
        scene.page.sent()
        scene.button("Abort").click()
        assert scene.texts("what") == ["Abort group 'default' on 4 ranks?"]
        assert scene.page.sent() == []
        scene.button("no").click()
        assert scene.button("Abort").is_visible()
        scene.button("Abort").click()
        # The second click of a double click does not count.
        scene.button("yes").click(no_wait_after=True)
        until(lambda: self._confirmed(scene))
        (request,) = scene.page.sent()
        assert (request["do"], request["groups"]) == ("abort", ["g0"])
        assert scene.button("Aborting…").is_disabled()
        # The focus stays where it was, and does not fall to the page.
        assert _focused(scene) == "Aborting…"
        answer = {"type": "did", "id": request["id"], "ok": True, "text": "Done so."}
        scene.page.play(answer)
        assert scene.button("Abort").is_enabled()
        assert "Done so." in scene.texts("head")[0]
        # It is of the past once another cell runs.
        scene.take(statuses.cluster(*idle(4)))
        assert "Done so." in scene.texts("head")[0]
        scene.take(simulated.Simulation(4).step())
        assert "Done so." not in scene.texts("head")[0]

    def _confirmed(self, scene: Scene) -> bool:
        if scene.button("yes").is_visible():
            scene.button("yes").click()
        return bool(scene.page.page.evaluate("() => window.sent.length"))

    def test_nothing_can_be_aborted_where_nothing_is_in_flight(
        self, scene: Scene
    ) -> None:
        idle = statuses.cluster(*(statuses.rank(n, statuses.group()) for n in range(4)))
        scene.take(idle)
        assert scene.button("Abort").is_disabled()
        why = scene.button("Abort").get_attribute("title")
        assert why == "Nothing is in flight."
        scene.take(*simulated.hang(4, 2))
        assert scene.button("Abort").is_enabled()
        assert "variables" in (scene.button("Abort").get_attribute("title") or "")

    def test_abort_ends_all_groups_that_hang_or_one_of_them(self, scene: Scene) -> None:
        now = simulated.op(14, state="started", elapsed=6.2)
        flying: dict[str, Any] = {"started": now, "oldest": now, "in_flight": 1}
        hung = [statuses.group(name, **flying) for name in ("default", "tp", "dp")]
        ranks = [statuses.rank(0, *hung, statuses.group("pp", **flying))]
        verdict = Verdict(
            *(Fault.DEADLOCK, hung[1].key, (0,), (1,), "all_reduce", 14, "why"),
            groups=tuple(one.key for one in hung),
        )
        scene.take(statuses.cluster(*ranks), [verdict])
        # One that several groups are in is shown in the tab of all.
        tab = scene.page.board().get_by_role("tab", selected=True)
        until(lambda: tab.inner_text().startswith("all"))
        listed = scene.page.board().locator(".group-list tbody tr.blamed .of-name")
        assert listed.all_inner_texts() == ["tp", "default", "dp"]
        scene.page.page.set_viewport_size({"width": 280, "height": 900})
        # No verdict is cut.
        cut = "one => one.scrollWidth - one.clientWidth"
        until(lambda: scene.page.board().locator(".group-list").evaluate(cut) == 0)
        scene.page.sent()
        for answer, groups in [("yes", ["g0", "g2", "g1"]), ("only 'tp'", ["g1"])]:
            scene.button("Abort").click()
            assert scene.texts("what") == [
                "Abort 3 hung groups, 'default', 'dp' and 'tp', on 4 ranks?"
            ]

            def confirmed(answer: str = answer) -> bool:
                if scene.button(answer).is_visible():
                    scene.button(answer).click()
                return bool(scene.page.page.evaluate("() => window.sent.length"))

            until(confirmed)
            (request,) = scene.page.sent()
            assert (request["do"], request["groups"]) == ("abort", groups)
            if len(groups) > 1:
                # Also while the kernel sends nothing.
                until(scene.page.board().get_by_text("Aborting… 1 of 4").is_visible)
            did = {"type": "did", "id": request["id"], "ok": True, "text": "Done so."}
            scene.page.play(did)

    def test_a_yes_after_the_end_of_the_op_aborts_nothing(self, scene: Scene) -> None:
        scene.take(*simulated.hang(4, 2))
        scene.button("Abort").click()
        idle = statuses.cluster(*(statuses.rank(n, statuses.group()) for n in range(4)))
        scene.take(idle)
        scene.page.sent()
        until(lambda: self._answered(scene))
        assert scene.page.sent() == []
        assert "Nothing is in flight." in scene.texts("head")[0]

    def _answered(self, scene: Scene) -> bool:
        if scene.button("yes").is_visible():
            scene.button("yes").click()
        return not scene.button("yes").is_visible()

    def test_escape_disarms(self, scene: Scene) -> None:
        scene.take(*simulated.hang(4, 2))
        scene.button("Abort").click()
        scene.page.page.keyboard.press("Escape")
        assert scene.button("Abort").is_visible()

    def test_what_failed_is_told_at_length(self, scene: Scene) -> None:
        scene.page.sent()
        scene.button("Diagnose").click()
        (request,) = scene.page.sent()
        why = "rank 2 did not answer; " * 20
        answer = {"type": "did", "id": request["id"], "ok": False, "text": why}
        scene.page.play(answer)
        assert scene.texts("news") == [why.strip()]

    def test_where_the_ranks_are_is_shown_and_leads_to_the_cell(
        self, scene: Scene
    ) -> None:
        page, panel = scene.page, scene.page.board().locator(".stacks")
        assert not panel.is_visible()
        page.sent()
        scene.button("Profile").click()
        (request,) = page.sent()
        assert (request["do"], request["seconds"]) == ("profile", 0)
        stacks = "ranks 0–3: at cell 7 line 3\n    cell 7 line 3  in <b>load</b>"
        answer = {"type": "did", "id": request["id"], "ok": True}
        page.play({**answer, "title": "Where the ranks were", "stacks": stacks})
        assert panel.locator("pre").inner_text() == stacks
        assert panel.get_by_role("button", name="cell 7 line 3").count() == 2
        page.shot("board-stacks")
        scene.button("Close").click()
        assert _focused(scene) == "Profile"
        assert not panel.is_visible()

    def test_a_flame_graph_is_sampled_and_works_in_the_board(
        self, scene: Scene
    ) -> None:
        page, panel = scene.page, scene.page.board().locator(".stacks")
        scene.button("Profile").click()
        answer = {"type": "did", "ok": True, "title": "Where the ranks were"}
        page.play({**answer, "id": page.sent()[-1]["id"], "stacks": "idle"})
        scene.button("Sample 5 s").click()
        assert scene.button("Sampling…").is_disabled()
        (request,) = page.sent()
        assert (request["do"], request["seconds"]) == ("profile", 5)
        seen = [
            (Stack(MAIN, (Frame("Cell In[7]", 3, "<module>", "load()", False),)), 5.0)
        ]
        report = ProfileReport(Profile({0: Sampled(5.0, 500, seen)}))
        page.play({**answer, "id": request["id"], "page": report.html()})
        picture = panel.frame_locator("iframe")
        call = picture.get_by_role("button", name="cell 7 line 3 · load()")
        call.click()
        assert picture.get_by_role("button", name="Zoom out").is_enabled()
        # It is as high as the picture.
        high = int(picture.locator("html").evaluate("page => page.offsetHeight"))
        until(lambda: panel.locator("iframe").get_attribute("height") == str(high))
        assert high < 150
        page.shot("board-flame-graph")
        assert scene.button("Sample 5 s").is_enabled()

    def test_a_look_at_the_ranks_that_failed_says_why(self, scene: Scene) -> None:
        scene.button("Profile").click()
        failed = {"type": "did", "id": scene.page.sent()[-1]["id"], "ok": False}
        scene.page.play({**failed, "text": "ranks 0–3 did not answer"})
        assert scene.texts("news") == ["ranks 0–3 did not answer"]
        assert not scene.page.board().locator(".stacks").is_visible()

    def test_an_aborted_group_can_be_rebuilt(self, scene: Scene) -> None:
        aborted = statuses.group(state="aborted", reason="by hand")
        scene.take(statuses.cluster(*(statuses.rank(n, aborted) for n in range(4))))
        assert scene.button("Abort").is_disabled()
        scene.page.sent()
        scene.button("Rebuild").click()
        assert scene.page.sent()[0]["do"] == "rebuild"

    def test_a_hang_that_is_over_is_a_line_that_can_be_dismissed(
        self, scene: Scene
    ) -> None:
        scene.take(*simulated.hang(4, 2))
        fresh = statuses.group(
            generation=1, completed=None, started=None, enqueued=None
        )
        scene.take(statuses.cluster(*(statuses.rank(n, fresh) for n in range(4))))
        until(lambda: scene.texts("last"))
        (line,) = scene.texts("last")
        assert line.startswith("The last hang, before the rebuild: rank 2 has not")
        assert (
            scene.page.board().locator(".last .place").inner_text() == "cell 7 line 5"
        )
        scene.page.sent()
        scene.button("Dismiss").click()
        assert _focused(scene).startswith("Idle")
        (request,) = scene.page.sent()
        assert request["do"] == "dismiss"
        for group in scene.model.groups:
            group.hang = None
        scene.page.play(scene.model.delta())
        assert scene.texts("last") == []

    def test_dead_ranks_are_restarted_if_one_says_so(self, scene: Scene) -> None:
        dead = statuses.rank(3, statuses.group(), state="dead", reason="killed")
        scene.take(statuses.cluster(dead))
        scene.page.sent()
        scene.button("Restart and rebuild").click()
        assert scene.texts("what") == ["Restart rank 3?"]
        assert scene.page.sent() == []

    def test_a_frozen_rank_is_restarted_if_one_says_so(self, scene: Scene) -> None:
        silent = statuses.rank(2, statuses.group(), state="busy", heartbeat_age=2.5)
        verdict = Verdict(
            Fault.RANK_NOT_RESPONDING,
            statuses.group().key,
            (2,),
            (),
            "",
            0,
            "rank 2 has not answered since 16:39:10: its process is stopped",
            certain=True,
        )
        scene.take(statuses.cluster(silent), [verdict])
        scene.button("Restart and rebuild").click()
        assert scene.texts("what") == ["Restart rank 2?"]

    def test_dead_ranks_are_named_as_everywhere(self, scene: Scene) -> None:
        group = statuses.group()
        ranks = [
            statuses.rank(n, group, state="idle" if n == 1 else "dead")
            for n in range(4)
        ]
        scene.take(statuses.cluster(*ranks))
        scene.button("Restart and rebuild").click()
        assert scene.texts("what") == ["Restart ranks 0, 2–3?"]

    def test_the_answer_to_another_page_is_none_of_ours(self, scene: Scene) -> None:
        scene.page.play({"type": "did", "id": "other-1", "ok": True, "text": "what?"})
        assert "what?" not in scene.texts("head")[0]


class TestKeyboard:
    def test_everything_can_be_reached(self, scene: Scene) -> None:
        scene.page.page.locator("body").press("Tab")
        reached = []
        for _ in range(7):
            reached.append(
                scene.page.page.evaluate(
                    """() => {
                      const at = document.activeElement?.shadowRoot?.activeElement;
                      return at?.getAttribute("aria-label") ?? at?.textContent;
                    }"""
                )
            )
            scene.page.page.keyboard.press("Tab")
        assert reached == [
            "Profile",
            "Diagnose",
            "Abort",
            "Rebuild",
            "default, 4 ranks, idle",
            "ranks, Enter for their lines",
            "Timeline",
        ]

    def test_the_lines_of_the_ranks_can_be_reached(self, scene: Scene) -> None:
        scene.take(*simulated.hang(4, 2))
        keyboard = scene.page.page.keyboard
        scene.page.board().locator(".rows").focus()
        for key, row in (("Enter", 0), ("ArrowDown", 1), ("ArrowDown", 2)):
            keyboard.press(key)
            assert _focused(scene) == "cell 7 line 5"
            links = scene.page.board().locator(".c-line .place")
            assert links.nth(row).evaluate("one => one.matches(':focus')")
        # This page has no such cell, and says so.
        keyboard.press("Enter")
        until(lambda: "No cell 7 is on this page: it has" in scene.texts("head")[0])
        keyboard.press("Escape")
        assert (
            scene.page.board().locator(".rows").evaluate("one => one.matches(':focus')")
        )

    @pytest.mark.parametrize(("sent", "leads"), [("1-4,9", 0), ("", 0), ("3,7-8", 1)])
    def test_a_cell_of_another_notebook_lights_none_here(
        self, scene: Scene, sent: str, leads: int
    ) -> None:
        """Ranks that two notebooks use: each has a cell 7."""
        scene.page.page.evaluate(_NOTEBOOK)
        status, verdicts = simulated.hang(4, 2)
        scene.take(replace(status, cells=sent), verdicts)
        scene.page.board().locator(".banner .place").click()
        assert scene.page.page.evaluate("() => window.gone") == leads
        said = "This cell 7 is another notebook's" in scene.texts("head")[0]
        assert said == (leads == 0)

    def test_keys_with_ctrl_are_left_to_the_page(self, scene: Scene) -> None:
        page = scene.page.page
        # As JupyterLab looks at it: at the document, before the board has the key.
        page.evaluate(
            """() => {
              window.left = [];
              document.addEventListener("keydown", (event) => {
                if (!event.target.hasAttribute("data-lm-suppress-shortcuts"))
                  window.left.push(event.key);
              }, true);
            }"""
        )
        scene.button("Diagnose").focus()
        for key in ("d", "Control+s", "d", "Meta+s", "ArrowDown"):
            page.keyboard.press(key)
        left = page.evaluate("window.left")
        assert [key for key in left if len(key) == 1] == ["s", "s"]
        assert "ArrowDown" not in left

    def test_arrows_go_from_tab_to_tab(self, scene: Scene) -> None:
        both = [
            statuses.rank(n, statuses.group(), statuses.group("tp", (0, 1)))
            for n in range(2)
        ]
        scene.take(statuses.cluster(*both, *idle(4)[2:]))
        tabs = scene.page.board().get_by_role("tab")
        tabs.nth(0).focus()
        for place in (1, 2):
            scene.page.page.keyboard.press("ArrowRight")
            assert tabs.nth(place).get_attribute("aria-selected") == "true"
        until(lambda: len(scene.page.rows()) == 3)
        scene.page.page.keyboard.press("Home")
        until(lambda: len(scene.page.rows()) == 5)


class TestAll:
    """The first tab, where there are several groups: each rank once, and the groups."""

    @staticmethod
    def _status(*names: str, **fields: Any) -> ClusterStatus:
        """Four ranks; groups of ranks 0 and 1 have the names, the last one `fields`."""
        groups = [statuses.group(name, (0, 1)) for name in names[:-1]]
        groups.append(statuses.group(names[-1], (0, 1), **fields))
        both = [statuses.rank(n, statuses.group(), *groups) for n in range(2)]
        return statuses.cluster(*both, *idle(4)[2:])

    def test_a_rank_is_in_the_op_of_whatever_group_it_is_in(self, scene: Scene) -> None:
        now = simulated.op(15, state="started", elapsed=2.0)
        scene.take(self._status("dp_2", "dp_10", oldest=now, in_flight=1))
        tabs = scene.page.board().locator(".tab .label")
        until(lambda: len(scene.page.rows()) == 5)
        assert tabs.all_inner_texts() == ["all", "default", "dp_2", "dp_10"]
        titles, *rows = scene.page.rows()
        shown = [[row[titles.index(one)] for one in ("op", "seq")] for row in rows]
        assert shown[:2] == [["dp_10 all_reduce", "#15"]] * 2
        assert shown[2:] == [["default all_reduce", "#14"]] * 2
        lines = scene.page.board().locator(".group-list tbody tr")
        assert lines.first.inner_text().split() == [
            *("dp_10", "0–1", "in", "flight", "all_reduce", "#15")
        ]
        lines.filter(has_text="dp_2").click()
        until(lambda: len(scene.page.rows()) == 3)
        assert not scene.page.board().locator(".group-list").is_visible()

    def test_a_group_that_a_cell_made_again_has_one_tab(self, scene: Scene) -> None:
        scene.take(self._status("rows", "rows (2)"))
        tabs = scene.page.board().locator(".tab .label")
        assert tabs.all_inner_texts() == ["all", "default", "rows (2)"]

    @pytest.mark.parametrize("width", [600, 1200])
    def test_names_can_be_read(self, browser: Browser, width: int) -> None:
        scene = Scene(browser, width=width)
        names = [f"data_parallel_{n}" for n in range(12)]
        scene.take(self._status(*names))
        labels = scene.page.board().locator(".tab .label, .group-list .of-name button")
        cut = labels.evaluate_all(
            "all => all.filter(one => one.scrollWidth > one.clientWidth + 1).length"
        )
        assert (labels.count(), cut) == (2 * 13 + 1, 0)
        # Long ones differ at their ends; the tab that is chosen is in sight.
        names = [
            f"a_rather_long_name_of_a_group_of_the_model_tp_{n}" for n in range(40)
        ]
        now = simulated.op(15, state="started", elapsed=2.0)
        scene.take(self._status(*names, oldest=now, in_flight=1))
        tabs = scene.page.board().locator(".tab .label")
        assert len({*tabs.all_inner_texts()}) == tabs.count() == 42
        assert scene.page.rows()[1][2] == "a_rather_lon…the_model_tp_39 all_reduce"
        scene.page.board().get_by_role("tab").first.press("End")
        hidden = "one => one.offsetTop - one.parentElement.offsetTop + one.offsetHeight"
        hidden += " > one.parentElement.scrollTop + one.parentElement.clientHeight"
        assert not scene.page.board().get_by_role("tab").last.evaluate(hidden)
        scene.close()


class TestTrouble:
    """The tab of a group in trouble opens by itself, once."""

    def troubled(self, scene: Scene, **fields: Any) -> None:
        status = statuses.cluster(
            *(
                statuses.rank(
                    n,
                    statuses.group(),
                    *([statuses.group("tp", (0, 1), **fields)] if n < 2 else []),
                )
                for n in range(4)
            )
        )
        scene.take(status)

    def shown(self, scene: Scene) -> str:
        tab = scene.page.board().get_by_role("tab", selected=True)
        return str(tab.inner_text()).split()[0]

    def test_it_opens(self, scene: Scene) -> None:
        self.troubled(scene)
        assert self.shown(scene) == "all"
        self.troubled(scene, state="aborted", reason="enough")
        until(lambda: self.shown(scene) == "tp")
        assert "strong" in str(scene.button("Rebuild").get_attribute("class"))
        # From then on it is the person's choice, until the next trouble.
        scene.page.board().get_by_role("tab").nth(1).click()
        self.troubled(scene, state="aborted", reason="enough, I said")
        assert self.shown(scene) == "default"
        self.troubled(scene)
        self.troubled(scene, state="aborted", reason="again")
        until(lambda: self.shown(scene) == "tp")

    def test_it_does_not_open_under_a_question(self, scene: Scene) -> None:
        """A yes would mean another group."""
        scene.take(*simulated.hang(4, 2))
        scene.button("Abort").click()
        self.troubled(scene, state="aborted", reason="enough")
        assert scene.texts("what") == ["Abort group 'default' on 4 ranks?"]
        assert self.shown(scene) == "default"


#: Puts the board into a notebook, and counts how often it leads to a line of cell 7.
_NOTEBOOK = """() => {
  window.gone = 0;
  Element.prototype.scrollIntoView = () => { window.gone += 1; };
  const live = document.querySelector(".rankscope-live");
  const notebook = document.createElement("div");
  notebook.className = "jp-Notebook";
  const lines = '<div class="cm-line">x</div>'.repeat(9);
  const prompt = '<div class="jp-InputPrompt">[7]:</div>';
  notebook.innerHTML = `<div class="jp-Cell">${prompt}${lines}</div>`;
  live.replaceWith(notebook);
  notebook.prepend(live);
}"""


class TestTimeline:
    def open(self, scene: Scene, found: dict[str, Any]) -> None:
        scene.button("Timeline").click()
        until(lambda: any(m.get("do") == "records" for m in scene.page.sent()))
        scene.page.play(found)

    def listen(self, scene: Scene) -> None:
        """Keep from now on what is written on a canvas, in ``window.written``."""
        scene.page.page.evaluate(
            """() => {
              window.written = [];
              const pen = CanvasRenderingContext2D.prototype, write = pen.fillText;
              window.colours = {};
              pen.fillText = function (text, ...rest) {
                window.written.push(text);
                (window.colours[text] ??= new Set()).add(this.fillStyle);
                return write.call(this, text, ...rest);
              };
            }"""
        )

    def written(self, scene: Scene) -> set[str]:
        """Return what was written since."""
        return set(scene.page.page.evaluate("() => window.written"))

    def test_the_lane_of_a_dead_rank_ends(self, scene: Scene) -> None:
        """Its records are gone with it: a lane without works is marked too."""
        self.listen(scene)
        self.open(scene, lanes())
        dead = statuses.rank(3, statuses.group(), state="dead", reason="killed")
        scene.take(statuses.cluster(*idle(4)[:3], dead))
        written = "() => window.written.filter((one) => one === 'dead').length"
        until(lambda: scene.page.page.evaluate(written) > 0, 30)
        rings = {rank: simulated.ring(rank, 4, count=8) for rank in range(3)}
        scene.page.page.evaluate("() => { window.written = []; }")
        scene.page.play(
            {"type": "timeline", "now": 100.0, **timeline(rings, {}, 10**9)}
        )
        until(lambda: scene.page.page.evaluate(written) > 0, 30)
        scene.page.shot("board-timeline-dead")

    def test_it_says_who_is_late(self, scene: Scene) -> None:
        self.open(scene, lanes(late=2, count=24))
        assert "rank 2 is last to enter" in scene.texts("tools")[0]
        # A minute later another cell runs: it is not about what is in sight by then.
        rings = {n: simulated.ring(n, 4, late=2, count=24) for n in range(4)}
        minute = 60 * 10**9
        running = simulated.record(25, minute, minute, 0, state="started")

        def told(text: str) -> None:
            found = timeline(rings, {}, minute + 10**9)
            scene.page.play({"type": "timeline", "now": 100.0, **found})
            until(lambda: text in scene.texts("tools")[0], 30)

        for ring in rings.values():
            ring["records"].append(running)
        told("")
        until(lambda: "last to enter" not in scene.texts("tools")[0], 30)
        canvas = scene.page.board().locator("canvas.lanes")
        canvas.press("a")
        told("rank 2 is last to enter")
        # Who is missing comes first.
        rings[2]["records"].pop()
        told("rank 2 has not entered all_reduce #25")
        # Not yet: it may be late, as it was before, and no longer be so.
        found = timeline(rings, {}, minute + 10**7)
        scene.page.play({"type": "timeline", "now": 1.0, **found})
        until(lambda: "has not entered" not in scene.texts("tools")[0], 30)

    def test_who_waits_itself_does_not_look_like_the_culprit(
        self, scene: Scene
    ) -> None:
        self.listen(scene)
        # Rank 0 waits for rank 1, which waits for rank 2.
        ranks = {"dp": [0, 1], "tp": [1, 2]}
        groups = {name: {"name": name, "ranks": ranks[name]} for name in ranks}
        rings: dict[int, Any] = {
            rank: {"rank": rank, "groups": groups, "records": []} for rank in range(3)
        }
        for rank, name in (0, "dp"), (1, "tp"):
            record = simulated.record(1, 1_000, 1_000, 0, "started")
            rings[rank]["records"].append({**record, "group": name, "group_id": name})
        found = timeline(rings, {}, 10**9)
        self.open(scene, {"type": "timeline", "now": 100.0, **found})
        scene.button("All groups").click()
        held = "not entered: waits in another op"
        scene.page.play()
        scene.page.page.evaluate("() => { window.colours = {}; }")
        scene.page.board().locator("canvas.lanes").press("a")
        scene.page.play()
        colours = "() => window.colours['not in all_reduce #1'].size"
        assert scene.page.page.evaluate(colours) == 2
        assert held in scene.texts("legend")[0]
        rings[1]["records"].clear()
        found = timeline(rings, {}, 10**9)
        scene.page.play({"type": "timeline", "now": 100.0, **found})
        until(lambda: held not in scene.texts("legend")[0], 30)

    def test_keys_go_from_work_to_work(self, scene: Scene) -> None:
        self.open(scene, lanes(late=2))
        canvas = scene.page.board().locator("canvas.lanes")
        canvas.press("ArrowRight")
        assert scene.texts("detail")[0].startswith("all_reduce #8 · rank 0 · completed")
        canvas.press("ArrowLeft")
        assert "all_reduce #7 · rank 0" in scene.texts("detail")[0]
        assert "waited 8" in scene.texts("detail")[0]
        canvas.press("ArrowDown")
        canvas.press("ArrowDown")
        assert "all_reduce #7 · rank 2" in scene.texts("detail")[0]
        assert "entered last, 8" in scene.texts("detail")[0]
        assert {"do": "source", "line": "cell 7 line 5"}.items() <= (
            scene.page.sent()[-1].items()
        )

    def test_pointing_tells_and_dragging_pans(self, scene: Scene) -> None:
        self.open(scene, lanes(late=2))
        canvas = scene.page.board().locator("canvas.lanes")
        box = canvas.bounding_box()
        assert box is not None
        mouse = scene.page.page.mouse
        mouse.move(box["x"] + box["width"] / 2, box["y"] + 10)
        until(lambda: "".join(scene.texts("tip")).startswith("all_reduce #"))
        before = canvas.screenshot()
        mouse.down()
        mouse.move(box["x"] + box["width"] / 2 + 80, box["y"] + 10, steps=4)
        mouse.up()
        scene.page.play()
        assert canvas.screenshot() != before
        assert scene.texts("detail") in ([""], [])

    def test_a_click_selects_and_a_place_leads_away(self, scene: Scene) -> None:
        board = scene.page.board()
        assert scene.texts("tools") == []
        scene.button("Timeline").click()
        assert scene.texts("tools")[0].startswith("Asking the ranks")
        scene.button("Timeline").click()
        self.open(scene, lanes(late=2))
        assert not scene.texts("tools")[0].startswith("Asking")
        scene.page.page.evaluate(_NOTEBOOK)
        canvas = board.locator("canvas.lanes")
        box = canvas.bounding_box()
        assert box is not None
        canvas.click(position={"x": box["width"] / 2, "y": 10})
        gone = "() => window.gone"
        assert scene.page.page.evaluate(gone) == 0
        assert scene.texts("detail")[0].startswith("all_reduce #")
        board.locator(".detail .place", has_text="cell 7 line 5").click()
        assert scene.page.page.evaluate(gone) == 1

    def test_many_lanes_are_three_that_open(self, scene: Scene) -> None:
        scene.model = BoardModel()
        scene.take(*simulated.hang(32, 9), after=100)
        scene.page.play(scene.model.full())
        self.listen(scene)
        self.open(scene, lanes(late=17, absent=9, size=32))
        canvas = scene.page.board().locator("canvas.lanes")

        def names() -> set[str]:
            """What stands before the lanes in sight."""
            scene.page.page.evaluate("() => { window.written = []; }")
            canvas.press("a")
            scene.page.play()
            written = scene.page.page.evaluate("() => window.written")
            return {one.strip() for one in written if re.match(r"[▸▾ ]|rank \d", one)}

        three = {"first", "median of 32", "last"}
        # The rank that is missing keeps its lane.
        assert {one.lstrip("▸ ") for one in names()} == {*three, "rank 9"}
        canvas.press("ArrowLeft")
        canvas.press("ArrowLeft")
        canvas.press("ArrowDown")
        canvas.press("ArrowDown")
        # That of the last one is rank 17's.
        assert "#8 · rank 17 · " in scene.texts("detail")[0]
        assert "entered last" in scene.texts("detail")[0]
        canvas.press("s")
        scene.page.play()
        told = scene.texts("range")[0]
        assert re.search(r"all_reduce\s+9\s.*rank 17, 8 times", told), told
        canvas.press("o")
        assert {"rank 4", "rank 12"} < names()
        scene.button("All ranks").click()
        assert "rank 4" not in names()

    def test_shift_zooms_into_what_is_marked(self, scene: Scene) -> None:
        self.open(scene, lanes(late=2))
        canvas = scene.page.board().locator("canvas.lanes")
        canvas.press("s")
        scene.page.play()
        ops = [int(re.findall(r"all_reduce\s+(\d+)", scene.texts("range")[0])[0])]
        box = canvas.bounding_box()
        assert box is not None
        mouse = scene.page.page.mouse
        mouse.move(box["x"] + box["width"] / 2, box["y"] + 10)
        scene.page.page.keyboard.down("Shift")
        mouse.down()
        mouse.move(box["x"] + box["width"] / 2 + 250, box["y"] + 10, steps=4)
        mouse.up()
        scene.page.page.keyboard.up("Shift")
        scene.page.play()
        ops += [int(re.findall(r"all_reduce\s+(\d+)", scene.texts("range")[0])[0])]
        assert ops == [8, ops[1]]
        assert 0 < ops[1] < 4

    def test_the_axis_counts_in_seconds_after_the_first(self, scene: Scene) -> None:
        self.listen(scene)
        rings = {rank: simulated.ring(rank, 4, count=8) for rank in range(4)}
        late = 180_000_000_000
        for one in rings.values():
            last = one["records"][-1]
            for key in ("time_created_ns", "time_started_ns", "time_ended_ns"):
                last[key] += late
        now = late + 2_000_000_000
        self.open(scene, {"type": "timeline", "now": 100.0, **timeline(rings, {}, now)})
        scene.page.page.evaluate("() => { window.written = []; }")
        scene.button("Last").click()
        until(
            lambda: any(
                re.fullmatch(r"180\.\d+ s", text)
                for text in scene.page.page.evaluate("() => window.written")
            )
        )
        written = scene.page.page.evaluate("() => window.written")
        assert not [
            text for text in written if re.match(r"\d{4,}(\.\d+)? (ms|µs)", text)
        ]

    def test_the_pause_between_two_cells_is_short(self, scene: Scene) -> None:
        self.listen(scene)
        rings = {rank: simulated.ring(rank, 4, count=8) for rank in range(4)}
        pause = 180_000_000_000
        for one in rings.values():
            for record in one["records"][4:]:
                for key in ("time_created_ns", "time_started_ns", "time_ended_ns"):
                    record[key] += pause
        now = pause + 2_000_000_000
        self.open(scene, {"type": "timeline", "now": 100.0, **timeline(rings, {}, now)})
        scene.button("All").click()
        until(lambda: "⋯ 180 s ⋯" in self.written(scene))
        # The bars are broad enough for their names, before the pause and behind it.
        until(lambda: {"all_reduce #2", "all_reduce #6"} <= self.written(scene))
        scene.page.shot("board-timeline-pause")
        scene.page.page.evaluate("() => { window.written = []; }")
        scene.page.board().locator("canvas.lanes").press("p")
        assert scene.button("Pauses").get_attribute("aria-pressed") == "true"
        until(lambda: any(one.endswith(" s") for one in self.written(scene)))
        assert not [one for one in self.written(scene) if "⋯" in one or "#" in one]

    def test_export_is_a_file(self, scene: Scene) -> None:
        self.open(scene, lanes())
        scene.page.sent()
        with scene.page.page.expect_download() as download:
            scene.button("Export").click()
            (request,) = scene.page.sent()
            trace = json.dumps({"traceEvents": []})
            answer = {"ok": True, "name": "trace.json", "json": trace}
            scene.page.play({"type": "did", "id": request["id"], **answer})
        assert download.value.suggested_filename == "trace.json"
        assert json.loads(download.value.path().read_text()) == {"traceEvents": []}

    def test_a_ring_that_is_empty(self, scene: Scene) -> None:
        groups = {"default": {"name": "default", "ranks": [0, 1, 2, 3]}}
        rings = {n: {"groups": groups, "records": []} for n in range(4)}
        self.open(scene, {"type": "timeline", "now": 100.0, **timeline(rings, {}, 5)})
        scene.page.board().locator("canvas.lanes").press("ArrowRight")


class TestHostile:
    def test_what_a_rank_sends_is_text(self, scene: Scene) -> None:
        evil = "<img src=x onerror='window.owned = 1'><script>window.owned = 1</script>"
        one = statuses.group(
            evil,
            backend=evil,
            devices={evil: evil},
            oldest=statuses.op(evil, source=evil, dtypes=(evil,), elapsed=1.0),
        )
        dead = statuses.rank(1, one, state="dead", reason=evil)
        scene.take(statuses.cluster(statuses.rank(0, one, host=evil), dead))
        # In the tab of all, and in that of the group.
        scene.page.page.set_viewport_size({"width": 4000, "height": 800})
        until(lambda: any("<img" in text for row in scene.page.rows() for text in row))
        scene.page.board().get_by_role("tab").last.click()
        until(lambda: any("<img" in text for row in scene.page.rows() for text in row))
        home = board_html(scene.model, evil, "the-board")
        scene.page.page.evaluate("html => (document.body.innerHTML = html)", home)
        scene.page.play()
        assert scene.page.page.evaluate("() => window.owned") is None

    @pytest.mark.parametrize(
        "message",
        [
            {"type": "delta", "v": 10**6, "now": 0},
            {"type": "delta"},
            {"type": "full", "v": 9, "now": 5, "rows": {"g9": {"0": {"mood": "x y"}}}},
            {"type": "nothing"},
            {},
        ],
    )
    def test_no_message_stops_it(self, scene: Scene, message: dict[str, Any]) -> None:
        scene.page.play(message, scene.model.full())
        assert scene.texts("c-state")[1:] == ["idle"] * 4


class TestHomes:
    def test_it_lives_in_the_output_and_leaves_it(self, scene: Scene) -> None:
        static = board_html(scene.model, "12:00:00", "the-board")
        page = scene.page.page
        page.evaluate("html => (document.body.innerHTML = html)", static)
        scene.page.play()
        assert page.locator(".rankscope-live").count() == 1
        assert not page.get_by_text("as of 12:00:00").is_visible()
        page.evaluate("() => window.leave()")
        assert page.locator(".rankscope-live").count() == 0
        assert page.get_by_text("as of 12:00:00").is_visible()

    def test_an_output_that_is_replaced_keeps_its_board(self, scene: Scene) -> None:
        scene.button("Rebuild").focus()
        scene.page.sent()
        static = board_html(scene.model, "12:00:00", "the-board")
        page = scene.page.page
        page.evaluate("html => (document.body.innerHTML = html)", static)
        scene.take(*simulated.hang(4, 2))
        assert scene.texts("c-state")[1:] == [
            "in flight",
            "in flight",
            "idle",
            "in flight",
        ]
        # Nobody left and nobody came, and the focus is where it was.
        assert scene.page.sent() == []
        focused = "button => button.getRootNode().activeElement === button"
        until(lambda: scene.button("Rebuild").evaluate(focused), 30)

    def test_output_that_is_cleared_ends_it(self, scene: Scene) -> None:
        scene.page.sent()
        scene.page.page.evaluate("() => (document.body.innerHTML = '')")
        scene.page.play()
        (last,) = scene.page.sent()
        assert last.keys() == {"unwatch"}

    def test_two_of_one(self, scene: Scene) -> None:
        page = scene.page.page
        home = "<div class='the-board'></div>"
        page.evaluate(
            "html => document.body.insertAdjacentHTML('beforeend', html)", home
        )
        scene.take(*simulated.hang(4, 2))
        for place in range(2):
            states = scene.page.board(place).locator(".row .c-state").all_inner_texts()
            assert states[3] == "idle"

    def test_an_ordinary_view_works_too(self, scene: Scene) -> None:
        page = scene.page.page
        page.evaluate(
            """() => { document.body.innerHTML = "<div id='view'></div>";
            window.unshow = window.show(document.querySelector("#view")); }"""
        )
        scene.take(*simulated.hang(4, 2))
        assert scene.texts("c-state")[3] == "idle"
        page.evaluate("() => window.unshow()")
        assert page.locator(".rankscope-live").count() == 0


class TestMany:
    @pytest.mark.parametrize(("size", "limit"), [(256, 60), (1024, 100)])
    def test_many_ranks_at_ten_updates_a_second(
        self, browser: Browser, record_property: Any, size: int, limit: float
    ) -> None:
        simulation = simulated.Simulation(size)
        scene = Scene(browser, width=1280)
        scene.take(simulation.step())
        updates, cost = [], 0.0
        for _ in range(20):
            status = simulation.step()
            scene.now += 0.1
            began = time.thread_time()
            scene.model.update(status, scene.now)
            updates.append(json.loads(json.dumps(scene.model.delta())))
            cost += time.thread_time() - began
        session = scene.page.page.context.new_cdp_session(scene.page.page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})

        def spent() -> float:
            metrics = session.send("Performance.getMetrics")["metrics"]
            return next(m["value"] for m in metrics if m["name"] == "TaskDuration")

        scene.page.page.evaluate("updates => { window.updates = updates }", updates)
        before = spent()
        scene.page.page.evaluate(
            """async () => { for (const update of window.updates) { window.play(update);
            await new Promise((done) => setTimeout(done, 100)) } }"""
        )
        page_ms = (spent() - before) / len(updates) * 1000
        kernel_ms = cost / len(updates) * 1000
        record_property("page_ms_per_update", round(page_ms, 1))
        record_property("kernel_ms_per_update", round(kernel_ms, 1))
        print(
            f"{size} ranks: page {page_ms:.1f} ms, kernel {kernel_ms:.1f} ms an update"
        )
        # Far from the limit even where others use the machine too.
        assert page_ms < limit
        assert scene.page.board().locator(".squares").is_visible()
        # All of them go on alike, whatever op each is in.
        assert [row[0] for row in scene.page.rows()[1:]] == [f"{size} ranks"]
        scene.close()

    def test_equal_ranks_are_one_row_behind_the_culprit(self, browser: Browser) -> None:
        scene = Scene(browser, width=1000)

        def ranks() -> list[str]:
            return [row[0] for row in scene.page.rows()[1:]]

        def press(name: str) -> None:
            scene.button(name).click()
            scene.page.play()

        scene.take(*simulated.hang(64, 41))
        titles, culprit, others = scene.page.rows()
        told = [titles.index(one) for one in ("rank", "op", "seq", "verdict")]
        assert [culprit[n] for n in told] == ["41", "all_reduce", "#13", "not entered"]
        waits = "waits for rank 41"
        assert [others[n] for n in told] == ["63 ranks", "all_reduce", "#14", waits]
        fold = scene.button("63 ranks")
        assert fold.get_attribute("title") == "ranks 0–40, 42–63"
        press("63 ranks")
        assert fold.get_attribute("aria-expanded") == "true"
        # The browser does not write out rows that are out of sight.
        assert (ranks()[:4], len(ranks())) == (["41", "63 ranks", "0", "1"], 65)
        press("63 ranks")
        assert ranks() == ["41", "63 ranks"]
        # A square of the map leads to its row: 41 stand in a line, of 24 px each.
        squares = scene.page.board().locator(".squares")
        squares.click(position={"x": 24 * 20 + 5, "y": 18 + 5})
        scene.page.play()
        assert len(ranks()) == 65
        press("63 ranks")
        press("Culprits only")
        # Also below the mouse it looks pressed.
        pressed = [
            scene.button(name).evaluate("it => getComputedStyle(it).backgroundColor")
            for name in ("Culprits only", "Fold equal rows")
        ]
        assert pressed[0] == pressed[1]
        assert ranks() == ["41"]
        assert "1 of 64 ranks" in scene.texts("table-tools")[0]
        press("Culprits only")
        scene.page.board().get_by_label("filter").fill("40-42")
        scene.page.play()
        assert ranks() == ["41", "2 ranks"]
        press("Fold equal rows")
        assert ranks() == ["40", "41", "42"]
        scene.page.board().get_by_label("sort by").select_option("seq")
        scene.page.play()
        assert ranks() == ["41", "40", "42"]
        # The title of a column does the same: once more for the highest first.
        title = scene.page.board().get_by_role("columnheader", name="seq")
        assert title.get_attribute("aria-sort") == "ascending"
        title.click()
        scene.page.play()
        assert ranks() == ["40", "42", "41"]
        scene.page.shot("board-folded")
        scene.close()

    def test_a_rank_that_changes_leaves_its_fold(self, browser: Browser) -> None:
        scene = Scene(browser, width=1000)
        scene.take(statuses.cluster(*idle(64)))
        assert [row[0] for row in scene.page.rows()[1:]] == ["64 ranks"]
        dead = statuses.rank(9, statuses.group(), state="dead", reason="killed")
        everyone = [*idle(64)[:9], dead, *idle(64)[10:]]
        scene.take(statuses.cluster(*everyone))
        assert [row[0] for row in scene.page.rows()[1:]] == ["9", "63 ranks"]
        scene.take(statuses.cluster(*idle(64)))
        assert [row[0] for row in scene.page.rows()[1:]] == ["64 ranks"]
        scene.close()

    def test_who_is_to_blame_is_in_sight(self, browser: Browser) -> None:
        scene = Scene(browser, width=1000)
        scene.take(*simulated.hang(256, 137))
        blamed = scene.page.board().locator(".row.blamed")
        until(lambda: blamed.is_visible())
        rows = scene.page.board().locator(".rows").bounding_box()
        row = blamed.bounding_box()
        assert rows is not None
        assert row is not None
        assert rows["y"] < row["y"] < rows["y"] + rows["height"]
        scene.close()


class TestMap:
    @staticmethod
    def _hang() -> tuple[ClusterStatus, list[Verdict]]:
        """Rank 9 of a mesh of 4 × 4 on two hosts is missing."""
        status, verdicts = simulated.hang(16, 9)
        ranks = [
            replace(
                one,
                host=f"node-{one.rank // 8}",
                memory=(one.rank + 1) << 30,
                groups=(
                    *one.groups,
                    statuses.group("dp", range(one.rank % 4, 16, 4)),
                    statuses.group(
                        "tp", range(one.rank // 4 * 4, one.rank // 4 * 4 + 4)
                    ),
                ),
            )
            for one in status.ranks
        ]
        return replace(status, ranks=tuple(ranks)), verdicts

    def test_keys_go_from_rank_to_rank_of_a_mesh(self, browser: Browser) -> None:
        scene = Scene(browser, width=1000, height=700)
        scene.take(*self._hang())
        assert "rows: dp, columns: tp" in scene.texts("map")[0]
        squares = scene.page.board().locator(".squares")
        assert str(squares.get_attribute("aria-label")).startswith(
            "map of 16 ranks: rank 9 not entered; "
        )
        tip = scene.page.board().locator(".map .tip")
        squares.press("ArrowDown")
        # The first key goes to who is at fault.
        assert tip.inner_text().splitlines()[:3] == ["rank 9", "dp 2, tp 1", "idle"]
        squares.press("ArrowDown")
        squares.press("ArrowRight")
        assert tip.inner_text().splitlines()[:2] == ["rank 14", "dp 3, tp 2"]
        scene.page.board().get_by_label("colour of the map").select_option("memory")
        assert "1 GiB\n16 GiB" in scene.texts("map")[0]
        squares.press("Home")
        assert tip.inner_text().splitlines()[-1] == "memory 1 GiB"
        squares.press("Escape")
        assert not tip.is_visible()
        scene.close()

    def test_its_colours_are_those_of_the_theme(self, browser: Browser) -> None:
        scene = Scene(browser, width=1000, height=700)
        scene.take(*self._hang())

        def colour() -> list[int]:
            """Of the square of rank 0, beside its number."""
            return (
                scene.page.board()
                .locator(".squares")
                .evaluate(
                    "one => [...one.getContext('2d').getImageData("
                    "one.width / 2, 4, 1, 1).data]"
                )
            )

        before = colour()
        theme = ";".join(f"{name}:{value}" for name, value in DARK.items())
        scene.page.page.evaluate("style => { document.body.style = style; }", theme)
        until(lambda: colour() != before)
        scene.close()

    def test_without_a_mesh_it_shows_hosts(self, browser: Browser) -> None:
        scene = Scene(browser, width=1000, height=700)
        ranks = [replace(one, host=f"n{one.rank // 8}") for one in idle(32)]
        scene.take(statuses.cluster(*ranks))
        assert scene.texts("map")[0].endswith("by host")
        squares = scene.page.board().locator(".squares")
        squares.hover(position={"x": 30, "y": 5})
        tip = scene.page.board().locator(".map .tip")
        until(lambda: tip.inner_text().splitlines()[:2] == ["rank 0", "n0"])
        # What is not known is no colour to choose.
        options = scene.page.board().get_by_label("colour of the map")
        assert options.inner_text().split("\n") == ["colour: state"]
        scene.close()


class TestOtherFrontEnds:
    """What VS Code and Colab grant a widget, as far as a page can stand in for them."""

    #: Of VS Code's web view of outputs: nothing may be fetched or framed but this.
    VS_CODE = (
        "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval' blob:; "
        "style-src 'unsafe-inline'; child-src https: data:"
    )

    @pytest.mark.parametrize(
        "limits",
        [{"policy": VS_CODE}, {"sandbox": "allow-scripts"}],
        ids=["vs-code", "colab"],
    )
    def test_a_view_works_within_their_limits(
        self, browser: Browser, limits: dict[str, str]
    ) -> None:
        """The board is an ordinary view, as no output of a cell is in its page."""
        scene = Scene(browser, home="<div id='view'></div>", **limits)
        assert scene.page.frame.evaluate("() => window.jupyterapp") is None
        scene.page.frame.evaluate(
            "() => { window.show(document.querySelector('#view')); }"
        )
        scene.take(*simulated.hang(4, 2))
        assert scene.texts("banner")[0].startswith("Missing ranks Rank 2")
        scene.button("Timeline").click()
        scene.page.play(lanes(late=2, absent=2))
        scene.button("Profile").click()
        answer = {"type": "did", "ok": True, "title": "Where the ranks were"}
        seen = [(Stack(MAIN, (Frame("Cell In[7]", 3, "f", "load()", False),)), 5.0)]
        picture = ProfileReport(Profile({0: Sampled(5.0, 500, seen)})).html()
        asked = [one["id"] for one in scene.page.sent() if one.get("do") == "profile"]
        scene.page.play({**answer, "id": asked[-1], "page": picture})
        flames = scene.page.board().frame_locator("iframe")
        flames.get_by_role("button", name="cell 7 line 3 · load()").click()
        assert flames.get_by_role("button", name="Zoom out").is_enabled()
        scene.close()


def _transports(rank: int, size: int, per_host: int) -> dict[str, tuple[int, ...]]:
    others = [other for other in range(size) if other != rank]
    here = tuple(one for one in others if one // per_host == rank // per_host)
    return {"shm,cma": here, "tcp": tuple(one for one in others if one not in here)}
