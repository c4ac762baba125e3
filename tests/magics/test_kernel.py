"""The magics in a real notebook kernel: what reaches a front end, and when."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from rankscope.backends.conformance.waiting import until
from rankscope.engines.errors import plain
from rankscope.engines.wire import ipykernel_private
from tests.magics.kernels import TIMEOUT, Cell, Kernel, running_kernel
from tools.execution import execute

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def kernel(_module_leaves_nothing: None) -> Iterator[Kernel]:
    """A kernel with four ranks."""
    with running_kernel() as kernel:
        started = kernel("%dist_init -n 4")
        # One line of progress, which becomes the summary, and the board.
        line, board = started.data
        assert "rankscope-board" in board["text/html"]
        assert line["text/plain"].startswith("4 ranks ready in ")
        assert line["text/plain"].endswith("· group 'default'")
        yield kernel
        kernel("%dist_shutdown")


def test_output_is_seen_while_the_cell_runs(kernel: Kernel, tmp_path: Path) -> None:
    # The ranks go on once what they printed was seen.
    cell = kernel(
        "%%distributed",
        "import pathlib, time",
        "for step in range(3):",
        "    print('step', step, flush=True)",
        f"    while not pathlib.Path({str(tmp_path)!r}, str(step)).exists():",
        "        time.sleep(0.01)",
        when={f"step {step}": (tmp_path / str(step)).touch for step in range(3)},
    )
    assert cell.stream() == "[0-3] step 0\n[0-3] step 1\n[0-3] step 2\n"


def test_a_late_rank_is_merged_into_what_was_shown(kernel: Kernel) -> None:
    cell = kernel(
        "%%distributed",
        "import time",
        "time.sleep(0.6 * (rank == 3))",
        "print('done')",
        "rank",
    )
    assert cell.stream() == "[0-3] done\n[0]   0\n[1]   1\n[2]   2\n[3]   3\n"


def test_a_progress_bar_moves_and_leaves_its_last_state(
    kernel: Kernel, tmp_path: Path
) -> None:
    # The first steps last until they were seen.
    cell = kernel(
        "%%distributed",
        "import pathlib, sys, time",
        "for step in range(1, 9):",
        "    print(f'\\r{step}/8', end='', file=sys.stderr, flush=True)",
        f"    seen = pathlib.Path({str(tmp_path)!r}, str(step))",
        "    while step < 3 and not seen.exists():",
        "        time.sleep(0.01)",
        "print(file=sys.stderr)",
        when={f"{step}/8": (tmp_path / str(step)).touch for step in (1, 2)},
    )
    moves = [
        content["data"]["text/plain"]
        for _, kind, content in cell.messages
        if kind in ("display_data", "update_display_data")
        # The board of an earlier cell is updated, too.
        and "board" not in content["transient"].get("display_id", "")
    ]
    # Empty where the last step of all ranks is done, and a rank's cell is not yet.
    steps = [move for move in moves if move]
    assert len(steps) > 1
    assert all("/8" in step for step in steps)
    assert cell.data == []
    # Plain output: it is no error.
    assert cell.stream("stderr") == ""
    assert cell.stream() == "[0-3] 8/8\n"


def test_what_a_call_of_print_writes_stays_together(kernel: Kernel) -> None:
    cell = kernel(
        "%%distributed -r 0-1",
        "import warnings",
        "print(np.array([[rank, 1], [5, 5]]))",
        "print('done')",
        "warnings.warn('old')",
    )
    first, second = "[0]   [[0 1]\n[0]    [5 5]]\n", "[1]   [[1 1]\n[1]    [5 5]]\n"
    # Without a page that is drawn again, the rank that prints first stands first.
    assert cell.stream() in (
        f"{first}{second}[0-1] done\n",
        f"{second}{first}[0-1] done\n",
    )
    (first, second) = cell.stream("stderr").splitlines()
    assert re.fullmatch(r"\[0-1\] cell \d+ line 5: UserWarning: old", first)
    assert second == "[0-1]   warnings.warn('old')"


def test_the_bars_of_tqdm_auto_move(kernel: Kernel, tmp_path: Path) -> None:
    """Its widgets would stand at 0 %."""
    cell = kernel(
        "%%distributed -r 0-1",
        "import pathlib, time",
        "from tqdm.auto import tqdm",
        "bar = tqdm(total=4, desc='load', mininterval=0)",
        "bar.update(1 + rank)",
        f"seen = [pathlib.Path({str(tmp_path)!r}, str(one)) for one in (1, 2)]",
        "while not all(one.exists() for one in seen):",
        "    time.sleep(0.01)",
        "bar.update(3 - rank)",
        "bar.close()",
        when={f"{one}/4": (tmp_path / str(one)).touch for one in (1, 2)},
    )
    tables = [
        content["data"]["text/html"]
        for _, kind, content in cell.messages
        if kind in ("display_data", "update_display_data")
        and "<progress" in content["data"].get("text/html", "")
    ]
    assert any('value="25"' in one and 'value="50"' in one for one in tables)
    # No bar is left above the lines that the ranks end with, each with its time.
    assert cell.data == []
    assert "load: 100%" in cell.stream()


def test_cells_of_the_mode_have_a_mark(kernel: Kernel) -> None:
    kernel("%dist_mode on -r 0-1")
    try:
        cell = kernel("print('hi')", "rank")
        silent = kernel.client.execute("here = 1", silent=True)
        kernel._take_reply(silent)
        assert kernel("%who_ls int").result["text/plain"] == "['here']"
    finally:
        kernel("%dist_mode off")
    (mark,) = cell.data
    assert mark["text/plain"] == "on ranks 0–1 · %dist_mode off ends this"
    assert "%dist_mode off ends this</div>" in mark["text/html"]
    assert cell.stream() == "[0-1] hi\n[0]   0\n[1]   1\n"


def test_a_widget_of_a_rank_gets_a_sentence(kernel: Kernel) -> None:
    cell = kernel("%%distributed", "from ipywidgets import IntSlider", "IntSlider()")
    assert cell.stream().startswith("[0-3] IntSlider(value=0): a widget lives on its")


def test_figures_that_differ_are_tabs_in_rank_order(kernel: Kernel) -> None:
    cell = kernel(
        "%%distributed -r 0-2",
        "import matplotlib.pyplot as plt",
        "figure, axes = plt.subplots(figsize=(1, 1))",
        "axes.plot([0, min(rank, 1)])",
        "plt.show()",
    )
    (data,) = cell.data
    figure = "<Figure size 100x100 with 1 Axes>"
    assert data["text/plain"] == f"rank 0:\n{figure}\nranks 1–2:\n{figure}"
    assert data["text/html"].count('src="data:image/png;base64,iVBOR') == 2


def test_html_is_shown_as_html(kernel: Kernel) -> None:
    cell = kernel(
        "%%distributed", "from IPython.display import HTML", "HTML('<b>bold</b>')"
    )
    header, body = cell.data
    assert header["text/plain"] == "ranks 0–3"
    assert body["text/html"] == "<b>bold</b>"


def test_an_error_is_seen_while_other_ranks_still_wait(kernel: Kernel) -> None:
    cell = kernel(
        "%%distributed",
        "if rank == 2:",
        "    raise ValueError('boom')",
        "dist.barrier()",
    )
    (shown,) = cell.data
    assert shown["text/plain"].startswith("rank 2: ValueError: boom at cell ")
    assert "Traceback (most recent call last)" in shown["text/html"]
    kinds = [kind for _, kind, _ in cell.messages]
    assert kinds.index("display_data") < kinds.index("stream")
    assert "will not join" in cell.stream("stderr")
    assert cell.error.startswith("CellError: rank 2: ValueError: boom at cell ")
    assert len(cell.error_lines) <= 3
    assert "group 'default' rebuilt" in cell.error
    assert kernel("%%distributed", "dist.barrier()").error == ""


@pytest.mark.parametrize(
    "lines",
    [
        ["import time", "time.sleep(60)"],
        ["while True: pass"],
        ["import time", "if rank == 0: time.sleep(60)", "dist.barrier()"],
    ],
)
def test_an_interrupt_ends_the_cell_and_the_next_one_works(
    kernel: Kernel, lines: list[str]
) -> None:
    cell = kernel(
        "%%distributed", "print('begun', flush=True)", *lines, interrupt_at="begun"
    )
    # Far less than the minute that the cells take otherwise.
    assert cell.took < 20
    assert cell.error.startswith("Interrupted: after ")
    # Where each rank was; the last ones may not have come far.
    assert f"at cell {kernel.cells} line " in cell.error
    assert len(cell.error_lines) <= 6
    assert "Traceback" not in cell.stream("stderr")
    after = kernel("%%distributed", "x = np.ones(1)", "dist.all_reduce(x)", "x[0]")
    assert "4.0" in after.stream()


def test_an_interrupted_benchmark_shows_what_it_has(kernel: Kernel) -> None:
    # The second size would take a minute.
    line = "r = %dist_bench all_reduce --backend tcp --sizes 1K,64M --iters 500"
    cell = kernel(line, interrupt_at="1 of 2")
    assert cell.error.startswith("Interrupted: after ")
    assert "1024" in cell.data[-1]["text/plain"]
    assert "<svg" in cell.data[-1]["text/html"]
    cell = kernel("r = %dist_bench reduce --sizes 4K --iters 2", "r")
    assert cell.error == ""
    assert "4096" in cell.result["text/plain"]


def test_the_status_is_html_in_a_notebook(kernel: Kernel) -> None:
    (table,) = kernel("%dist_status").data
    assert table["text/html"].startswith('<div class="rankscope-status">')


def test_a_background_cell_is_updated_where_it_was_shown(kernel: Kernel) -> None:
    shown = kernel("%%distributed --async", "print('hi')", "rank")
    (handle,) = shown.data
    (place,) = [
        content["transient"]["display_id"]
        for _, kind, content in shown.messages
        if kind == "display_data"
    ]
    assert "on ranks 0–3" in handle["text/html"]
    cell = kernel("background = _", "background.result()")
    assert cell.stream() == "[0-3] hi\n[0]   0\n[1]   1\n[2]   2\n[3]   3\n"
    updates = [
        content["data"]["text/plain"]
        for _, kind, content in shown.messages + cell.messages
        if kind == "update_display_data" and content["transient"]["display_id"] == place
    ]
    assert cell.error == ""
    assert all(update.startswith("cell ") for update in updates)


def test_what_outlives_a_cell_prints_below_it(kernel: Kernel, tmp_path: Path) -> None:
    """A thread, a thread of an executor and a forked child, while another cell runs."""
    gate, seen = tmp_path / "gate", tmp_path / "seen"
    first = kernel.begin(
        "%%distributed -r 0-1",
        "import os, pathlib, sys, threading, time",
        "from concurrent.futures import ThreadPoolExecutor",
        "from IPython.display import HTML, display",
        "def late(what):",
        f"    while not pathlib.Path({str(gate)!r}).exists():",
        "        time.sleep(0.01)",
        "    # One piece: a child sends each by itself.",
        "    sys.stdout.write(f'{what} of {rank}\\n')",
        "thread = threading.Thread(target=late, args=('thread',))",
        "thread.start()",
        "executor = ThreadPoolExecutor(1)",
        "call = executor.submit(late, 'call')",
        "call.add_done_callback(lambda done: display(HTML('<i>seen</i>')))",
        "if rank == 1 and os.fork() == 0:",
        "    late('child')",
        "    os._exit(0)",
    )
    assert kernel.end(first).stream() == ""
    second = kernel.begin(
        "%%distributed -r 0-1",
        "print('second', flush=True)",
        f"while not pathlib.Path({str(seen)!r}).exists():",
        "    time.sleep(0.01)",
        "print(executor.submit(lambda: print('own')).result())",
    )
    late, own = Cell(), Cell()
    wanted = {
        *(
            f"[{rank}]   {what} of {rank}"
            for rank in (0, 1)
            for what in ("thread", "call")
        ),
        "[1]   child of 1",
    }
    try:
        while wanted - set(late.stream().splitlines()) or len(late.data) < 4:
            message = kernel.client.get_iopub_msg(timeout=TIMEOUT)
            shown = (0.0, message["msg_type"], message["content"])
            if message["parent_header"]["msg_id"] == first:
                late.messages.append(shown)
            elif message["parent_header"]["msg_id"] == second:
                own.messages.append(shown)
            if "second" in own.stream():
                gate.touch()
    finally:
        seen.touch()
    own.messages += kernel.end(second).messages
    assert set(late.stream().splitlines()) == wanted
    assert sorted(one["text/plain"] for one in late.data)[2:] == ["rank 0", "rank 1"]
    assert own.stream() == "[0-1] second\n[0-1] own\n[0-1] None\n"


def test_completion_reaches_a_front_end(kernel: Kernel) -> None:
    code = "%%distributed -g defa\nrank"
    reply = kernel.client.complete(code, len("%%distributed -g defa"), reply=True)
    assert reply["content"]["matches"] == ["default"]
    assert reply["content"]["cursor_start"] == len("%%distributed -g ")


def test_run_all_stops_at_a_failed_cell_and_keeps_what_was_shown(
    tmp_path: Path,
) -> None:
    cells = [
        "%load_ext rankscope\n%dist_init -n 2",
        "%%distributed\nprint('before')\nassert rank != 1, 'rank one fails'",
        "raise SystemError('never reached')",
    ]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in cells]
    )
    nbformat.write(notebook, tmp_path / "failing.ipynb")
    seen: list[nbformat.NotebookNode] = []
    with pytest.raises(CellExecutionError) as caught:
        execute(tmp_path / "failing.ipynb", after=lambda run: seen.append(run.cell))
    assert caught.value.ename == "CellError"
    assert "rank 1: AssertionError: rank one fails at cell 2 line 3" in str(
        caught.value.evalue
    )
    assert len(seen) == 2
    outputs = seen[1].outputs
    kinds = [one.output_type for one in outputs]
    assert kinds == ["stream", "display_data", "error"]
    assert outputs[0].text == "[0-1] before\n"
    html = outputs[1].data["text/html"]
    assert html.count("Traceback (most recent call last)") == 1


def test_no_request_is_left_unread(kernel: Kernel) -> None:
    # Each is sent while the reply to the one before may still be under way:
    # ipykernel 7.0 to 7.3 on its own stops within some hundred of these.
    count = 1000 if ipykernel_private.is_affected() else 100
    deadline = time.monotonic() + TIMEOUT
    for _ in range(count):
        request = kernel.client.execute("1")
        idle = False
        while not idle:
            message = kernel.client.get_iopub_msg(timeout=deadline - time.monotonic())
            idle = (
                message["parent_header"].get("msg_id") == request
                and message["content"].get("execution_state") == "idle"
            )
    for _ in range(count):
        kernel.client.get_shell_msg(timeout=deadline - time.monotonic())


# -- while a person types --------------------------------------------------------


def _complete(kernel: Kernel, *lines: str) -> list[str]:
    text = "\n".join(lines)
    reply = kernel.client.complete(text, reply=True, timeout=TIMEOUT)["content"]
    # What the front end puts in the place of the incomplete word.
    return [text[: reply["cursor_start"]][-1:] + one for one in reply["matches"]]


def _help(kernel: Kernel, *lines: str) -> str:
    reply = kernel.client.inspect("\n".join(lines), reply=True, timeout=TIMEOUT)
    return plain(reply["content"]["data"].get("text/plain", ""))


def test_cells_are_completed_with_what_the_ranks_have(kernel: Kernel) -> None:
    kernel(
        "%%distributed -r 2",
        "only_there = np.ones((2, 3))",
        "def there(a, b):",
        "    'What the rank says.'",
    )
    on_2 = "%%distributed -r 2"
    # Once the rank is known to be idle again.
    until(
        lambda: ".shape" in _complete(kernel, on_2, "only_there.sh"),
        TIMEOUT,
        "the completion of an attribute",
    )
    assert ".all_reduce" in _complete(kernel, on_2, "x = 1", "dist.all_")
    assert "\nrank" in _complete(kernel, on_2, "ran")
    assert _complete(kernel, on_2, "only_") == ["\nonly_there"]
    # No name of the notebook, which the ranks do not have.
    assert "\nonly_there" not in _complete(kernel, "%%distributed -r 0", "only_")
    kernel("only_here = 1")
    assert _complete(kernel, on_2, "only_") == ["\nonly_there"]
    assert "only_here" in _complete(kernel, "only_")
    # A rank of a loaded machine may be too late, and the next time it is not.
    until(
        lambda: _complete(kernel, "%dist_pull only_") == [" only_there"],
        TIMEOUT,
        "the completion of a variable",
    )
    until(
        lambda: "What the rank says." in _help(kernel, on_2, "there(1, "),
        TIMEOUT,
        "the help of a function",
    )
    assert "What the rank says." not in _help(kernel, "there")
    assert _complete(kernel, "%%rank 2", "only_") == ["\nonly_there"]
    kernel("%dist_mode on -r 2")
    try:
        assert _complete(kernel, "%matplotlib inline", "only_") == ["\nonly_there"]
        # A cell that is the notebook's.
        assert _complete(kernel, "%%time", "only_") == ["\nonly_here"]
    finally:
        kernel("%dist_mode off")
    shown = kernel(on_2, "there?").stream()
    assert "[2]   Docstring: What the rank says." in shown


def test_names_are_known_while_the_ranks_are_busy(
    kernel: Kernel, tmp_path: Path
) -> None:
    kernel("%%distributed", "everywhere = 1")
    kernel(
        "%%distributed --async",
        "import pathlib, time",
        f"while not pathlib.Path({str(tmp_path)!r}, 'go').exists():",
        "    time.sleep(0.01)",
    )
    try:
        assert _complete(kernel, "%%distributed", "every") == ["\neverywhere"]
        assert ".all_reduce" in _complete(kernel, "%%distributed", "dist.all_")
        # What would need the main thread of the rank stays as it is.
        assert _complete(kernel, "%%distributed", "everywhere.re") == [".re"]
        assert _complete(kernel, "%dist_pull every") == [" everywhere"]
        assert _help(kernel, "%%distributed", "everywhere") == ""
    finally:
        (tmp_path / "go").touch()
    assert kernel("%%distributed", "assert everywhere").error == ""


def test_ranks_that_are_replaced_leave_their_last_state() -> None:
    with running_kernel() as kernel:
        first = kernel("%dist_init -n 2")
        kernel(
            "%%distributed", "for _ in range(200):", "    dist.all_reduce(np.ones(2))"
        )
        replaced = kernel("%dist_init -n 2 --replace")
        kernel("%dist_shutdown")
    shown = [
        (kind, content["data"]["text/plain"], content["transient"]["display_id"])
        for _, kind, content in replaced.messages
        if kind in ("display_data", "update_display_data")
    ]
    (board,) = [text for _, text, _ in shown if "Ended: " in text]
    assert len(re.findall(r"idle +all_reduce +#200", board)) == 2, board
    # An update changes every output of its name: each line keeps its own.
    names = [name for kind, _, name in shown if kind == "display_data"]
    assert len(names) == len(set(names)) == 3
    last = {name: text for _, text, name in shown}
    assert last[names[0]] == "2 ranks ended"
    assert last[names[1]].startswith("2 ranks ready in ")
    assert (first.stream(), replaced.stream()) == ("", "")
