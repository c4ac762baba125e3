"""Ranks that keep the others waiting, on the board: columns, and advice in calm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import pytest

from rankscope.backends.observe.lateness import GroupLateness, Lateness
from rankscope.backends.observe.stacks import MAIN, Frame, Stack
from rankscope.engines import ClusterError, ClusterStatus, FlightRecords
from rankscope.engines.observe.profiling import Profile, Sampled, Sampling
from rankscope.widgets import StatusTable
from rankscope.widgets.board import late
from rankscope.widgets.board.late import LateWatch
from rankscope.widgets.board.model import BoardModel
from rankscope.widgets.board.text import board_text
from tests.backends.observe.late_runs import Run
from tests.widgets import simulated, statuses


def a_run() -> Run:
    """Four ranks, of which rank 2 is 20 ms late each time."""
    return Run(heavy=0.2).steps(41, lambda n, rank: 1 + 20 * (rank == 2))


def of(run: Run) -> Lateness:
    lateness = Lateness()
    lateness.take(run.dumps())
    return lateness


def idle(state: str = "idle") -> ClusterStatus:
    group = statuses.group(ranks=range(4))
    return statuses.cluster(
        *(statuses.rank(n, group, state=state, heartbeat_age=0.1) for n in range(4))
    )


class TestShown:
    def test_the_rows_say_who_is_late_and_who_waits(self) -> None:
        model = BoardModel.of(idle("busy"), of(a_run()))
        (group,) = model.groups
        late, others = group.row(2), [group.row(rank) for rank in (0, 1, 3)]
        assert str(late["late"]).startswith("100% · ")
        assert str(late["late"]).endswith(" ms")
        assert int(str(late["waits"])[:-1]) < 10
        assert all(int(str(row["waits"])[:-1]) > 80 for row in others)
        assert not any("late" in row for row in others)
        assert "100% · " in board_text(model)
        model.update(idle(), 1.0)
        model.delta()
        # What was measured stays; that somebody waits does not.
        after = group.rows()
        assert after[2]["late"] == late["late"]
        assert after[0]["waits"] == others[0]["waits"]
        assert "awaited" in late
        assert "awaited" not in after[2]

    def test_the_banner_advises_where_nothing_is_wrong(self) -> None:
        model = BoardModel.of(idle(), of(a_run()))
        banner = model.banner()
        assert banner.mood == "calm"
        (said,) = banner.more
        assert said.startswith(
            "Late rank: rank 2 is last to enter all_reduce at cell 7"
        )
        status, verdicts = simulated.hang(4, 2)
        model.update(status, 1.0)
        model.show_verdicts(verdicts)
        assert not any("ate rank" in one for one in model.banner().sentences)

    def test_nothing_is_said_of_a_group_that_is_destroyed(self) -> None:
        model = BoardModel.of(idle(), of(a_run()))
        model.update(statuses.cluster(*(statuses.rank(n) for n in range(4))), 1.0)
        assert not model.late
        assert not any("ate rank" in one for one in model.banner().sentences)

    def test_the_status_table_says_it_below(self) -> None:
        table = StatusTable(idle(), of(a_run()))
        assert "\nLate rank: rank 2 is last to enter" in str(table)
        assert "Late rank: rank 2" in table._repr_mimebundle_()["text/html"]
        assert "Late" not in str(StatusTable(idle(), of(Run().steps(41))))

    def test_a_group_of_which_nothing_is_known_has_no_cells(self) -> None:
        model = BoardModel.of(idle(), of(Run(backend="nccl").steps(41)))
        assert "waits" not in model.groups[0].row(0)
        assert model.banner().more == ()


class _Ranks:
    """Ranks with the records of a run, which they are asked for."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.asked: list[int | None] = []
        self.closed = False
        self.answers = True
        self.sampled: list[list[int]] = []

    def glance(self) -> ClusterStatus:
        return idle()

    def flight_records(
        self, ranks: Iterable[int], *, last: int | None = None, timeout: float = 5.0
    ) -> FlightRecords:
        self.asked.append(last)
        if self.closed:
            raise ClusterError("closed")
        return FlightRecords(self.run.dumps(last), dict.fromkeys(ranks, 0))

    def start_sampling(self, ranks: Iterable[int], *, seconds: float) -> Sampling:
        assert seconds == late.SAMPLED
        self.sampled.append(list(ranks))
        if not self.answers:
            raise ClusterError("none of them answers")
        return cast(Sampling, self)

    def take(self) -> Profile:
        """Return what a sampler of rank 2 would: it is at one line, always."""
        stack = Stack(MAIN, (Frame("data.py", 77, "load", "read()", False),))
        last = self.run.dumps()[2]["records"][-1]["time_created_ns"]
        course = [(last - n * 10_000_000, stack) for n in range(100)]
        return Profile({2: Sampled(1.0, 100, [(stack, 1.0)], course[::-1])})


class TestWatch:
    def test_what_two_looks_agree_on_is_said(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(late, "REST_FACTOR", 0.0)
        ranks, shown = _Ranks(a_run()), list[Sequence[GroupLateness]]()
        watch = LateWatch(ranks, shown.append)

        def look(issued: int, now: float) -> int:
            watch.look(lambda: issued, now)
            watch.join()
            return len(shown)

        assert look(100, 1e6) == 1
        assert [one.findings for one in shown[0]] == [()]
        assert shown[0][0].ranks[2].late > 30
        # Too early; and without an op since.
        assert look(200, 1e6 + 1) == 1
        assert look(100, 1e6 + 10) == 1
        ranks.run.steps(20, lambda n, rank: 1 + 20 * (rank == 2))
        assert look(200, 1e6 + 20) == 2
        (finding,) = shown[1][0].findings
        assert finding.ranks == (2,)
        assert ranks.asked == [late.LAST] * 2

    def test_it_says_where_the_late_rank_is_meanwhile(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(late, "REST_FACTOR", 0.0)
        ranks, shown = _Ranks(a_run()), list[Sequence[GroupLateness]]()
        watch = LateWatch(ranks, shown.append)
        for number in range(4):
            ranks.answers = number != 2
            watch.look(lambda: 1 + len(shown), 1e6 + 10 * number)
            watch.join()
            ranks.run.steps(20, lambda n, rank: 1 + 20 * (rank == 2))
        assert ranks.sampled == [[2]] * 4
        said = [
            [one.meanwhile for group in groups for one in group.findings]
            for groups in shown
        ]
        # Found once, and sampled from then on; found again; rank 2 was silent.
        where = "it is at data.py line 77: read()"
        assert said == [[], [where], [where], [""]]

    def test_the_end_of_the_cluster_is_no_error(self) -> None:
        ranks, shown = _Ranks(a_run()), list[Sequence[GroupLateness]]()
        ranks.closed = True
        watch = LateWatch(ranks, shown.append)
        watch.look(lambda: 1, 1e6)
        watch.join()
        assert not shown
