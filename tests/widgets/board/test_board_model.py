"""What the board says of given ranks, and what of it travels to the page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rankscope.backends.groups.key import GroupKey
from rankscope.backends.observe.verdicts import (
    Absence,
    Fault,
    Verdict,
    Waiting,
)
from rankscope.engines import ClusterStatus, GroupStatus, OpStatus, RankStatus
from rankscope.engines.observe.rank_registry import RankRegistry
from rankscope.engines.observe.rank_slots import RankSlot
from rankscope.widgets.board.columns import shown
from rankscope.widgets.board.html import board_html, hang_html
from rankscope.widgets.board.model import BoardModel, Message
from rankscope.widgets.board.text import board_text
from tests.widgets import simulated
from tests.widgets.statuses import cluster, group, op, rank
from tests.widgets.untrusted import words

#: A group that was rebuilt, and has had no op since.
FRESH = group(generation=1, completed=None, started=None, enqueued=None)


def model(*ranks: RankStatus, now: float = 100.0) -> BoardModel:
    found = BoardModel()
    found.update(cluster(*ranks), now)
    found.delta()
    return found


class Page:
    """What a page knows after the messages it was sent: the JavaScript's part."""

    def __init__(self, full: Message) -> None:
        self.state = json.loads(json.dumps(full, allow_nan=False))

    def take(self, message: Message | None) -> None:
        if message is None:
            return
        delta = json.loads(json.dumps(message, allow_nan=False))
        assert delta["v"] == self.state["v"] + 1
        rows = self.state["rows"]
        for key in ("head", "banner", "groups", "v", "now"):
            self.state[key] = delta.get(key, self.state[key])
        for name, ranks in delta.get("rows", {}).items():
            for number, cells in ranks.items():
                if cells is None:
                    del rows[name][number]
                    continue
                row = rows.setdefault(name, {}).setdefault(number, {})
                row.update(cells)
                for key in [key for key, value in row.items() if value is None]:
                    del row[key]
        there = {one["id"] for one in self.state["groups"]}
        self.state["rows"] = {key: rows[key] for key in rows if key in there}


class TestRows:
    def row(self, one: RankStatus) -> dict[str, Any]:
        found = model(one)
        return dict(found.groups[0].row(one.rank))

    def test_in_flight(self) -> None:
        now = simulated.op(14, state="started", elapsed=6.0)
        done = simulated.op(13, duration=2e-3)
        one = group(completed=done, oldest=now, in_flight=3)
        row = self.row(rank(2, one, state="busy", heartbeat_age=0.5))
        assert row["state"] == "in flight"
        assert (row["op"], row["seq"], row["line"]) == (
            "all_reduce",
            "#14",
            "cell 7 line 5",
        )
        assert (row["size"], row["dtype"], row["shape"]) == (
            "4 MiB",
            "float32",
            "1024×1024",
        )
        # It was in flight for 6 s when it said so, half a second ago.
        assert row["since"] == pytest.approx(93.5)
        assert row["limit"] == 300.0
        assert row["queue"] == 3
        # 4 MiB in 2 ms; on the bus 2·3/4 times as much.
        assert row["last"] == "2.00 ms"
        assert (row["algbw"], row["busbw"]) == ("2.10 GB/s", "3.15 GB/s")

    def test_the_part_of_a_core_is_a_short_text(self) -> None:
        assert self.row(rank(0, group(), cpu=1.254))["cpu"] == "125%"
        assert "cpu" not in self.row(rank(0, group()))
        # It comes from another process.
        assert len(self.row(rank(0, group(), cpu=1e300))["cpu"]) == 12

    @pytest.mark.parametrize("state", ["scheduled", "started"])
    def test_who_waits_is_in_flight_in_every_op(self, state: str) -> None:
        one = group(oldest=op(state=state, elapsed=1.0))
        assert self.row(rank(0, one))["state"] == "in flight"

    def test_idle_shows_the_last_op_and_no_clock(self) -> None:
        row = self.row(rank(0, group()))
        assert (row["state"], row["seq"]) == ("idle", "#14")
        assert "since" not in row

    def test_sends_and_receives_say_with_whom(self) -> None:
        def said(one: OpStatus, ranks: tuple[int, ...] = (4, 6)) -> object:
            return self.row(rank(4, group(ranks=ranks, completed=one)))["op"]

        # The peer is a rank of the group.
        assert said(op("send", 3, peer=1, tag=7)) == "send → 6 tag 7"
        assert said(op("recv", 3, peer=1)) == "recv ← 6"
        assert said(op("recv", 3, tag=0)) == "recv tag 0"
        assert said(op("broadcast", 3, peer=1)) == "broadcast"
        # As another process may send it.
        assert said(op("send", 3, peer=-1)) == said(op("send", 3, peer=9)) == "send"

    def test_the_time_in_flight_is_against_the_median_of_the_op(self) -> None:
        found = BoardModel()

        def usual(*seconds: float, size: int = 1024, seq: int = 1) -> object:
            for place, one in enumerate(seconds, seq):
                done = op(seq=place, nbytes=1024, duration=one)
                found.update(cluster(rank(0, group(completed=done))), place)
            flying = op(seq=99, nbytes=size, state="started", elapsed=6.0)
            found.update(cluster(rank(0, group(oldest=flying, completed=done))), 99)
            return found.groups[0].row(0).get("usual")

        assert usual(0.3, 5e-3, 2e-3) == "5.00 ms"
        # A status that says the same again is no other op.
        assert usual(2e-3, seq=3) == "5.00 ms"
        assert usual(-1.0, 4e-3, seq=4) == "4.50 ms"
        # How long ops of another size take says nothing of this one.
        assert usual(4e-3, seq=9, size=4096) is None

    def test_in_a_cell(self) -> None:
        row = self.row(rank(0, group(), state="busy", cell=7, busy_for=3.0))
        assert (row["state"], row["mood"]) == ("in cell 7", "busy")
        assert row["since"] == pytest.approx(96.8)
        assert "limit" not in row

    def test_where_a_rank_computes_and_for_how_long(self) -> None:
        busy = {"state": "busy", "cell": 7, "line": "cell 7 line 4"}
        last = group(completed=op(source="cell 7 line 2"))
        row = self.row(rank(0, last, **busy, line_for=12.0))
        assert row["line"] == "cell 7 line 4"
        assert row["at"] == pytest.approx(87.8)
        assert shown(0, row, 100.0).texts["line"] == "cell 7 line 4 for 12 s"
        brief = self.row(rank(0, last, **busy, line_for=0.0))
        assert shown(0, brief, 100.0).texts["line"] == "cell 7 line 4"
        # Who waits in an op is at the line of the op.
        waits = group(oldest=op(source="cell 7 line 2", elapsed=12.0))
        row = self.row(rank(0, waits, **busy, line_for=12.0))
        assert row["line"] == "cell 7 line 2"
        assert "at" not in row

    def test_a_rank_that_stays_at_its_line_changes_nothing(self) -> None:
        busy = {"state": "busy", "line": "cell 7 line 4"}
        found = model(rank(0, group(), **busy, line_for=0.0))
        for second in range(1, 4):
            one = rank(0, group(), **busy, line_for=second + 0.1 * (second % 2))
            found.update(cluster(one), 100.0 + second)
            assert "rows" not in (found.delta() or {})

    @pytest.mark.parametrize(
        ("fields", "state", "mood"),
        [
            ({"state": "dead", "reason": "killed"}, "dead", "error"),
            ({"state": "unreachable", "heartbeat_age": 7.0}, "no answer", "error"),
            ({"heartbeat_age": 4.0}, "silent", "warning"),
        ],
    )
    def test_trouble(self, fields: dict[str, Any], state: str, mood: str) -> None:
        row = self.row(rank(0, group(), **fields))
        assert (row["state"], row["mood"]) == (state, mood)

    def test_a_beat_is_no_news_but_its_absence_is(self) -> None:
        assert self.row(rank(0, group(), heartbeat_age=0.9))["silent"] == 0
        silent = self.row(rank(0, group(), heartbeat_age=4.0))["silent"]
        assert silent == pytest.approx(96.0)

    def test_aborted(self) -> None:
        row = self.row(rank(0, group(state="aborted", reason="by hand")))
        assert row["state"] == "aborted"

    def test_a_dead_rank_shows_the_last_line_that_it_was_at(self) -> None:
        last = group(completed=op(source="cell 6 line 2"))
        dead = {"state": "dead", "reason": "killed", "line": "cell 7 line 4"}
        row = self.row(rank(0, last, **dead))
        assert row["line"] == "cell 7 line 4"
        assert "at" not in row
        # In an op it was at the line of the op.
        waited = group(oldest=op(source="cell 7 line 2", elapsed=12.0))
        assert self.row(rank(0, waited, **dead))["line"] == "cell 7 line 2"

    def test_who_computes_on_after_an_abort_shows_where(self) -> None:
        aborted = group(state="aborted", reason="by hand")
        row = self.row(
            rank(0, aborted, state="busy", cell=7, line="cell 7 line 5", line_for=9.0,
                 busy_for=12.0)
        )  # fmt: skip
        assert (row["state"], row["mood"]) == ("aborted", "error")
        assert row["line"] == "cell 7 line 5"
        assert row["at"] == pytest.approx(90.8)
        assert row["since"] == pytest.approx(87.8)

    def test_devices_in_use_come_first(self) -> None:
        devices = {"cpu": "tcp (not built)", "cuda": "nccl"}
        assert self.row(rank(0, group(devices=devices)))["device"] == "cuda:nccl, cpu"


class TestGroups:
    def test_a_tab_for_each(self) -> None:
        found = model(
            rank(0, group(), group("tp", (0, 1))), rank(1, group(), group("tp", (0, 1)))
        )
        assert [tab["label"] for tab in found.tabs()] == ["default", "tp"]
        assert found.tabs()[1]["facts"] == ["ranks 0–1", "cpu:tcp", "timeout 30 min"]
        assert found.tabs()[1]["last"] == "last all_reduce #14"

    def test_disjoint_groups_of_one_name_are_told_apart(self) -> None:
        found = model(rank(0, group("tp", (0, 1))), rank(2, group("tp", (2, 3))))
        assert [tab["label"] for tab in found.tabs()] == ["tp (0–1)", "tp (2–3)"]

    def test_the_groups_of_a_mesh_are_in_the_order_of_their_ranks(self) -> None:
        mesh = [("dp", (1, 3)), ("tp", (2, 3)), ("dp", (0, 2)), ("tp", (0, 1))]
        found = model(
            *(
                rank(n, group(), *(group(*one) for one in mesh if n in one[1]))
                for n in (3, 0, 1, 2)
            )
        )
        assert [tab["label"] for tab in found.tabs()] == [
            "default",
            "dp (0,2)",
            "dp (1,3)",
            "tp (0–1)",
            "tp (2–3)",
        ]

    def test_numbers_in_names_are_in_their_order(self) -> None:
        names = ["dp_10", "tp", "dp_9", "dp_1", "a1b2", "a1b10"]
        found = model(rank(0, group(), *(group(name, (0, 1)) for name in names)))
        order = ["default", "a1b2", "a1b10", "dp_1", "dp_9", "dp_10", "tp"]
        assert [one["label"] for one in found.tabs()] == order

    def test_an_idle_group_of_which_a_cell_made_another_is_a_copy(self) -> None:
        def copies(*groups: GroupStatus) -> list[str]:
            tabs = model(rank(0, group(), *groups)).tabs()
            return [tab["label"] for tab in tabs if tab["copy"]]

        rows = [group(name, (0, 1)) for name in ("rows", "rows (2)", "rows (10)")]
        assert copies(*rows[:1]) == []
        assert copies(*rows) == ["rows", "rows (2)"]
        # One that is used, or has others' ranks, is none.
        used = replace(rows[0], in_flight=1, oldest=op(elapsed=1.0))
        assert copies(used, rows[1]) == []
        assert copies(rows[0], group("rows (2)", (0, 2))) == []

    def test_the_copy_that_has_the_tab_says_which_one_it_is(self) -> None:
        names = ("rows", "rows (3)", "cols (2)")
        found = model(rank(0, *(group(name, (0, 1)) for name in names)))
        facts = {tab["label"]: tab["facts"][:2] for tab in found.tabs()}
        assert facts["rows (3)"] == ["ranks 0–1", "number 3 of this name"]
        # Of one whose name may be a program's own nothing is known.
        assert facts["cols (2)"] == ["ranks 0–1", "cpu:tcp"]

    def test_a_group_that_hangs_says_so(self) -> None:
        status, verdicts = simulated.hang(4, 2)
        found = model(*status.ranks)
        (tab,) = found.tabs()
        assert (tab["mood"], tab["state"], tab["verdict"]) == (
            "working",
            "in flight",
            "",
        )
        found.show_verdicts(verdicts)
        (tab,) = found.tabs()
        told = "missing ranks: rank 2"
        assert (tab["mood"], tab["state"], tab["verdict"]) == ("error", "hung", told)

    def test_a_group_of_another_library_is_marked(self) -> None:
        first = [
            group("default_pg", library="torch"),
            group("tp", [0], library="torch"),
        ]
        second = [group("default_pg", library="torch"), group("tp", [1])]
        found = model(rank(0, *first), rank(1, *second))
        labels = [tab["label"] for tab in found.tabs()]
        assert labels == ["default_pg · torch", "tp (0) · torch", "tp (1)"]

    def test_a_rank_without_a_group_is_seen_all_the_same(self) -> None:
        found = model(rank(0, group()), rank(1))
        assert [tab["label"] for tab in found.tabs()] == ["default", "no group"]

    def test_a_group_that_is_gone_has_no_tab(self) -> None:
        found = model(rank(0, group(), group("tp", (0,))))
        page = Page(found.full())
        found.update(cluster(rank(0, group())), 101.0)
        page.take(found.delta())
        assert [one["name"] for one in page.state["groups"]] == ["default"]
        assert page.state == {**found.full(), "rows": page.state["rows"]}
        assert len(page.state["rows"]) == 1


class TestLag:
    def ranks(self, *issued: int) -> list[RankStatus]:
        return [
            rank(number, group(issued=count)) for number, count in enumerate(issued)
        ]

    def test_ranks_in_step_are_never_behind(self) -> None:
        found = model(*self.ranks(10, 12, 11))
        for step in range(1, 40):
            found.update(
                cluster(*self.ranks(10 + step, 12 + step, 11 + step)), 100 + step / 10
            )
            found.delta()
            assert all("lag" not in row for row in found.groups[0].rows().values())

    def test_one_that_stands_still_is_behind(self) -> None:
        found = model(*self.ranks(10, 12, 12))
        found.update(cluster(*self.ranks(10, 12, 12)), 101.5)
        found.delta()
        rows = found.groups[0].rows()
        assert rows[0]["lag"] == 2
        assert "lag" not in rows[1]

    def test_who_has_waited_is_not_late_when_another_goes_on(self) -> None:
        found = model(*self.ranks(10, 10))
        found.update(cluster(*self.ranks(10, 11)), 160.0)
        found.delta()
        assert "lag" not in found.groups[0].row(0)

    def test_a_new_generation_begins_anew(self) -> None:
        found = model(*self.ranks(10, 12))
        found.update(cluster(*self.ranks(0, 0)), 105.0)
        found.delta()
        assert all("lag" not in row for row in found.groups[0].rows().values())


class TestBanner:
    def test_idle(self) -> None:
        assert model(rank(0, group())).banner().title == "Idle"

    def test_a_cell(self) -> None:
        found = model(
            *(rank(n, group(), state="busy", cell=7) for n in range(3)),
            rank(3, group()),
        )
        assert str(found.banner()) == "Running: Ranks 0–2 run cell 7."

    def test_a_wait_says_who_is_not_there(self) -> None:
        status, _ = simulated.hang(4, 2)
        found = model(*status.ranks)
        assert str(found.banner()) == (
            "In flight: Ranks 0–1, 3 are in all_reduce #14, rank 2 is idle. "
            "It fails after 5 min."
        )

    def test_ops_that_fly_by_are_not_named(self) -> None:
        found = model(*simulated.Simulation(4).step().ranks)
        assert str(found.banner()) == "Running: Ranks 0–3 run cell 7."

    def test_the_first_op_says_how_many_ranks_have_connected(self) -> None:
        first = simulated.op(1, state="scheduled", elapsed=0.7)
        new: dict[str, Any] = {"completed": None, "oldest": first, "in_flight": 1}
        waits = group(**new)
        ready = group(**new, transports={"shm": (1, 2)})
        busy: dict[str, Any] = {"state": "busy", "cell": 7}
        found = model(*(rank(n, ready if n else waits, **busy) for n in range(4)))
        assert str(found.banner()) == (
            "Connecting: 3 of 4 ranks have connected, for all_reduce #1."
        )
        # One that is not in the op connects to nobody.
        away = model(
            rank(0, group(completed=None)), *(rank(n, ready) for n in (1, 2, 3))
        )
        assert "onnect" not in str(away.banner())
        # Of the transports of this backend nothing is known.
        assert "onnect" not in str(model(*(rank(n, waits) for n in range(4))).banner())

    def test_a_verdict_goes_before_everything(self) -> None:
        status, verdicts = simulated.hang(4, 2)
        found = model(*status.ranks)
        found.show_verdicts(verdicts)
        banner = found.banner()
        assert (banner.mood, banner.title) == ("error", "Missing ranks")
        assert banner.text.startswith("Rank 2 has not entered all_reduce #14")
        found.delta()
        rows = found.groups[0].rows()
        assert rows[2]["verdict"] == "not entered"
        assert rows[2]["blame"] == 1
        assert rows[0]["verdict"] == "waits for rank 2"
        found.show_verdicts([])
        found.delta()
        assert all("verdict" not in row for row in found.groups[0].rows().values())

    def test_a_verdict_of_another_group_leaves_rows_alone(self) -> None:
        found = model(rank(0, group()))
        other = GroupKey("tp", (0, 1, 2, 3))
        found.show_verdicts(
            [Verdict(Fault.RANK_DEAD, other, (0,), (), "", 0, "rank 0 is dead")]
        )
        found.delta()
        assert "verdict" not in found.groups[0].row(0)

    def test_of_two_groups_of_one_name_only_the_one_that_hangs_has_the_verdict(
        self,
    ) -> None:
        now = simulated.op(14, state="started", elapsed=6.0)
        hangs = group("tp", (0, 1), started=now, oldest=now, in_flight=1, issued=14)
        absent = group("tp", (0, 1), issued=13)
        # The first of the two on the board; rank 0 waits at the same number there.
        other = group("tp", (0, 2), started=now, oldest=now, in_flight=1, issued=14)
        found = model(
            rank(0, other, hangs, state="busy", cell=7),
            rank(1, absent),
            rank(2, other, state="busy", cell=7),
        )
        found.show_verdicts(
            [Verdict(Fault.MISSING_RANKS, hangs.key, (1,), (0,), now.op, 14, "why")]
        )
        found.delta()
        tabs = {one.key: one for one in found.groups}
        assert tabs[hangs.key].row(1)["verdict"] == "not entered"
        assert tabs[hangs.key].row(0)["verdict"] == "waits for rank 1"
        rows = tabs[other.key].rows().values()
        assert not any("verdict" in row or "blame" in row for row in rows)
        banner = found.banner()
        assert banner.text == "Why (group 'tp (0–1)')."
        assert banner.groups == (tabs[hangs.key].id,)

    def test_who_waits_in_another_group_waits_for_the_cause(self) -> None:
        now = simulated.op(14, state="started", elapsed=6.0)
        hangs = group("tp", (0, 1), started=now, oldest=now, in_flight=1, issued=14)
        follows = group("dp", (0, 2), started=now, oldest=now, in_flight=1, issued=14)
        found = model(
            rank(0, group("dp", (0, 2)), hangs, state="busy", cell=7),
            rank(1, group("tp", (0, 1), issued=13)),
            rank(2, follows, state="busy", cell=7),
        )
        cause = Verdict(
            *(Fault.MISSING_RANKS, hangs.key, (1,), (0, 2), now.op, 14, "why"),
            consequences=("rank 2 waits in all_reduce #14 of group 'dp'",),
            groups=(follows.key, hangs.key),
        )
        found.show_verdicts([cause])
        found.delta()
        told = {tab["name"]: tab["verdict"] for tab in found.tabs()}
        assert told == {"tp": "missing ranks: rank 1", "dp": "because of group 'tp'"}
        tabs = {one.key: one for one in found.groups}
        assert tabs[hangs.key].row(1)["verdict"] == "not entered"
        assert tabs[follows.key].row(2)["verdict"] == "waits for rank 1"
        # It is in the op of the other tab.
        assert "verdict" not in tabs[follows.key].row(0)
        said = "Why; rank 2 waits in all_reduce #14 of group 'dp'."
        assert found.banner().text == said
        # That of the cause opens.
        ids = tabs[hangs.key].id, tabs[follows.key].id
        assert found.banner().groups == ids

    def test_who_wait_for_each_other_are_marked_in_every_tab_of_theirs(self) -> None:
        now = simulated.op(14, state="started", elapsed=6.0)
        flying: dict[str, Any] = {"started": now, "oldest": now, "in_flight": 1}
        one, two = group("a", (0, 1), **flying), group("b", (0, 1), **flying)
        found = model(
            rank(0, one, group("b", (0, 1)), state="busy", cell=7),
            rank(1, group("a", (0, 1)), two, state="busy", cell=7),
        )
        # Rank 0 is the only one that has another order.
        waits = (
            Waiting((0,), "all_reduce #14", "a", (1,)),
            Waiting((1,), "…", "b", (0,)),
        )
        ring = Verdict(
            *(Fault.DEADLOCK, one.key, (0,), (1,), now.op, 14, "why"),
            groups=(one.key, two.key),
            cycle=waits,
        )
        found.show_verdicts([ring])
        found.delta()
        rows = [tab.row(number) for tab in found.groups for number in (0, 1)]
        assert [row["verdict"] for row in rows] == ["deadlock"] * 4
        told = [tab["verdict"] for tab in found.tabs()]
        assert told == ["deadlock: ranks 0–1"] * 2

    def test_groups_that_wait_for_one_rank_have_one_verdict(self) -> None:
        now = simulated.op(14, state="started", elapsed=6.0)
        flying: dict[str, Any] = {"started": now, "oldest": now, "in_flight": 1}
        found = model(
            rank(0, group("rows", (0, 1), **flying), state="busy", cell=7),
            rank(1, group("rows", (0, 1)), group("cols", (1, 2))),
            rank(2, group("cols", (1, 2), **flying), state="busy", cell=7),
        )
        rows, cols = (one.key for one in found.groups)
        waits = (Waiting((0,), "all_reduce #14", "rows"), Waiting((2,), "…", "cols"))
        missing = Verdict(
            *(Fault.MISSING_RANKS, rows, (1,), (0, 2), now.op, 14, "why"),
            groups=(rows, cols),
            waits=waits,
        )
        dead = Verdict(Fault.RANK_DEAD, rows, (1,), (), "", 0, "", groups=(rows, cols))
        for verdict, told in ((missing, "missing ranks"), (dead, "rank dead")):
            found.show_verdicts([verdict])
            assert {tab["verdict"] for tab in found.tabs()} == {f"{told}: rank 1"}

    def test_who_waits_for_nobody_known_just_waits(self) -> None:
        now = simulated.op(14, state="started", elapsed=6.0)
        found = model(rank(0, group(oldest=now, started=now, in_flight=1)))
        key = found.groups[0].key
        found.show_verdicts(
            [Verdict(Fault.UNDECIDED, key, (), (0,), now.op, 14, "not known")]
        )
        found.delta()
        assert found.groups[0].row(0)["verdict"] == "waits"

    def test_every_fault_has_words(self) -> None:
        now = simulated.op(14, state="started", elapsed=6.0)
        waits = rank(1, group(oldest=now, in_flight=1))
        at_fault = {
            Fault.RANK_DEAD: rank(0, group(), state="dead", reason="gone"),
            Fault.RANK_NOT_RESPONDING: rank(0, group(), state="unreachable"),
        }
        for fault in Fault:
            found = model(at_fault.get(fault, rank(0, group())), waits)
            found.show_verdicts(
                [Verdict(fault, group().key, (0,), (1,), now.op, 14, "why")]
            )
            found.delta()
            assert found.groups[0].row(0)["verdict"]
            assert found.banner().title == fault.value.capitalize()

    def test_a_verdict_goes_when_what_it_explains_is_over(self) -> None:
        status, verdicts = simulated.hang(4, 2)
        found = model(*status.ranks)
        found.show_verdicts(verdicts)
        found.delta()
        assert found.verdicts
        found.update(cluster(*(rank(n, group()) for n in range(4))), 107.0)
        found.delta()
        assert found.verdicts == ()
        assert found.banner().title == "Idle"

    def test_a_frozen_rank_is_shown_before_it_counts_as_silent(self) -> None:
        now = simulated.op(14, state="started", elapsed=1.0)
        busy: dict[str, Any] = {"state": "busy", "cell": 7}
        waits = group(oldest=now, in_flight=1)
        found = model(rank(0, waits, **busy), rank(1, waits, heartbeat_age=1.5, **busy))
        frozen = Verdict(
            Fault.RANK_NOT_RESPONDING,
            waits.key,
            (1,),
            (),
            "",
            0,
            "rank 1 has not answered since 16:39:10: its process is stopped",
            certain=True,
        )
        found.show_verdicts([frozen])
        delta = found.delta()
        assert delta is not None
        assert delta["head"]["frozen"] == [1]
        assert found.groups[0].row(1)["verdict"] == "no answer"
        assert found.banner().title == "Rank not responding"
        # Until the next heartbeat.
        found.update(cluster(rank(1, waits, heartbeat_age=2.5, **busy)), 101.0, 2)
        found.delta()
        assert found.verdicts == (frozen,)
        found.update(cluster(rank(1, waits, heartbeat_age=0.1, **busy)), 102.0, 2)
        found.delta()
        assert found.verdicts == ()
        assert found.head["frozen"] == []

    def test_a_rank_that_cannot_be_reached_is_not_restarted(self) -> None:
        found = model(rank(0, group(), state="unreachable", heartbeat_age=9))
        found.show_verdicts(
            [Verdict(Fault.RANK_NOT_RESPONDING, group().key, (0,), (), "", 0, "why")]
        )
        found.delta()
        assert found.verdicts
        assert found.head["frozen"] == []

    def test_death_and_what_to_do(self) -> None:
        found = model(
            rank(0, group()), rank(1, state="dead", reason="rank 1 was killed")
        )
        assert str(found.banner()) == (
            "Rank dead: Rank 1 was killed. Restart replaces rank 1."
        )

    def test_abort_says_why(self) -> None:
        reason = "timed out (at 12:00:00, by rank 2)"
        found = model(rank(0, group(state="aborted", reason=reason)), rank(1, group()))
        assert str(found.banner()) == (
            f"Aborted: Group 'default' on rank 0: {reason}. "
            "Rebuild makes it usable again."
        )

    @staticmethod
    def rebuilt(
        status: ClusterStatus, verdicts: Sequence[Verdict], *others: GroupStatus
    ) -> BoardModel:
        """Return a board after a hang and a rebuild; `others`: each rank's, in turn."""
        found = model(*status.ranks)
        found.show_verdicts(verdicts)
        found.delta()
        ranks = [rank(n, FRESH, *others[n : n + 1]) for n in range(4)]
        found.update(cluster(*ranks), 101.0)
        found.delta()
        return found

    def test_a_verdict_stays_after_a_rebuild_until_the_next_op(self) -> None:
        status, verdicts = simulated.hang(4, 2)
        found = self.rebuilt(status, verdicts)
        assert found.banner().title == "Idle"
        said = found.banner().last
        assert said.startswith("The last hang, before the rebuild: ")
        assert str(verdicts[0]) in said
        assert said in str(found.banner())
        found.update(cluster(rank(0, group(generation=1))), 102.0)
        found.delta()
        assert found.banner().last == ""

    def test_a_later_end_of_the_group_is_not_told_as_that_hang(self) -> None:
        status, verdicts = simulated.hang(4, 2)
        found = model(*status.ranks)
        found.show_verdicts(verdicts)
        found.delta()
        old = group(state="aborted", reason="enough")
        # Ranks are rebuilt one after the other.
        for ready in (0, 1, 4):
            ranks = [rank(n, FRESH if n < ready else old) for n in range(4)]
            found.update(cluster(*ranks), 101.0)
            found.delta()
        assert found.banner().last
        gone = replace(FRESH, state="aborted", reason="rank 1 was killed")
        dead = rank(1, gone, state="dead", reason="rank 1 was killed")
        found.update(cluster(rank(0, gone), dead), 102.0)
        found.delta()
        assert not any("verdict" in row for row in found.groups[0].rows().values())
        assert not found.tabs()[0]["verdict"]

    def test_a_later_hang_of_another_group_takes_its_place(self) -> None:
        status, verdicts = simulated.hang(4, 2)
        rows = [
            replace(one, name="rows") for each in status.ranks for one in each.groups
        ]
        found = self.rebuilt(status, verdicts, *rows)
        assert found.banner().last
        found.show_verdicts([replace(verdicts[0], group=rows[0].key, groups=())])
        found.delta()
        assert found.verdicts
        assert found.banner().last == ""
        found.update(cluster(*(rank(n, FRESH, group("rows")) for n in range(4))), 102.0)
        found.delta()
        assert not found.verdicts
        assert found.banner().last == ""

    def test_an_abort_leaves_what_the_rows_show_until_the_rebuild(self) -> None:
        status, verdicts = simulated.hang(4, 2)
        found = model(*status.ranks)
        # Rank 3 waits for a rank that waits.
        waits = Waiting((0, 1), "all_reduce #14", "default", (2,))
        absent = Absence((2,), "at data.py:77")
        verdicts = [replace(verdicts[0], waits=(waits,), absent=(absent,))]
        found.show_verdicts(verdicts)
        found.delta()
        picture = found.banner().picture
        reason = "abort requested from the board at 12:00:00"
        gone: dict[str, Any] = {"state": "aborted", "reason": reason}
        gone |= {"diagnosis": str(verdicts[0])}
        gone |= {"completed": simulated.op(13), "issued": 13}
        found.update(cluster(*(rank(n, group(**gone)) for n in range(4))), 101.0)
        found.delta()
        rows = found.groups[0].rows()
        assert {row["state"] for row in rows.values()} == {"aborted"}
        waited = [rows[n] for n in (0, 1, 3)]
        assert [(row["op"], row["seq"], row["line"]) for row in waited] == [
            ("all_reduce", "#14", "cell 7 line 5")
        ] * 3
        for_whom = ["waited for rank 2"] * 2 + ["waited because of rank 2"]
        assert [row["verdict"] for row in waited] == for_whom
        assert (rows[2]["verdict"], rows[2]["blame"]) == ("not entered", 1)
        assert found.banner().picture == picture != ""
        # The cause once, then who aborted.
        assert found.banner().text == (
            f"Group 'default', before the abort: {verdicts[0]}; abort requested from "
            "the board at 12:00:00. Rebuild makes it usable again."
        )
        fresh = group(generation=1, completed=None, started=None, enqueued=None)
        found.update(cluster(*(rank(n, fresh) for n in range(4))), 102.0)
        found.delta()
        for row in found.groups[0].rows().values():
            assert not row.keys() & {"op", "line", "verdict", "blame", "failed"}

    def test_rows_say_which_ranks_op_differs_in_which_all_have_failed(self) -> None:
        def ranks(*ops: OpStatus, **fields: Any) -> list[RankStatus]:
            return [
                rank(n, group(started=one, state="aborted", reason="why", **fields))
                for n, one in enumerate(ops)
            ]

        def like(seq: int = 14, dtype: str = "float64", size: int = 4) -> OpStatus:
            return op("all_reduce", seq, sizes=((size,), (size,)), dtypes=(dtype,) * 2)

        def marks(found: BoardModel) -> list[tuple[Any, Any]]:
            rows = found.groups[0].rows().values()
            return [(row.get("verdict"), row.get("blame")) for row in rows]

        nothing = (None, None)
        found = model(*ranks(like(), like(), like(size=5), like()))
        assert marks(found) == [nothing, nothing, ("other size", 1), nothing]
        assert found.banner().more == (
            "Rank 2 issued all_reduce #14 with 5 elements, ranks 0–1 and 3 with "
            "4 elements. Rebuild makes it usable again.",
        )
        dtypes = ranks(like(), like(dtype="float32"), like(), like())
        assert marks(model(*dtypes))[1] == ("other dtype", 1)
        for unknown in (
            # All alike; in different ops; a rank is not known; it still runs.
            ranks(*[like()] * 4),
            ranks(like(), like(), like(13, size=5), like()),
            ranks(like(), like(), like(size=5)),
            [rank(n, group(started=like(size=n))) for n in range(4)],
        ):
            assert set(marks(model(*unknown))) == {nothing}
        # The group is rebuilt.
        found.update(cluster(*(rank(n, FRESH) for n in range(4))), 101.0)
        found.delta()
        assert set(marks(found)) == {nothing}

    def test_an_aborted_op_shows_nothing_of_the_op_before(self) -> None:
        barrier = op("barrier", 14, state="started", elapsed=6.0)
        done = simulated.op(13)
        found = model(rank(0, group(completed=done, oldest=barrier), state="busy"))
        gone = group(completed=done, state="aborted", reason="enough")
        found.update(cluster(rank(0, gone)), 101.0)
        row = found.groups[0].row(0)
        assert (row["op"], row["seq"]) == ("barrier", "#14")
        assert not row.keys() & {"size", "dtype", "shape"}

    def test_an_op_that_no_status_before_its_abort_has_is_shown(self) -> None:
        """As that of ranks whose peer dies at once: it began and failed in between."""
        done = simulated.op(13)
        found = model(rank(0, group(completed=done), state="busy"))
        for now in (101.0, 102.0):
            gone = group(
                completed=done, started=op("barrier", 14), state="aborted", reason="why"
            )
            found.update(cluster(rank(0, gone)), now)
            row = found.groups[0].row(0)
            assert (row["op"], row["seq"]) == ("barrier", "#14")

    def test_who_fails_because_of_an_abort_does_not_compute(self) -> None:
        now = simulated.op(14, state="started", elapsed=6.0)
        there: dict[str, Any] = {"state": "busy", "cell": 7, "busy_for": 6.1}
        found = model(rank(0, group(oldest=now), **there))
        gone = rank(
            0, group(state="aborted", reason="enough"), line="cell 7 line 9",
            line_for=6.1, **there,
        )  # fmt: skip
        found.update(cluster(gone), 100.1)
        found.update(cluster(gone), 100.9)
        row = found.groups[0].row(0)
        assert row["line"] == "cell 7 line 5"
        assert not row.keys() & {"cell", "at", "since"}
        assert "still runs" not in str(found.banner())
        found.update(cluster(gone), 101.2)
        row = found.groups[0].row(0)
        assert (row["line"], row["cell"]) == ("cell 7 line 9", "7")
        assert "Rank 0 still runs cell 7" in str(found.banner())

    def test_groups_that_were_aborted_for_one_reason_are_told_at_once(self) -> None:
        gone: dict[str, Any] = {"state": "aborted", "reason": "nan; stop"}
        found = model(rank(0, group(**gone), group("tp", (0,), **gone)))
        assert found.banner().text == (
            "Groups 'default', 'tp': nan; stop. Rebuild makes them usable again."
        )

    def test_a_verdict_on_an_op_that_ended_after_all_goes(self) -> None:
        status, verdicts = simulated.hang(4, 2)
        found = model(*status.ranks)
        found.show_verdicts(verdicts)
        found.delta()
        found.update(cluster(*(rank(n, group()) for n in range(4))), 101.0)
        found.delta()
        assert found.banner().last == ""

    def test_who_computes_on_after_an_abort_is_named(self) -> None:
        aborted = group(state="aborted", reason="by hand")
        found = model(
            rank(0, aborted), *(rank(n, aborted, state="busy", cell=7) for n in (1, 2))
        )
        assert str(found.banner()).endswith(
            "by hand. Rebuild makes it usable again. Ranks 1–2 still run cell 7, which "
            "an abort does not end: interrupt the kernel."
        )

    def test_silence(self) -> None:
        found = model(rank(0, group()), rank(1, group(), heartbeat_age=4.0))
        assert str(found.banner()) == (
            "Silent: Rank 1 has sent no status for more than 3 s."
        )
        found = model(rank(0, group()), rank(1, group(), state="unreachable"))
        assert found.banner().title == "No answer"

    @pytest.mark.parametrize(
        ("waits_in", "said"),
        [
            ("all_reduce", "not entered"),
            ("recv", "send missing"),
            ("send", "recv missing"),
        ],
    )
    def test_a_row_says_what_its_rank_has_not_issued(
        self, waits_in: str, said: str
    ) -> None:
        status, (verdict,) = simulated.hang(2, 1)
        found = model(*status.ranks)
        found.show_verdicts([replace(verdict, op=waits_in)])
        found.delta()
        assert found.groups[0].row(1)["verdict"] == said

    def test_the_end(self) -> None:
        found = BoardModel()
        found.update(cluster(rank(0, group()), state="stopped"), 1.0)
        assert found.banner().title == "Ended"


class TestMessages:
    def test_nothing_new_is_no_message(self) -> None:
        found = model(rank(0, group()))
        found.update(cluster(rank(0, group(), heartbeat_age=0.7)), 100.4)
        assert found.delta() is None

    def test_only_what_changed_travels(self) -> None:
        found = model(*(rank(n, group(), state="busy", cell=7) for n in range(4)))
        done = group(completed=op(seq=15), enqueued=op(seq=15), issued=15)
        one = rank(2, done, state="busy", cell=7)
        found.update(cluster(one), 100.1, size=4)
        message = found.delta()
        assert message is not None
        assert message.keys() == {"type", "v", "now", "rows"}
        assert message["rows"] == {"g0": {2: {"seq": "#15", "issued": 15}}}

    def test_a_clock_that_runs_is_no_news(self) -> None:
        def at(elapsed: float, age: float) -> ClusterStatus:
            one = group(oldest=op(state="started", elapsed=elapsed, timeout=300.0))
            return cluster(rank(0, one, heartbeat_age=age))

        found = BoardModel()
        found.update(at(2.0, 0.05), 100.0)
        found.delta()
        for step in range(1, 20):
            # One second later, and the message a little longer on its way.
            found.update(at(2.0 + step, 0.05 + step % 3 / 20), 100.0 + step)
            assert found.delta() is None

    def test_a_page_that_takes_deltas_knows_what_a_new_one_knows(self) -> None:
        simulation = simulated.Simulation(8)
        found = BoardModel()
        found.update(simulation.step(), 0.0)
        page = Page(found.full())
        status, verdicts = simulated.hang(8, 3)
        scenes = [simulation.step([step % 8, 5]) for step in range(20)]
        scenes += [status, cluster(rank(1), rank(4, state="dead", reason="x")), status]
        for step, scene in enumerate(scenes):
            found.show_verdicts(verdicts if step % 4 == 3 else [])
            found.update(scene, step / 10, size=8)
            page.take(found.delta())
            assert Page(found.full()).state["rows"] == page.state["rows"]
            assert Page(found.full()).state["banner"] == page.state["banner"]

    def test_size_does_not_grow_with_the_number_of_ops(self) -> None:
        simulation = simulated.Simulation(16)
        found = BoardModel()
        found.update(simulation.step(), 0.0)
        sizes = []
        for step in range(1, 200):
            found.update(simulation.step(), step / 10)
            sizes.append(len(json.dumps(found.delta())))
        assert max(sizes[-20:]) < 1.2 * max(sizes[:20])


HOSTILE: list[Any] = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "'\"&<>\x00\u202e" * 200,
    math.nan,
    math.inf,
    10**400,
    -1,
    None,
    [],
    {},
    [[["deep"]]],
    {"op": {"op": {}}},
    True,
]


class Ranks(RankRegistry):
    """Two ranks that are asked nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = [RankSlot(n, n, "u", n, "node", "", 0) for n in range(2)]

    def ask(self, request: Any, ranks: Any = None, timeout: float = 0) -> Any:
        """Refuse, as nothing here asks."""
        raise AssertionError(request)

    def post(self, request: Any, ranks: Any = None) -> Any:
        """Refuse, as nothing here posts a request."""
        raise AssertionError(request)


class TestHostile:
    """What a rank says may be anything."""

    def summary(self, **fields: Any) -> dict[str, Any]:
        brief = {"seq": 3, "op": "all_reduce", "source": "cell 7 line 5"}
        return {
            "busy": True,
            "cell": 7,
            "busy_for": 1.0,
            "groups": [
                {
                    "name": "default",
                    "members": "0-1",
                    "backend": "cpu:tcp",
                    "generation": 0,
                    "state": "ready",
                    "reason": None,
                    "timeout": 5.0,
                    "devices": {"cpu": "tcp"},
                    "enqueued": brief,
                    "started": brief,
                    "completed": {**brief, "nbytes": 4, "duration": 1e-3},
                    "issued": 3,
                    "in_flight": 1,
                    "oldest": {**brief, "elapsed": 1.0, "timeout": 5.0, "nbytes": 4},
                }
            ],
            **fields,
        }

    def show(self, summary: Any) -> BoardModel:
        ranks = Ranks()
        for number, said in enumerate((self.summary(), summary)):
            ranks.record_summary(number, json.dumps({"pid": number, **said}))
        slots = ranks.slots
        for slot in slots:
            slot.summary_at = 100.0
        found = model(*(slot.status(100.0) for slot in slots))
        json.dumps(found.full(), allow_nan=False)
        html = board_html(found, "12:00:00", "name")
        assert "<img" not in html
        assert "<script" not in html
        board_text(found)
        # The other one is shown as ever.
        (there,) = [one for one in found.groups if 0 in one.base]
        assert there.row(0)["op"] == "all_reduce"
        rows = [one.row(1) for one in found.groups if 1 in one.base]
        assert rows
        assert all(row["state"] != "unreadable" or row["reason"] for row in rows)
        return found

    def test_the_summary_itself_is_fine(self) -> None:
        assert self.show(self.summary()).groups[0].row(1)["state"] == "in flight"

    @pytest.mark.parametrize("value", HOSTILE, ids=lambda v: type(v).__name__)
    def test_anything_in_any_place(self, value: Any) -> None:
        fine = self.summary()
        for field in fine:
            self.show({**fine, field: value})
        for field in fine["groups"][0]:
            self.show(self.summary(groups=[{**fine["groups"][0], field: value}]))
        for name in ("oldest", "completed"):
            inner = fine["groups"][0][name]
            for field in (*inner, "sizes", "dtypes"):
                one = {**fine["groups"][0], name: {**inner, field: value}}
                self.show(self.summary(groups=[one]))

    def test_a_thousand_groups_of_one_name(self) -> None:
        one = self.summary()["groups"][0]
        many = [{**one, "name": "x" * 10_000, "members": str(n)} for n in range(1000)]
        found = self.show(self.summary(groups=many))
        assert len(json.dumps(found.full())) < 2_000_000


class TestAdvice:
    """What a rank says that a person should change, each sentence once."""

    OFF = "torch's recorder is off: set X"

    def found(self) -> BoardModel:
        ranks = [rank(n, group(), advice=(self.OFF,)) for n in range(3)]
        return model(*ranks, rank(3, group()))

    def test_it_follows_the_banner_in_every_form(self) -> None:
        said = "Ranks 0–2: torch's recorder is off: set X."
        banner = self.found().banner()
        assert banner.title == "Idle"
        assert banner.more == (said,)
        assert said in board_text(self.found()).splitlines()[2]
        assert board_html(self.found(), "12:00:00").count("is off: set X.") == 1

    def test_a_status_of_some_ranks_keeps_that_of_the_others(self) -> None:
        found = self.found()
        found.update(cluster(rank(3, group())), 101.0, 4)
        assert len(found.banner().more) == 1
        found.update(cluster(*(rank(n, group()) for n in range(4))), 102.0)
        assert found.banner().more == ()

    def test_a_verdict_comes_first(self) -> None:
        status, verdicts = simulated.hang(4, 2)
        found = model(*(replace(one, advice=(self.OFF,)) for one in status.ranks))
        found.show_verdicts(verdicts)
        banner = found.banner()
        assert banner.title == "Missing ranks"
        assert banner.more[-1].startswith("Ranks 0–3: torch's recorder")


class TestTextAndHtml:
    def test_text(self) -> None:
        status, verdicts = simulated.hang(4, 2)
        found = model(*status.ranks)
        found.update(status, 101.5)
        found.show_verdicts(verdicts)
        found.delta()
        lines = board_text(found, width=100).splitlines()
        assert lines[0] == "4 ranks · local · cpu:tcp · cluster c-1"
        assert lines[1].startswith("Missing ranks: Rank 2 has not entered")
        assert lines[3] == "default · ranks 0–3 · cpu:tcp · timeout 5 min"
        assert "waits for rank 2" in lines[5]
        assert "6.4 s / 2.10 ms" in lines[5]
        assert "not entered" in lines[7]
        assert "−1" in lines[7]
        assert max(map(len, lines[3:])) <= 100

    @pytest.mark.parametrize("width", [66, 80, 120])
    def test_columns_go_until_it_fits(self, width: int) -> None:
        status, verdicts = simulated.hang(4, 2)
        found = model(*status.ranks)
        found.show_verdicts(verdicts)
        found.delta()
        table = board_text(found, width).splitlines()[4:]
        assert max(map(len, table)) <= width
        assert "verdict" in table[0]

    @pytest.mark.parametrize("width", [66, 80])
    def test_the_host_stays_where_there_are_several(self, width: int) -> None:
        status, verdicts = simulated.hang(4, 2)
        for hosts in ("aabb", "aaaa"):
            named = zip(status.ranks, hosts, strict=True)
            found = model(*(replace(one, host=f"node-{name}") for one, name in named))
            found.show_verdicts(verdicts)
            table = board_text(found, width).splitlines()[4:]
            assert max(map(len, table)) <= width
            assert ("node-b" in table[3], "host" in table[0]) == (hosts == "aabb",) * 2

    def test_among_many_those_that_stand_out_are_shown(self) -> None:
        status, verdicts = simulated.hang(256, 137)
        found = model(*status.ranks)
        found.show_verdicts(verdicts)
        found.delta()
        text = board_text(found)
        assert "not entered" in text
        assert len(text.splitlines()) < 45

    def test_html_says_the_same(self) -> None:
        status, verdicts = simulated.hang(4, 2)
        found = model(*status.ranks)
        found.show_verdicts(verdicts)
        found.delta()
        html = board_html(found, "12:00:00", "the-board")
        assert 'class="rankscope-board the-board"' in html
        assert "as of 12:00:00" in html
        assert "waits for rank 2" in html
        assert "Rank 2 has not entered" in html


class TestPicture:
    """The HTML that a saved notebook keeps."""

    def test_it_has_the_verdict_and_what_to_do_in_a_hang(self) -> None:
        status, verdicts = simulated.hang(4, 2)
        found = model(*status.ranks)
        found.show_verdicts(verdicts)
        found.delta()
        html = board_html(found, "14:03:12", "name")
        assert "as of 14:03:12" in html
        assert "Rank 2 has not entered all_reduce #14" in html
        assert "not entered" in html
        assert "<code>rankscope abort</code>" in html

    def test_it_has_the_picture_of_a_deadlock(self) -> None:
        cycle = (
            Waiting((0,), "recv #1", "pp", (1,)),
            Waiting((1,), "recv #1", "pp", (0,)),
        )
        status, (verdict,) = simulated.hang(4, 2)
        found = model(*status.ranks)
        found.show_verdicts([replace(verdict, cycle=cycle)])
        found.delta()
        banner = found.full()["banner"]
        assert "rank 0 waits for rank 1 in recv #1 of group pp" in banner["picture"]
        assert banner["picture"] in board_html(found, "14:03:12", "name")
        bar = hang_html("Deadlock", "name", "14:03:12", 7, banner["picture"])
        assert banner["picture"] in bar
        # Its words alone say nothing.
        assert "waits for whom" not in words(board_html(found, "14:03:12", "name"))
        assert words(bar) == "As of 14:03:12: Deadlock"

    def test_it_keeps_the_culprits_of_many(self) -> None:
        status, verdicts = simulated.hang(256, 200)
        found = model(*status.ranks)
        found.show_verdicts(verdicts)
        found.delta()
        html = board_html(found, "14:03:12", "name")
        assert html.count("<tr") == 3
        assert html.index(">not entered<") < html.index(">waits for rank 200<")
        # A narrow page has room for what matters.
        assert html.index(">verdict<") < html.index(">line<")
        marked = [row for row in html.split("<tr")[1:] if "border-left:3px" in row]
        assert [">200<" in row for row in marked] == [True]

    def test_groups_in_trouble_come_first_and_open(self) -> None:
        status, verdicts = simulated.hang(4, 2)
        found = model(
            *(
                replace(
                    one,
                    groups=(
                        *(group(f"g{n}", range(4)) for n in range(20)),
                        *one.groups,
                    ),
                )
                for one in status.ranks
            )
        )
        found.show_verdicts(verdicts)
        found.delta()
        html = board_html(found, "14:03:12", "name")
        assert html.count("<details open>") == 1
        _, opened = html.split("<details open>")
        summary = opened.split("</summary>", 1)[0]
        assert "<b style" in summary
        assert ">default<" in summary
        assert "hung · missing ranks: rank 2" in summary
        # A file of all tables would be large.
        assert html.count("<table") == 16
        assert ">g19<" in html

    def test_idle_ranks_need_no_command(self) -> None:
        html = board_html(model(rank(0, group())), "14:03:12", "name")
        assert "This is a picture" in html
        assert "rankscope abort" not in html

    def test_ranks_that_ended_need_no_live_board(self) -> None:
        found = BoardModel()
        found.update(cluster(rank(0, group()), state="stopped"), 1.0)
        assert "This is a picture" not in board_html(found, "14:03:12", "name")
