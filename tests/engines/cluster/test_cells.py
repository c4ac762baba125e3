"""Cells on ranks: output, errors, display, interrupts, status while they block."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster, ClusterError, Execution, ExecutionError
from rankscope.engines.status import Summary
from tests.engines.cluster.faults import WAIT, stop, until_at

pytestmark = pytest.mark.processes

#: Runs until the file is there; keeps the main thread in a C call each time.
#: Has the next traceback take a second.
SLOW_TRACEBACK = """
import pathlib, time
shell = get_ipython()
def slow(*arguments, **options):
    del shell.showtraceback
    file = pathlib.Path(folder, str(rank))
    file.touch()
    time.sleep(1)
    shell.showtraceback(*arguments, **options)
    file.write_text("shown")
shell.showtraceback = slow
"""
UNTIL_FILE = "import os, time\nwhile not os.path.exists({!r}):\n    time.sleep(0.01)\n"


@pytest.fixture
def go_on(tmp_path: Path) -> Iterator[Path]:
    """A file that ranks wait for; at the end of the test none waits any more."""
    file = tmp_path / "go on"
    yield file
    file.touch()


def run(cluster: Cluster, code: str, **options: Any) -> Execution:
    """Run a cell to its end."""
    return cluster.execute(code, **options).result(WAIT)


def texts(execution: Execution, rank: int, kind: str = "execute_result") -> list[str]:
    """The plain texts of what a rank displayed."""
    return [
        output["data"]["text/plain"]
        for output in execution.outputs(rank)
        if output["output_type"] == kind
    ]


def stdout(execution: Execution, rank: int, name: str = "stdout") -> str:
    """What a rank printed."""
    return "".join(
        output["text"]
        for output in execution.outputs(rank)
        if output["output_type"] == "stream" and output["name"] == name
    )


class TestNamespaceAndEnvironment:
    def test_each_rank_knows_its_place(self, cluster: Cluster) -> None:
        cell = run(cluster, "(rank, world_size, dist.get_rank(), np.__name__)")
        assert [texts(cell, r) for r in range(4)] == [
            [f"({r}, 4, {r}, 'numpy')"] for r in range(4)
        ]

    def test_the_environment_is_what_other_frameworks_expect(
        self, cluster: Cluster
    ) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        cell = run(cluster, f"import os\n[os.environ[name] for name in {names}]")
        for r in range(4):
            assert texts(cell, r) == [f"['{r}', '4', '{r}', '4', '127.0.0.1']"]

    def test_master_port_is_one_and_free(self, cluster: Cluster) -> None:
        code = "import os, socket\nport = int(os.environ['MASTER_PORT'])"
        run(cluster, code)
        ports = cluster.pull("port")
        assert len(set(ports.values())) == 1
        # Rank 0 can open it, as torch.distributed would.
        opening = "with socket.create_server(('', port)): pass"
        run(cluster, opening, ranks=0)

    def test_users_names_are_not_listed_with_ours(self, cluster: Cluster) -> None:
        assert "dist" not in stdout(run(cluster, "%who"), 0)

    def test_ranks_are_in_the_order_of_the_engine_ids(self, cluster: Cluster) -> None:
        assert cluster.ranks == [0, 1, 2, 3]
        assert cluster.n == cluster.world_size == 4
        assert list(cluster.engine_ids.values()) == sorted(cluster.engine_ids.values())
        assert all(psutil.pid_exists(pid) for pid in cluster.pids.values())


class TestOutput:
    def test_it_comes_while_the_cell_runs(self, cluster: Cluster, go_on: Path) -> None:
        code = "print('before', rank)\n" + UNTIL_FILE.format(str(go_on))
        cell = cluster.execute(code + "print('after', rank)")
        heard = dict.fromkeys(range(4), "")

        def hear(rank: int, output: dict[str, Any]) -> None:
            # A line may come in pieces.
            heard[rank] += output["text"]

        cell.on_output(hear)
        first = {rank: f"before {rank}\n" for rank in range(4)}
        until(lambda: heard == first, WAIT, "the first line of each rank")
        assert not cell.done
        assert cell.ranks_running == [0, 1, 2, 3]
        go_on.touch()
        cell.result(WAIT)
        assert heard == {r: f"before {r}\nafter {r}\n" for r in range(4)}
        assert cell.ranks_running == []
        assert sorted(cell.durations) == [0, 1, 2, 3]

    def test_an_output_callback_that_fails_hurts_nobody(
        self, cluster: Cluster, go_on: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        cell = cluster.execute(UNTIL_FILE.format(str(go_on)) + "print('x')\nrank")

        def fail(rank: int, output: dict[str, Any]) -> None:
            raise ValueError("not mine")

        cell.on_output(fail)
        go_on.touch()
        cell.result(WAIT)
        assert texts(cell, 3) == ["3"]
        assert "not mine" in caplog.text

    def test_only_the_chosen_ranks_run(self, cluster: Cluster) -> None:
        cell = run(cluster, "rank", ranks=[3, 1])
        assert cell.ranks == [1, 3]
        assert texts(cell, 1) == ["1"]

    def test_rich_display(self, cluster: Cluster) -> None:
        code = "from IPython.display import HTML, display\ndisplay(HTML(f'<b>{rank}'))"
        shown = run(cluster, code).outputs(2)
        assert [one["output_type"] for one in shown] == ["display_data"]
        assert shown[0]["data"]["text/html"] == "<b>2"

    def test_a_figure_comes_as_an_image(self, cluster: Cluster) -> None:
        pytest.importorskip("matplotlib")
        code = "import matplotlib.pyplot as plt\nplt.plot([rank, 1]);"
        shown = run(cluster, code, ranks=1).outputs(1)
        assert "image/png" in shown[-1]["data"]
        assert shown[-1]["output_type"] == "display_data"

    def test_stderr_is_told_apart(self, cluster: Cluster) -> None:
        cell = run(cluster, "import sys\nprint('bad', file=sys.stderr)", ranks=0)
        assert [(o["name"], o["text"]) for o in cell.outputs(0)] == [
            ("stderr", "bad\n")
        ]

    def test_a_large_output_is_whole(self, cluster: Cluster) -> None:
        cell = run(cluster, "for i in range(20000): print(i)", ranks=0)
        assert stdout(cell, 0).split() == [str(i) for i in range(20000)]

    def test_top_level_await(self, cluster: Cluster) -> None:
        cell = run(cluster, "import asyncio\nawait asyncio.sleep(0.01)\nrank * 10")
        assert texts(cell, 2) == ["20"]

    def test_an_empty_cell(self, cluster: Cluster) -> None:
        assert run(cluster, "  \n").outputs(0) == []

    def test_input_is_refused_at_once(self, cluster: Cluster) -> None:
        cell = cluster.execute("input('name? ')", ranks=0)
        assert cell.wait(WAIT)
        assert cell.errors[0].ename == "StdinNotImplementedError"
        assert "%dist_debug" in cell.errors[0].evalue


class TestErrors:
    def test_the_traceback_has_the_notebooks_cell_and_line(
        self, cluster: Cluster
    ) -> None:
        code = "x = 1\n\nif rank == 2:\n    1 / 0"
        cell = cluster.execute(code, cell=17)
        with pytest.raises(ExecutionError, match="rank 2, line 4: ZeroDivisionError"):
            cell.result(WAIT)
        error = cell.errors[2]
        assert list(cell.errors) == [2]
        assert (error.cell, error.line, error.rank) == (17, 4, 2)
        assert "Cell In[17], line 4" in error.plain_traceback
        assert "----> 4     1 / 0" in error.plain_traceback

    def test_the_line_of_a_syntax_error(self, cluster: Cluster) -> None:
        cell = cluster.execute("x = 1\nx ===", cell=5, ranks=0)
        assert cell.wait(WAIT)
        assert (cell.errors[0].ename, cell.errors[0].line) == ("SyntaxError", 2)

    def test_the_users_line_where_the_library_raises(self, cluster: Cluster) -> None:
        cell = cluster.execute("x = 1\n\ndist.all_reduce('text')", cell=6, ranks=0)
        assert cell.wait(WAIT)
        assert cell.errors[0].line == 3
        assert "Cell In[6], line 3" in cell.errors[0].plain_traceback

    def test_a_function_of_an_earlier_cell_is_named(self, cluster: Cluster) -> None:
        run(cluster, "def fail():\n    raise KeyError('k')", cell=8)
        cell = cluster.execute("fail()", cell=9, ranks=0)
        assert cell.wait(WAIT)
        assert "Cell In[8], line 2" in cell.errors[0].plain_traceback
        assert "Cell In[9], line 1" in cell.errors[0].plain_traceback
        assert (cell.errors[0].cell, cell.errors[0].line) == (9, 1)

    def test_a_failed_cell_does_not_cancel_those_queued_behind(
        self, cluster: Cluster, go_on: Path
    ) -> None:
        first = cluster.execute(UNTIL_FILE.format(str(go_on)) + "1/0")
        second = cluster.execute("rank")
        go_on.touch()
        assert second.wait(WAIT)
        assert first.done
        assert sorted(first.errors) == [0, 1, 2, 3]
        assert texts(second, 3) == ["3"]

    def test_waiting_has_a_deadline(self, cluster: Cluster, go_on: Path) -> None:
        cell = cluster.execute(UNTIL_FILE.format(str(go_on)), ranks=[1, 2])
        with pytest.raises(TimeoutError, match=r"still runs on ranks 1–2$"):
            cell.result(0.1)
        go_on.touch()
        cell.result(WAIT)

    def test_a_deadline_that_passes_tells_who_has_failed(
        self, cluster: Cluster, go_on: Path
    ) -> None:
        waiting = UNTIL_FILE.format(str(go_on)).replace("\n", "\n    ")
        cell = cluster.execute(f"if rank:\n    {waiting}\nelse: 1/0", ranks=[0, 1])
        # An error comes before the end of its cell.
        until(lambda: cell.errors and cell.ranks_running == [1])
        with pytest.raises(TimeoutError, match=r"on rank 1; rank 0.* ZeroDivisionErr"):
            cell.result(0.1)
        go_on.touch()
        assert cell.wait(WAIT)


class TestVariables:
    def test_push_and_pull(self, cluster: Cluster) -> None:
        array = np.arange(1000.0)
        cluster.push({"a": array, "b": "text"})
        assert np.array_equal(cluster.pull("a", 2)[2], array)
        assert cluster.pull(["a", "b"], [0, 3])[3]["b"] == "text"
        run(cluster, "a[0] = rank")
        assert [one[0] for one in cluster.pull("a").values()] == [0, 1, 2, 3]

    def test_a_name_that_is_not_there(self, cluster: Cluster) -> None:
        run(cluster, "only_here = 1", ranks=1)
        with pytest.raises(
            ClusterError, match=r"only_here.*ranks 0, 2–3: there is no variable"
        ):
            cluster.pull("only_here")

    def test_a_busy_rank_and_a_deadline(self, cluster: Cluster, go_on: Path) -> None:
        cell = cluster.execute(UNTIL_FILE.format(str(go_on)), ranks=1)
        with pytest.raises(TimeoutError, match="when the cell that runs there is done"):
            cluster.push({"c": 1}, 1, timeout=0.1)
        go_on.touch()
        cell.result(WAIT)


class TestWhileMainsAreBlocked:
    @pytest.fixture
    def blocked(self, cluster: Cluster, go_on: Path) -> Any:
        cell = cluster.execute("x = rank\n" + UNTIL_FILE.format(str(go_on)), cell=33)
        until(lambda: _cells(cluster) == [33] * 4, WAIT, "all ranks to run cell 33")
        # IPython tells the front end of a cell that begins before it runs a line.
        until(
            lambda: all("Cell In[33]" in text for text in cluster.where().values()),
            WAIT,
            "all ranks to be in cell 33",
        )
        # What the status tells came with a heartbeat, maybe from before the line.
        until(
            lambda: all(one.line for one in cluster.status().ranks),
            WAIT,
            "a heartbeat of each rank out of cell 33",
        )
        yield cell
        go_on.touch()
        cell.result(WAIT)

    def test_status_says_what_runs(self, cluster: Cluster, blocked: Any) -> None:
        status = cluster.status()
        assert [one.state for one in status.ranks] == ["busy"] * 4
        assert all(one.pid == cluster.pids[one.rank] for one in status.ranks)
        assert all(one.line.startswith("cell 33 line ") for one in status.ranks)
        assert all(one.line_for is not None for one in status.ranks)
        assert status.groups == {"default": [0, 1, 2, 3]}
        assert status.ranks[0].groups[0].state == "ready"

    def test_where_shows_the_cells_line(self, cluster: Cluster, blocked: Any) -> None:
        where = cluster.where()
        assert list(where) == [0, 1, 2, 3]
        for text in where.values():
            assert text.startswith("Cell In[33], line ")
            assert "time.sleep(0.01)" in text or "os.path.exists" in text

    def test_heartbeats_come_on_a_thread_of_their_own(
        self, cluster: Cluster, blocked: Any
    ) -> None:
        heard: dict[int, int] = {}
        threads = set()

        def hear(rank: int, summary: Summary) -> None:
            heard[rank] = heard.get(rank, 0) + 1
            threads.add(threading.current_thread())

        cancel = cluster.subscribe(hear)
        until(lambda: sorted(heard) == [0, 1, 2, 3], WAIT, "a heartbeat of each rank")
        cancel()
        assert threading.main_thread() not in threads

    def test_requests_from_many_threads_at_once(
        self, cluster: Cluster, blocked: Any
    ) -> None:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: cluster.where(), range(24)))
        assert all(sorted(one) == [0, 1, 2, 3] for one in answers)
        assert all("Cell In[33]" in text for one in answers for text in one.values())

    def test_a_silent_rank_does_not_hide_the_others(
        self, cluster: Cluster, blocked: Any
    ) -> None:
        stop(cluster.pids[2])
        try:
            where = cluster.where()
            assert "no answer within" in where[2]
            assert all("Cell In[33]" in where[rank] for rank in (0, 1, 3))
            until(
                lambda: cluster.status().ranks[2].state == "unreachable",
                WAIT,
                "silence to be noticed",
            )
            assert cluster.status().ranks[1].state == "busy"
        finally:
            os.kill(cluster.pids[2], signal.SIGCONT)
        until(lambda: cluster.status().ranks[2].state == "busy", WAIT, "it to be back")


def _cells(cluster: Cluster) -> list[int | None]:
    return [one.cell for one in cluster.status().ranks]


class TestInterrupt:
    @pytest.mark.parametrize(
        ("number", "blocking"),
        [
            (51, "import time\ntime.sleep(60)"),
            (52, "import threading\nthreading.Event().wait()"),
            (53, "import os\nr, w = os.pipe()\nos.read(r, 1)"),
            (54, "while True: pass"),
            (55, "import subprocess\nsubprocess.run(['sleep', '60'])"),
        ],
        ids=["sleep", "lock", "read", "loop", "child"],
    )
    def test_it_ends_the_cell(
        self, cluster: Cluster, number: int, blocking: str
    ) -> None:
        # A number of its own: what the ranks said of another cell may come late.
        cell = cluster.execute(blocking, cell=number)
        last = blocking.count("\n") + 1
        until_at(cluster, cluster.ranks, number, last)
        assert cluster.interrupt() == [0, 1, 2, 3]
        assert cell.wait(WAIT)
        assert {one.ename for one in cell.errors.values()} == {"KeyboardInterrupt"}
        assert texts(run(cluster, "rank + 1"), 1) == ["2"]

    def test_a_cell_that_awaits(self, cluster: Cluster) -> None:
        cell = cluster.execute("import asyncio\nawait asyncio.sleep(60)", cell=41)
        until(lambda: _cells(cluster) == [41] * 4, WAIT, "all ranks to run it")
        cluster.interrupt()
        assert cell.wait(WAIT)
        assert sorted(cell.errors) == [0, 1, 2, 3]
        assert texts(run(cluster, "rank + 1"), 1) == ["2"]

    def test_some_ranks_only(self, cluster: Cluster, go_on: Path) -> None:
        before = run(cluster, "1")
        cell = cluster.execute(UNTIL_FILE.format(str(go_on)), cell=42)
        until_at(cluster, [1, 3], 42, 3)
        # One that comes late, for the cell before, is not for this one.
        assert cluster.interrupt([1, 3], before) == []
        assert cluster.interrupt([1, 3]) == [1, 3]
        until(lambda: cell.ranks_running == [0, 2], WAIT, "two to end")
        go_on.touch()
        assert cell.wait(WAIT)
        assert sorted(cell.errors) == [1, 3]

    def test_idle_ranks_take_no_harm(self, cluster: Cluster) -> None:
        before = dict(cluster.pids)
        # The end of the cell before may be told before the agent knows of it.
        until(lambda: cluster.interrupt() == [], WAIT, "the ranks to be idle")
        for _ in range(5):
            assert cluster.interrupt() == []
        assert texts(run(cluster, "rank"), 3) == ["3"]
        assert cluster.pids == before

    def test_a_second_interrupt_lets_the_first_be_shown(
        self, cluster: Cluster, tmp_path: Path
    ) -> None:
        # Not a function of a cell, whose lines can be interrupted.
        run(cluster, f"exec(compile({SLOW_TRACEBACK!r}, 'slow.py', 'exec'))")
        run(cluster, f"folder = {str(tmp_path)!r}")
        cell = cluster.execute("import time\ntime.sleep(60)", cell=43)
        until_at(cluster, cluster.ranks, 43, 2)
        cluster.interrupt()
        shown = [tmp_path / str(rank) for rank in cluster.ranks]
        until(lambda: all(file.exists() for file in shown), WAIT, "the tracebacks")
        cluster.interrupt()
        assert cell.wait(WAIT)
        until(
            lambda: all(file.read_text() == "shown" for file in shown), WAIT, "the end"
        )
        assert {one.ename for one in cell.errors.values()} == {"KeyboardInterrupt"}
        assert texts(run(cluster, "rank + 1"), 1) == ["2"]

    def test_a_storm_of_interrupts_leaves_the_engines_alive(
        self, cluster: Cluster
    ) -> None:
        before = dict(cluster.pids)
        for number in range(10):
            # Ends about when the interrupt comes: before, in or after the cell.
            cell = cluster.execute(f"import time\ntime.sleep({number} / 500)")
            cluster.interrupt()
            assert cell.wait(WAIT)
        assert texts(run(cluster, "rank"), 3) == ["3"]
        assert cluster.pids == before
        assert cluster.status().dead == []


class TestWrongArguments:
    @pytest.mark.parametrize("ranks", [[9], [-1], 4, [True], ["0"]])
    def test_a_rank_that_is_not_there(self, cluster: Cluster, ranks: Any) -> None:
        with pytest.raises(ClusterError, match="this cluster has ranks 0–3"):
            cluster.execute("1", ranks=ranks)

    def test_one_rank_that_is_not_there(self, cluster: Cluster) -> None:
        with pytest.raises(ClusterError, match="there is no rank 4; this cluster has"):
            cluster.answer_prompt(4, 1, "p x")
        with pytest.raises(ClusterError, match="there is no rank 4; this cluster has"):
            cluster.nccl_report(4)

    def test_no_ranks(self, cluster: Cluster) -> None:
        with pytest.raises(ClusterError, match="name at least one rank"):
            cluster.execute("1", ranks=[])

    def test_a_group_that_is_not_there(self, cluster: Cluster) -> None:
        for call in (
            lambda: cluster.execute("1", group="tp"),
            lambda: cluster.abort("tp"),
            lambda: cluster.rebuild("tp"),
        ):
            with pytest.raises(ClusterError, match="no group called 'tp'.*'default'"):
                call()


class TestGroups:
    def test_a_cell_of_a_group_runs_on_its_ranks(self, cluster: Cluster) -> None:
        run(cluster, "tp = dist.new_group([1, 3], group_desc='pair')")
        cell = run(cluster, "dist.get_world_size(), dist.get_rank()", group="pair")
        assert cell.ranks == [1, 3]
        assert [texts(cell, r) for r in (1, 3)] == [["(2, 0)"], ["(2, 1)"]]
        # The default group is back in the next cell.
        assert texts(run(cluster, "dist.get_world_size()"), 1) == ["4"]
        assert cluster.status().groups["pair"] == [1, 3]

    def test_ranks_outside_the_group_are_refused(self, cluster: Cluster) -> None:
        run(cluster, "g = dist.new_group([0, 2], group_desc='even')")
        with pytest.raises(ClusterError, match=r"rank 1 is not in group 'even'"):
            cluster.execute("1", group="even", ranks=[0, 1])
        assert run(cluster, "rank", group="even", ranks=[2]).ranks == [2]
