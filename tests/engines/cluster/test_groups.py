"""Groups of one name: which of them an abort, a rebuild and a cell are about."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups.key import GroupKey
from rankscope.engines import Cluster, ClusterError
from rankscope.engines.status import find_groups
from rankscope.widgets.board.actions import BoardActions
from rankscope.widgets.board.model import BoardModel

WAIT = 30

LOW, HIGH = GroupKey("tp", (0, 1)), GroupKey("tp", (2, 3))
ACROSS = GroupKey("tp", (0, 2))
DEFAULT = GroupKey("default", (0, 1, 2, 3))


class TestFinding:
    def test_an_id_tells_groups_of_one_name_apart(self) -> None:
        assert LOW.id.startswith("tp/")
        assert len({LOW.id, HIGH.id, ACROSS.id}) == 3
        assert GroupKey("tp", (1, 0)).id != LOW.id

    @pytest.mark.parametrize("group", [LOW, LOW.id])
    def test_a_key_or_an_id_is_one_group(self, group: str | GroupKey) -> None:
        assert find_groups(group, [DEFAULT, LOW, ACROSS]) == [LOW]

    def test_a_name_is_every_disjoint_group_that_has_it(self) -> None:
        assert find_groups("tp", [DEFAULT, LOW, HIGH, LOW]) == [LOW, HIGH]

    def test_a_name_of_groups_that_share_a_rank_is_refused(self) -> None:
        with pytest.raises(ClusterError) as caught:
            find_groups("tp", [DEFAULT, LOW, ACROSS])
        message = str(caught.value)
        assert f"{LOW.id!r} (ranks 0–1)" in message
        assert f"{ACROSS.id!r} (ranks 0, 2)" in message

    @pytest.mark.parametrize("group", ["dp", GroupKey("dp", (0,)), HIGH])
    def test_a_group_that_is_not_there(self, group: str | GroupKey) -> None:
        with pytest.raises(ClusterError, match="there is 'default', 'tp'"):
            find_groups(group, [DEFAULT, LOW])


@pytest.fixture(scope="module")
def pairs(_module_leaves_nothing: None) -> Iterator[Cluster]:
    """Three ranks, of which rank 0 is in both groups called ``tp``."""
    with Cluster.start(3) as started:
        code = (
            "first = dist.new_group([0, 1], group_desc='tp')\n"
            "second = dist.new_group([0, 2], group_desc='tp')\n"
            "x = np.ones(2)"
        )
        started.execute(code).result(WAIT)
        yield started


def states(cluster: Cluster) -> dict[tuple[int, GroupKey], tuple[str, int]]:
    """What every rank says of each of its groups called ``tp``."""
    return {
        (rank.rank, group.key): (group.state, group.generation)
        for rank in cluster.status(fresh=True, timeout=WAIT).ranks
        for group in rank.groups
        if group.name == "tp"
    }


def use(cluster: Cluster, group: str, ranks: list[int]) -> None:
    cluster.execute(f"dist.all_reduce(x, group={group})", ranks=ranks).result(WAIT)


class Board:
    """The board's actions on a cluster, without widgets."""

    def __init__(self, cluster: Cluster) -> None:
        self.model = BoardModel()
        self.model.update(cluster.status(fresh=True), 0.0)
        self.answer: dict[str, Any] = {}
        self._answered = threading.Event()
        self._actions = BoardActions(
            cluster,
            diagnose=None,
            send=self._receive,
            get_model=lambda: self.model,
            show_verdicts=lambda verdicts: None,
            on_done=lambda: None,
            source_line=lambda cell, line: "",
        )

    def _receive(self, message: dict[str, Any]) -> None:
        self.answer = message
        self._answered.set()

    def click(self, action: str, key: GroupKey) -> dict[str, Any]:
        """What the page sends: the id of the tab."""
        self._answered.clear()
        (tab,) = (one.id for one in self.model.groups if one.key == key)
        self._actions.start({"do": action, "groups": [tab], "id": "click"})
        assert self._answered.wait(WAIT)
        return self.answer


class TestTwoGroupsOfOneName:
    first, second = GroupKey("tp", (0, 1)), GroupKey("tp", (0, 2))

    @pytest.mark.processes
    def test_the_board_aborts_and_rebuilds_the_one_that_was_clicked(
        self, pairs: Cluster
    ) -> None:
        board = Board(pairs)
        assert board.click("abort", self.first)["ok"]
        until(lambda: states(pairs)[1, self.first][0] == "aborted", WAIT)
        assert states(pairs) == {
            (0, self.first): ("aborted", 0),
            (1, self.first): ("aborted", 0),
            (0, self.second): ("ready", 0),
            (2, self.second): ("ready", 0),
        }
        use(pairs, "second", [0, 2])
        cell = pairs.execute("dist.barrier(group=first)", ranks=[0])
        assert cell.wait(WAIT)
        assert "abort requested from the board at " in cell.errors[0].evalue
        assert board.click("rebuild", self.first)["ok"]
        assert states(pairs)[0, self.first] == ("ready", 1)
        assert states(pairs)[0, self.second] == ("ready", 0)
        use(pairs, "first", [0, 1])
        use(pairs, "second", [0, 2])

    @pytest.mark.processes
    def test_the_cluster_takes_a_key_or_an_id(self, pairs: Cluster) -> None:
        assert pairs.abort(self.second) == {0: ["tp"], 2: ["tp"]}
        # The answers bring the new state: no second round trip is needed.
        found = {
            (rank.rank, group.key): group.state
            for rank in pairs.glance().ranks
            for group in rank.groups
        }
        assert found[0, self.second] == found[2, self.second] == "aborted"
        use(pairs, "first", [0, 1])
        pairs.rebuild(self.second.id)
        use(pairs, "second", [0, 2])

    @pytest.mark.processes
    def test_the_name_alone_is_refused_where_ranks_have_both(
        self, pairs: Cluster
    ) -> None:
        before = states(pairs)
        for call in (
            lambda: pairs.execute("1", group="tp"),
            lambda: pairs.abort("tp"),
            lambda: pairs.rebuild("tp"),
            lambda: pairs.bench("all_reduce", [64], group="tp"),
        ):
            with pytest.raises(ClusterError, match="2 groups are called 'tp'"):
                call()
        assert states(pairs) == before

    @pytest.mark.processes
    def test_a_cell_runs_in_the_one_with_the_id(self, pairs: Cluster) -> None:
        cell = pairs.execute("dist.get_world_size(), rank", group=self.second.id)
        cell.result(WAIT)
        assert cell.ranks == [0, 2]
        texts = [cell.outputs(rank)[0]["data"]["text/plain"] for rank in (0, 2)]
        assert texts == ["(2, 0)", "(2, 2)"]

    @pytest.mark.processes
    def test_a_fresh_rank_has_both_again(self, pairs: Cluster) -> None:
        pairs.restart([1])
        pairs.rebuild(self.first)
        assert states(pairs)[1, self.first][0] == "ready"
        assert states(pairs)[0, self.second][0] == "aborted"
        pairs.rebuild()
        assert {state for state, _ in states(pairs).values()} == {"ready"}
