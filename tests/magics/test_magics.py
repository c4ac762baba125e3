"""The magics on four real ranks, typed into an IPython shell in this process."""

from __future__ import annotations

import itertools
import json
import operator
import os
import pickle
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from rankscope.backends import unavailable_reason
from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster
from rankscope.engines.errors import plain
from rankscope.magics import (
    BackgroundCell,
    CellError,
    CellTimeout,
    CommandError,
    Interrupted,
    current_cluster,
)
from rankscope.magics.language.values import parse_ranks
from rankscope.magics.output import deduplicate as merge
from rankscope.widgets import ProfileReport
from tests.engines.cluster.faults import WAIT, until_at

pytestmark = pytest.mark.processes  # %dist_init starts them


@dataclass
class Seen:
    """What a person saw of one cell."""

    out: str
    err: str
    displays: list[Any]
    error: BaseException | None
    value: Any


class Notebook:
    """Types cells into a shell, and looks."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell

    def __call__(self, *lines: str) -> Seen:
        with capture_output() as seen:
            result = self.shell.run_cell("\n".join(lines), store_history=True)
        error = result.error_before_exec or result.error_in_exec
        err = plain(seen.stderr)
        return Seen(plain(seen.stdout), err, seen.outputs, error, result.result)

    @property
    def number(self) -> int:
        """The number of the cell that comes next."""
        return self.shell.execution_count

    def refused(self, *lines: str) -> str:
        """The one message of a cell that is refused with a usage error."""
        seen = self(*lines)
        assert type(seen.error).__name__ == "UsageError", seen
        assert "Traceback" not in seen.err + seen.out
        message = seen.err or seen.out
        assert message.startswith("UsageError: ")
        assert message.count("usage:") + message.count("--help shows") == 1
        return message


@pytest.fixture(scope="module")
def notebook(ipython: InteractiveShell) -> Iterator[Notebook]:
    """A notebook that has started four ranks."""
    typed = Notebook(ipython)
    seen = typed("%dist_init -n 4")
    assert seen.error is None, seen
    with pytest.MonkeyPatch.context() as patch:
        # A terminal takes nothing back, and this machine may be slow: nothing
        # here is about how long a rank is waited for.
        patch.setattr(merge, "HOLD", 10.0)
        yield typed
    typed("%dist_shutdown")


@pytest.fixture
def cluster(notebook: Notebook) -> Cluster:
    """The notebook's cluster."""
    found = current_cluster()
    assert isinstance(found, Cluster)
    return found


@pytest.fixture(autouse=True)
def _the_group_is_usable_afterwards(notebook: Notebook) -> Iterator[None]:
    yield
    seen = notebook(
        "%%distributed -t 20",
        "_sum = np.full(2, rank)",
        "dist.all_reduce(_sum)",
        "_sum.tolist()",
    )
    if (seen.error, seen.out) != (None, "[0-3] [6, 6]\n"):
        # One test that has failed must not fail those that follow.
        anew = notebook("%dist_init -n 4 --replace")
        pytest.fail(f"the group is not usable: {seen}; started anew: {anew}")


# -- output ----------------------------------------------------------------------


def test_shared_output_is_shown_once_and_the_rest_by_rank(notebook: Notebook) -> None:
    seen = notebook("%%distributed", "print('hello')", "print('I am', rank)", "rank**2")
    assert seen.out.splitlines() == [
        "[0-3] hello",
        *(f"[{r}]   I am {r}" for r in range(4)),
        *(f"[{r}]   {r * r}" for r in range(4)),
    ]


def test_a_rank_that_is_late_shares_its_lines(notebook: Notebook) -> None:
    seen = notebook(
        "%%distributed", "import time", "time.sleep(rank == 3)", "print('x')", "rank**0"
    )
    assert seen.out == "[0-3] x\n[0-3] 1\n", seen


def test_without_collapse_each_rank_has_its_own_lines(notebook: Notebook) -> None:
    seen = notebook("%%distributed --no-collapse -r 0-1", "print('hello')")
    assert sorted(seen.out.splitlines()) == ["[0]   hello", "[1]   hello"]


def test_the_namespace_is_there_without_imports(notebook: Notebook) -> None:
    seen = notebook(
        "%%distributed", "(world_size, np.__name__, dist.get_rank() == rank)"
    )
    assert seen.out == "[0-3] (4, 'numpy', True)\n"


@pytest.mark.parametrize(
    ("option", "ranks"),
    [("-r 2", [2]), ("-r 0,2-3", [0, 2, 3]), ("--ranks=1", [1]), ("-r all", range(4))],
)
def test_ranks_are_chosen(notebook: Notebook, option: str, ranks: list[int]) -> None:
    seen = notebook(f"%%distributed {option}", "print(rank)")
    assert seen.out.splitlines() == [f"[{r}]   {r}" for r in ranks]


def test_a_group_is_run_on_its_own_ranks_as_the_default(notebook: Notebook) -> None:
    made = notebook("%%distributed", "even = dist.new_group([0, 2], group_desc='even')")
    assert made.error is None, made
    seen = notebook(
        "%%distributed -g even", "x = np.ones(1)", "dist.all_reduce(x)", "float(x[0])"
    )
    assert seen.out == "[0,2] 2.0\n", seen


def test_standard_error_is_labelled_too(notebook: Notebook) -> None:
    seen = notebook("%%distributed -r 1-2", "import sys", "print('!', file=sys.stderr)")
    assert (seen.out, seen.err) == ("", "[1-2] !\n")


def test_rich_output_is_shown_once_under_its_ranks(notebook: Notebook) -> None:
    seen = notebook(
        "%%distributed",
        "from IPython.display import HTML",
        "HTML('<b>low</b>' if rank < 2 else '<b>high</b>')",
    )
    # A shell without a front end shows the text of it.
    assert seen.out.splitlines() == [
        "[0-1] <IPython.core.display.HTML object>",
        "[2-3] <IPython.core.display.HTML object>",
    ]


def test_a_cell_that_prints_much_is_shown_whole(notebook: Notebook) -> None:
    seen = notebook("%%distributed", "for i in range(20_000):", "    print('line', i)")
    shown: dict[int, list[str]] = {rank: [] for rank in range(4)}
    for line in seen.out.splitlines():
        # A rank that is late on a busy machine has lines of its own.
        label, _, text = line.partition("] ")
        for rank in parse_ranks(label[1:], range(4)):
            shown[rank].append(text.strip())
    for lines in shown.values():
        # Pytest would compare each line with each other one.
        same = lines == [f"line {i}" for i in range(20_000)]
        assert same, f"{len(lines)} lines, {lines[:3]} to {lines[-3:]}"


# -- errors ----------------------------------------------------------------------


def test_an_error_of_all_ranks_is_one_line_and_one_traceback_with_the_true_line(
    notebook: Notebook,
) -> None:
    number = notebook.number
    seen = notebook("%%distributed", "x = 1", "raise KeyError('missing')")
    assert isinstance(seen.error, CellError)
    what = f"ranks 0–3: KeyError: 'missing' at cell {number} line 3"
    assert str(seen.error).splitlines() == [
        f"{what} `raise KeyError('missing')`",
        "Next: %tb shows the traceback",
    ]
    assert seen.err == f"{what}\n"
    assert {e.line for e in seen.error.errors.values()} == {3}
    # The cell itself ends with no traceback of the notebook's.
    assert seen.out.strip() == f"CellError: {seen.error}"
    shown = notebook("%tb").out
    assert shown.startswith("ranks 0–3\n")
    assert shown.count("Traceback (most recent call last)") == 1
    assert f"In[{number}], line 3" in shown


def test_an_error_that_differs_in_the_rank_lists_the_messages(
    notebook: Notebook,
) -> None:
    seen = notebook("%%distributed", "raise ValueError(f'bad on {rank}')")
    assert "(and alike)" in str(seen.error)
    shown = notebook("%tb").out
    assert shown.count("Traceback (most recent call last)") == 1
    for rank in range(4):
        assert f"[{rank}] ValueError: bad on {rank}" in shown


def test_a_syntax_error_has_the_true_line(notebook: Notebook) -> None:
    number = notebook.number
    seen = notebook("%%distributed", "x = 1", "1 +")
    assert f"SyntaxError: invalid syntax at cell {number} line 3" in str(seen.error)


def test_an_indented_cell_and_an_inner_cell_magic_run(notebook: Notebook) -> None:
    assert notebook("%%distributed -r 0", "  x = 5", "  x").out == "[0]   5\n"
    inner = notebook("%%distributed -r 0", "%%capture said", "print('x')")
    assert inner.error is None
    assert notebook("%%distributed -r 0", "said.stdout").out == "[0]   'x\\n'\n"


def test_ranks_that_wait_for_one_that_raised_are_released(notebook: Notebook) -> None:
    number = notebook.number
    seen = notebook(
        "%%distributed",
        "x = np.ones(2)",
        "if rank == 2:",
        "    raise ValueError('boom')",
        "dist.all_reduce(x)",
    )
    assert isinstance(seen.error, CellError)
    what = f"rank 2: ValueError: boom at cell {number} line 4"
    assert str(seen.error).splitlines() == [
        f"{what} `raise ValueError('boom')`; ranks 0–1, 3: op aborted",
        "Next: group 'default' rebuilt; %tb shows the traceback",
    ]
    assert f"{what}\n" in seen.err
    assert (
        f"at cell {number} line 5, which rank 2 will not join: "
        "group 'default' aborted" in seen.err
    )
    reason = f"rank 2 raised ValueError at cell {number} line 4"
    assert reason in str(seen.error.errors[0].evalue)


@pytest.mark.parametrize("absent", [0, 3])
def test_ranks_that_wait_for_one_that_never_joins_are_released(
    notebook: Notebook, absent: int
) -> None:
    """Its group is not made there; of the default group not even the store may be."""
    first = notebook.number
    seen = notebook(
        "%%distributed",
        f"if rank == {absent}:",
        "    raise ValueError('boom')",
        "dist.barrier(group=dist.new_group([0, 3]))",
    )
    assert isinstance(seen.error, CellError)
    name = "ranks 0,3"
    assert f"which rank {absent} will not join: group '{name}' aborted" in seen.err
    assert "aborting group" not in seen.err

    notebook("%%distributed", "dist.destroy_process_group()")
    number = notebook.number
    seen = notebook(
        "%%distributed",
        f"if rank == {absent}:",
        "    raise ValueError('boom')",
        "dist.init_process_group()",
    )
    assert isinstance(seen.error, CellError)
    assert seen.error.errors.keys() == {0, 1, 2, 3}
    ended = seen.error.errors[1]
    assert (ended.ename, ended.op, ended.culprits) == (
        "DistAbortedError",
        "init_process_group",
        (absent,),
    )
    assert ended.evalue == (
        f"init_process_group: rank {absent} raised ValueError at cell {number} line 3, "
        "and will not come"
    )
    assert first < number
    again = notebook("%%distributed", "dist.init_process_group()", "dist.barrier()")
    assert again.error is None


# -- endings ---------------------------------------------------------------------


def test_the_deadline_ends_a_cell(notebook: Notebook) -> None:
    number = notebook.number
    seen = notebook(
        "%%distributed -t 3",
        "import time",
        "if rank == 0:",
        "    time.sleep(60)",
        "dist.barrier()",
    )
    assert isinstance(seen.error, CellTimeout)
    message = str(seen.error)
    assert message.startswith("not done after 3 s\nWhy: rank 0 has not entered barr")
    place = f"(cell {number} line 5): it is at cell {number} line 4; "
    assert f"{place}ranks 1–3 wait in it\nNext: " in message
    # Each place once.
    assert message.count("ranks 1–3") == 1
    assert "group 'default' rebuilt" in message
    assert "Traceback" not in seen.err


def test_ctrl_c_ends_a_cell_and_the_next_one_works(
    notebook: Notebook, cluster: Cluster
) -> None:
    number = notebook.number

    def press() -> None:
        until_at(cluster, cluster.ranks, number, 4)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    seen = notebook("%%distributed", "import time", "print('on')", "time.sleep(60)")
    thread.join()
    assert isinstance(seen.error, Interrupted)
    assert f"; ranks 0–3 at cell {number} line 4" in str(seen.error)
    assert "] on\n" in seen.out
    assert "Traceback" not in seen.err + seen.out


def test_a_killed_engine_is_an_error_and_is_replaced(
    notebook: Notebook, cluster: Cluster
) -> None:
    notebook("%%distributed", "kept = rank")
    pid, number = cluster.pids[1], notebook.number

    def kill() -> None:
        until_at(cluster, [1], number, 4)
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    seen = notebook(
        "%%distributed",
        "import time",
        "if rank == 1:",
        "    time.sleep(60)",
        "dist.barrier()",
    )
    thread.join()
    assert isinstance(seen.error, CellError)
    assert "killed by SIGKILL" in str(seen.error)
    assert "%dist_restart and %dist_rebuild replace rank 1" in str(seen.error)
    table = notebook("%dist_status").displays[0].data["text/plain"]
    assert "rank 1 dead" in table
    assert "1 dead" in notebook("%dist_init -n 4").out
    restarted = notebook("%dist_restart")
    assert restarted.out.startswith("rank 1 restarted in ")
    assert notebook("%dist_rebuild").out == "all groups rebuilt\n"
    seen = notebook("%%distributed", "print('kept' in globals())")
    assert seen.out.splitlines() == ["[0,2-3] True", "[1]   False"]


def test_the_values_of_a_cell_come_into_the_notebook(notebook: Notebook) -> None:
    seen = notebook("%%distributed -o both -r 0,2", "np.full(2, rank)")
    assert seen.out.startswith("[0]   array([0, 0])\n")
    assert [list(one) for one in notebook("both").value] == [[0, 0], [2, 2]]
    notebook("%%distributed -o", "x = rank * 2", "x")
    assert notebook("_ranks").value == [0, 2, 4, 6]
    # A cell that does not end with an expression has none, not that of another cell.
    seen = notebook("%%distributed -o nothing", "x = rank")
    assert "nothing is a list of None; end the cell with an expression" in seen.out
    assert notebook("nothing").value == [None] * 4


def test_values_that_cannot_come_are_refused(notebook: Notebook) -> None:
    seen = notebook("%%distributed -o locks", "import threading", "threading.Lock()")
    assert isinstance(seen.error, CommandError)
    assert "cannot pickle" in str(seen.error)
    assert "locks" not in notebook.shell.user_ns
    seen = notebook("%%distributed -o later --async", "1")
    assert "-o waits for the values" in seen.err
    seen = notebook("%%distributed -o a.b", "1")
    assert "-o a.b: expected the name of a variable" in seen.err


def test_every_cell_runs_on_the_ranks_while_the_mode_is_on(notebook: Notebook) -> None:
    assert "on ranks 0, 2–3 from now on" in notebook("%dist_mode on -r 0,2-3").out
    try:
        seen = notebook("# a cell", "everywhere = rank", "everywhere")
        marked = "on ranks 0, 2–3 · %dist_mode off ends this"
        assert seen.out.splitlines() == [marked, "[0]   0", "[2]   2", "[3]   3"]
        # Lines are numbered as in the notebook.
        number = notebook.number
        seen = notebook("x = 1", "raise ValueError('here')")
        assert f"at cell {number} line 2" in str(seen.error)
        assert notebook("%dist_mode").out.endswith("%%distributed -r 0,2-3\n")
        assert "[0-3] 1" in notebook("%%distributed", "1").out
    finally:
        assert "cells run in the notebook" in notebook("%dist_mode off").out
    assert notebook("6 * 7").value == 42
    assert "everywhere" not in notebook.shell.user_ns


def test_a_cell_on_some_ranks(notebook: Notebook) -> None:
    assert notebook("%%rank 1,3 -o some", "rank").out == "[1]   1\n[3]   3\n"
    assert notebook("some").value == [1, 3]
    assert "9: there is no rank 9" in notebook.refused("%%rank 9", "1")
    assert "RANKS is missing" in notebook.refused("%%rank", "1")


def test_a_background_cell_has_a_handle(notebook: Notebook) -> None:
    seen = notebook("%%distributed --async", "print('hi')", "rank + 1")
    handle = seen.value
    assert isinstance(handle, BackgroundCell)
    with capture_output() as replayed:
        assert handle.result(WAIT) == {0: "1", 1: "2", 2: "3", 3: "4"}
    assert replayed.stdout.startswith("[0-3] hi\n[0]   1\n")
    assert handle.state == "done"
    until(lambda: "done after" in repr(handle))
    assert "[0-3] hi" in repr(handle)


def test_a_background_cell_is_interrupted(notebook: Notebook) -> None:
    handle = notebook(
        "%%distributed --async", "import time", "print('on', flush=True)",
        "time.sleep(60)",
    ).value  # fmt: skip
    until(lambda: "[0-3] on" in repr(handle))
    assert handle.state == "running"
    with capture_output():
        assert not handle.wait(0.01)
        with pytest.raises(TimeoutError, match="still runs on ranks"):
            handle.result(0.01)
    handle.interrupt()
    with capture_output(), pytest.raises(CellError, match="KeyboardInterrupt"):
        handle.result(WAIT)
    assert handle.state == "failed"
    # The group is looked at when the watch is over.
    until(lambda: "failed after" in repr(handle))


# -- profiles ---------------------------------------------------------------------


SPINS = ("%%distributed --async", "import time", "print('on', flush=True)",
         "while True: time.sleep(0.002) if rank else sum(range(1000))")  # fmt: skip


def test_a_profile_shows_where_the_ranks_are(
    notebook: Notebook, cluster: Cluster
) -> None:
    idle = notebook("%dist_profile")
    assert (idle.error, idle.out) == (None, "ranks 0–3: idle: no cell runs\n")
    number, handle = notebook.number, notebook(*SPINS).value
    try:
        until(lambda: "[0-3] on" in repr(handle))
        at = f"at cell {number} line 4"
        until_at(cluster, range(4), number, 4)
        now = notebook("%dist_profile -r 1-3").out
        assert now.startswith(f"ranks 1–3: {at}\n    cell {number} line 4  while True")
        every = notebook("%dist_profile -r 0 --all").out
        assert "thread rankscope-status" in every
        seen = notebook("%dist_profile -t 0.3 -r 0,2")
    finally:
        handle.interrupt()
        with capture_output(), pytest.raises(CellError):
            handle.result(WAIT)
    report = seen.value
    assert isinstance(report, ProfileReport)
    assert set(report.profile.ranks) == {0, 2}
    for sampled in report.profile.ranks.values():
        # The notebook may end it a moment early.
        assert sampled.seconds > 0.2
        assert sampled.looks > 0
    assert f"cell {number} line 4" in repr(report)
    assert 'class="rankscope-flame"' in report._repr_mimebundle_()["text/html"]


def test_an_interrupted_profile_has_what_was_seen(
    notebook: Notebook, cluster: Cluster
) -> None:
    def interrupt(so_far: float) -> None:
        if so_far > 0.1:
            raise KeyboardInterrupt

    profile = cluster.sample(600, [1], on_progress=interrupt)
    assert 0.1 < profile.ranks[1].seconds < WAIT
    assert "idle" in repr(ProfileReport(profile))
    assert "up to 3600 s" in notebook("%dist_profile -t 5000").out


# -- traces -----------------------------------------------------------------------


def test_a_trace_is_written_for_perfetto_and_for_torch(
    notebook: Notebook, tmp_path: Path
) -> None:
    notebook("%%distributed", "dist.all_reduce(np.ones(4))")
    file = tmp_path / "run.json"
    assert notebook(f"%dist_trace {file}").out == (
        f"{file} written: open it at ui.perfetto.dev\n"
    )
    events = json.loads(file.read_text())["traceEvents"]
    ranks = {event["pid"] for event in events if "all_reduce" in event["name"]}
    assert len(ranks) == 4
    folder = tmp_path / "dumps"
    folder.mkdir()
    said = notebook(f"%dist_trace {folder}/").out
    files = sorted(folder.iterdir())
    assert said.startswith(f"{files[0]} … {files[-1]} written, 4 in all: ")
    for dump in folder.iterdir():
        names = [
            e["profiling_name"] for e in pickle.loads(dump.read_bytes())["entries"]
        ]
        assert any("all_reduce" in name for name in names)
    assert len(list(folder.iterdir())) == 4
    refused = notebook(f"%dist_trace {tmp_path}/x.txt")
    assert f".txt is no format that is known: {tmp_path}/x.json is a" in refused.err
    assert not (tmp_path / "x.txt0").exists()
    missing = notebook(f"%dist_trace {tmp_path}/nowhere/run.json")
    assert "nowhere" in str(missing.error)


# -- benchmarks -------------------------------------------------------------------


def test_a_benchmark_returns_its_table_and_writes_it_down(
    notebook: Notebook, tmp_path: Path
) -> None:
    file = tmp_path / "found.csv"
    seen = notebook(
        f"%dist_bench broadcast --sizes 1K:4K --backend tcp --iters 2 --csv {file}"
    )
    assert seen.error is None
    assert list(seen.value["size"]) == [1024, 2048, 4096]
    assert set(seen.value["backend"]) == {"tcp"}
    assert not any(seen.value["wrong"])
    assert len(file.read_text().splitlines()) == 4
    assert "# broadcast · 4 ranks" in repr(seen.value)


def test_a_benchmark_that_fails_says_so_in_one_line(notebook: Notebook) -> None:
    seen = notebook("%dist_bench --sizes 1K --backend tcp,mpi --iters 1")
    assert "Traceback" not in seen.out + seen.err
    assert "ranks 0–3: DistBackendError" in str(seen.error)
    remedy = "pip install" if unavailable_reason("mpi") else "%dist_init --engines mpi"
    assert remedy in str(seen.error)
    # What was measured before it is shown all the same.
    assert "1024" in seen.displays[-1].data["text/plain"]
    assert notebook("%%distributed", "dist.barrier()").error is None


@pytest.mark.skipif(unavailable_reason("nccl") is None, reason="NCCL can be used")
def test_a_benchmark_of_nccl_says_what_it_needs(notebook: Notebook) -> None:
    reason = unavailable_reason("nccl")
    for options in ("--backend nccl", "--backend nccl --device cuda"):
        seen = notebook(f"%dist_bench --sizes 1K {options}")
        assert str(seen.error) == f"ranks 0–3: DistBackendError: {reason}"


def test_a_benchmark_that_makes_no_sense_is_refused(notebook: Notebook) -> None:
    assert "expected FIRST:LAST" in notebook.refused("%dist_bench --sizes 4M:1K")
    assert "expected a dtype" in notebook.refused("%dist_bench --dtype flot")
    assert "no group 'tp'" in notebook.refused("%dist_bench -g tp")
    assert "expected one of all_reduce" in str(notebook("%dist_bench all").error)
    typed = str(notebook("%dist_bench allreduce").error)
    assert typed.endswith("; did you mean all_reduce?")


# -- variables and groups ----------------------------------------------------------


def test_variables_are_pushed_and_pulled(notebook: Notebook) -> None:
    ns = notebook.shell.user_ns
    notebook("import numpy", "a = numpy.arange(3.0)", "b = {'x': [1]}")
    assert notebook("%dist_push a b").out == "a, b → ranks 0–3\n"
    seen = notebook("%%distributed", "got = (float(a.sum()), b, rank)", "got[:2]")
    assert seen.out == "[0-3] (3.0, {'x': [1]})\n"
    assert notebook("%dist_pull got").out == "got ← ranks 0–3 (lists of 4)\n"
    assert [rank for _, _, rank in ns["got"]] == [0, 1, 2, 3]
    notebook("%dist_pull -r 2 rank")
    assert ns["rank"] == 2
    notebook("c = 5", "%dist_push c -r 1")
    seen = notebook("%%distributed", "'c' in globals()")
    assert seen.out.splitlines() == ["[0,2-3] False", "[1]   True"]
    notebook("openings = 1")
    # What IPython has put there is no suggestion.
    assert "did you mean openings?" in notebook("%dist_push opening").err
    assert "did you mean" not in notebook("%dist_push opem").err


def test_a_group_is_aborted_and_rebuilt(notebook: Notebook) -> None:
    seen = notebook("%dist_abort default")
    assert seen.out == "group 'default' aborted; %dist_rebuild makes it usable again\n"
    seen = notebook("%%distributed", "dist.barrier()")
    assert isinstance(seen.error, CellError)
    assert (
        str(seen.error)
        .splitlines()[1]
        .startswith("Why: the group was aborted earlier: aborted with %dist_abort")
    )
    assert "Next: group 'default' aborted: %dist_rebuild" in str(seen.error)
    assert "Traceback" not in seen.err
    table = notebook("%dist_status").displays[0].data["text/plain"]
    assert "aborted on ranks 0–3: aborted with %dist_abort" in table
    assert notebook("%dist_rebuild default").out == "group 'default' rebuilt\n"


def test_without_a_group_there_is_nothing_to_abort(notebook: Notebook) -> None:
    notebook("%%distributed", "dist.destroy_process_group()")
    try:
        seen = notebook("%dist_abort")
        assert seen.out == "no rank has a group: there is nothing to abort\n"
        seen = notebook("%dist_rebuild")
        assert seen.out == "no rank has a group: there is nothing to rebuild\n"
    finally:
        made = notebook("%%distributed", "dist.init_process_group()")
    assert made.error is None, made
    assert notebook("%%distributed", "dist.barrier()").error is None


def test_a_rank_that_keeps_the_others_waiting_is_named(notebook: Notebook) -> None:
    # The first op of a group connects it, and is a pause among the others.
    notebook("%%distributed", "import time", "x = np.ones(8)", "dist.all_reduce(x)")
    # The busier the machine, the later the others are, too: then nobody is named.
    pauses = itertools.accumulate(itertools.repeat(2), operator.mul, initial=0.01)

    def named() -> str:
        number = notebook.number
        seen = notebook(
            "%%distributed --late",
            "for _ in range(41):",
            f"    time.sleep({next(pauses)} * (rank == 2))",
            "    dist.all_reduce(x)",
        )
        assert seen.error is None, seen
        counted = "group 'default' (ranks 0–3), 41 collectives"
        line = f"cell {number} line 4"
        found = f"ate rank: rank 2 is last to enter all_reduce at {line}, "
        meanwhile = f"; meanwhile it is at cell {number} line 3: time.sleep(0."
        # An op in which a rank pauses is not counted.
        told = all(one in seen.out for one in (counted, found, meanwhile))
        return found if told else ""

    def told_everywhere() -> bool:
        if not (found := named()):
            return False
        (shown,) = notebook("%dist_status").displays
        diagnosed = notebook("%dist_diagnose").out
        everywhere = shown.data["text/plain"], shown.data["text/html"], diagnosed
        return all(found in one for one in everywhere)

    until(told_everywhere, 60)


def test_late_tells_of_lines_that_the_cell_has_left(notebook: Notebook) -> None:
    seen = notebook(
        "%%distributed --late",
        "import time",
        "x = np.ones(8)",
        "for _ in range(30):",
        "    dist.all_reduce(x)",
        # Of what runs, a line whose next op is overdue for so long is no more told.
        "time.sleep(1.5)",
        "dist.barrier()",
    )
    assert seen.error is None, seen
    found = re.search(r"(\d+) collectives(, without (\d+) in a pause)?:", seen.out)
    assert found is not None, seen.out
    assert int(found[1]) + int(found[3] or 0) == 31
    assert "once all are in, all_reduce of 64 B takes" in seen.out


def test_the_status_is_a_table(notebook: Notebook, cluster: Cluster) -> None:
    notebook("%%distributed", "dist.all_reduce(np.ones(2))")
    (shown,) = notebook("%dist_status").displays
    assert set(shown.data) == {"text/plain", "text/html"}
    for pid in cluster.pids.values():
        assert str(pid) in shown.data["text/plain"]
        assert str(pid) in shown.data["text/html"]
    assert "all_reduce" in shown.data["text/plain"]


def test_the_status_is_that_of_now(notebook: Notebook, cluster: Cluster) -> None:
    slots = cluster._registry.slots
    before = [slot.summary for slot in slots]
    notebook("%%distributed", "dist.barrier()")
    # As if nothing had been published since.
    for slot, summary in zip(slots, before, strict=True):
        slot.summary = summary
    (shown,) = notebook("%dist_status").displays
    groups = [one.groups[0] for one in cluster.glance().ranks]
    assert {one.completed and one.completed.op for one in groups} == {"barrier"}
    assert shown.data["text/plain"].count(f"#{groups[0].issued} barrier") >= 4


# -- bad input -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["%dist_init -n 0"], "there must be at least 1 rank"),
        (["%dist_init -n x"], "expected a number of ranks"),
        (["%dist_init"], "-n N is missing"),
        (["%dist_init -n 2 --backend smoke"], "unknown backend 'smoke'"),
        (["%dist_init -n 2 --backend cpu:tcp,cpu:mpi"], "'cpu' is given twice"),
        (["%dist_init -n 2 --backend cpu:"], "bad part 'cpu:'"),
        (["%dist_init -n 2 --keeep"], "did you mean --keep?"),
        (["%dist_init -n 2"], "%dist_shutdown ends them"),
        (["%dist_init --cluster-id x --keep"], "--keep is for ranks that are started"),
        (["%dist_init -n 2 --connection-file f"], "give one of them"),
        (["%%distributed -r 9", "1"], "there is no rank 9; the cluster has ranks 0–3"),
        (["%%distributed -r 0-", "1"], "'0-' is not a rank"),
        (["%%distributed -g defualt", "1"], "did you mean default?"),
        (["%%distributed --asinc", "1"], "did you mean --async?"),
        (["%%distributed -t never", "1"], "expected seconds"),
        (["%distributed x"], "it stands on the first line of a cell"),
        (["%dist_abort nope"], "there is no group 'nope'"),
        (["%dist_rebuild nope"], "there is no group 'nope'"),
        (["%dist_restart 7"], "there is no rank 7"),
        (["%dist_restart 0 7"], "0,7: there is no rank 7"),
        (["%dist_push never_defined"], "no variable 'never_defined'"),
        (["%dist_push"], "NAME is missing"),
        (["%dist_pull 1x"], "'1x' is not the name of a variable"),
        (["%dist_pull x -r 4"], "there is no rank 4"),
    ],
)
def test_bad_input_is_one_message(
    notebook: Notebook, lines: list[str], message: str
) -> None:
    assert message in notebook.refused(*lines)


def test_what_the_ranks_lack_is_one_line(notebook: Notebook) -> None:
    seen = notebook("%dist_pull not_there")
    assert seen.out.startswith("%dist_pull: ")
    assert "not_there" in seen.out
    assert "Traceback" not in seen.out + seen.err


def test_what_cannot_be_pickled_is_one_line(notebook: Notebook) -> None:
    notebook("import threading", "lock = threading.Lock()")
    seen = notebook("%dist_push lock")
    assert seen.out == "%dist_push: cannot pickle '_thread.lock' object\n"
    assert "Traceback" not in seen.err


def test_init_again_says_that_it_is_running(notebook: Notebook) -> None:
    seen = notebook("%dist_init -n 4")
    assert seen.error is None
    assert seen.out.startswith("already running: 4 ranks · ")


def test_help_is_printed_and_nothing_happens(notebook: Notebook) -> None:
    for line in ("%dist_shutdown --help", "%distributed --help", "%dist_restart -h"):
        seen = notebook(line)
        assert seen.error is None
        assert "usage: %" in seen.out
    assert current_cluster() is not None


def test_loading_again_keeps_the_cluster(notebook: Notebook, cluster: Cluster) -> None:
    assert notebook("%reload_ext rankscope").error is None
    assert current_cluster() is cluster
