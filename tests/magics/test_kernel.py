"""The magics in a real notebook kernel: what reaches a front end, and when."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel
from jupyter_core.utils import ensure_event_loop
from nbclient.exceptions import CellExecutionError

from rankscope.magics.output.failures import plain
from tools.execution import execute

TIMEOUT = 90


@dataclass
class Cell:
    """What a front end got for one cell: (seconds since it was sent, message)."""

    messages: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)
    took: float = 0.0

    @property
    def result(self) -> dict[str, Any]:
        """The mime bundle of the last expression."""
        (found,) = [c for _, kind, c in self.messages if kind == "execute_result"]
        return found["data"]

    def stream(self, name: str = "stdout") -> str:
        """What stands there in the end; `clear_output` takes away what was."""
        text = ""
        for _, kind, content in self.messages:
            if kind == "clear_output":
                text = ""
            elif kind == "stream" and content["name"] == name:
                text += content["text"]
        return plain(text)

    def seen_at(self, text: str) -> float:
        """When `text` was seen first."""
        for when, kind, content in self.messages:
            if kind == "stream" and text in content["text"]:
                return when
        raise AssertionError(f"{text!r} was never shown: {self.messages}")

    @property
    def data(self) -> list[dict[str, Any]]:
        """The mime bundles that stand there in the end."""
        shown: dict[object, dict[str, Any]] = {}
        for _, kind, content in self.messages:
            if kind == "clear_output":
                shown.clear()
            elif kind in ("display_data", "update_display_data"):
                key = content["transient"].get("display_id", len(shown))
                shown[key] = content["data"]
        return list(shown.values())

    @property
    def error(self) -> str:
        """The traceback that the cell ended with."""
        found = [content for _, kind, content in self.messages if kind == "error"]
        return "\n".join(plain(text) for c in found for text in c["traceback"])


class Kernel:
    """A kernel and its client; call it with the lines of a cell."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client
        self.cells = 0

    def __call__(
        self,
        *lines: str,
        interrupt_at: str | None = None,
        when: Mapping[str, Callable[[], object]] | None = None,
    ) -> Cell:
        """Run a cell; with `interrupt_at`, interrupt once that text was shown.

        Each function of `when` is called once its text was shown.
        """
        waiting = dict(when or {})
        sent = time.monotonic()
        request = self.client.execute("\n".join(lines))
        self.cells += 1
        cell = Cell()
        while True:
            left = sent + TIMEOUT - time.monotonic()
            try:
                message = self.client.get_iopub_msg(timeout=left)
            except queue.Empty:
                raise AssertionError(f"no end of {lines}: {cell.messages}") from None
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            now = time.monotonic() - sent
            if kind == "status" and content["execution_state"] == "idle":
                cell.took = now
                self._take_reply(request)
                return cell
            cell.messages.append((now, kind, content))
            text = content.get("text") or content.get("data", {}).get("text/plain", "")
            for key in [key for key in waiting if key in text]:
                waiting.pop(key)()
            if interrupt_at is not None and interrupt_at in text:
                interrupt_at = None
                self.manager.interrupt_kernel()
                sent = time.monotonic()

    def _take_reply(self, request: str) -> None:
        """Read the reply, too: a kernel whose replies pile up stops to answer."""
        reply = self.client.get_shell_msg(timeout=TIMEOUT)
        while reply["parent_header"].get("msg_id") != request:
            reply = self.client.get_shell_msg(timeout=TIMEOUT)


@pytest.fixture(scope="module")
def kernel(_module_leaves_nothing: None) -> Iterator[Kernel]:
    """A kernel with four ranks."""
    manager, client = start_new_kernel(startup_timeout=TIMEOUT)
    try:
        kernel = Kernel(manager, client)
        kernel("%load_ext rankscope")
        started = kernel("%dist_init -n 4")
        # One line of progress, which becomes the summary, and the board.
        line, board = started.data
        assert "rankscope-board" in board["text/html"]
        assert line["text/plain"].startswith("4 ranks ready in ")
        assert line["text/plain"].endswith("· group 'default'")
        yield kernel
        kernel("%dist_shutdown")
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
        manager.cleanup_resources()
        # jupyter_client's blocking calls leave their event loop open.
        ensure_event_loop().close()


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
    ]
    # Empty where the last step of all ranks is done, and a rank's cell is not yet.
    steps = [move for move in moves if move]
    assert len(steps) > 1
    assert all("/8" in step for step in steps)
    assert cell.data == []
    assert cell.stream("stderr") == "[0-3] 8/8\n"


def test_figures_come_in_rank_order_under_the_name_of_their_rank(
    kernel: Kernel,
) -> None:
    cell = kernel(
        "%%distributed -r 0-2",
        "import matplotlib.pyplot as plt",
        "figure, axes = plt.subplots(figsize=(1, 1))",
        "axes.plot([0, min(rank, 1)])",
        "plt.show()",
    )
    shown = [data.get("image/png") or data["text/plain"] for data in cell.data]
    assert shown[::2] == ["rank 0", "ranks 1–2"]
    assert all(image.startswith("iVBOR") for image in shown[1::2])


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
    assert cell.seen_at("boom") <= cell.seen_at("will not join")
    said = cell.stream("stderr")
    assert said.index("boom") < said.index("will not join")
    assert cell.error.startswith("CellError: rank 2: ValueError: boom at cell ")
    assert cell.error.count("\n") == 0
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
    assert cell.error.count("\n") == 0
    assert "Traceback" not in cell.stream("stderr")
    after = kernel("%%distributed", "x = np.ones(1)", "dist.all_reduce(x)", "x[0]")
    assert "4.0" in after.stream()


def test_an_interrupted_benchmark_shows_what_it_has(kernel: Kernel) -> None:
    # The second size would take a minute.
    line = "r = %dist_bench all_reduce --backend gloo --sizes 1K,64M --iters 500"
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
    assert "on ranks 0–3" in handle["text/html"]
    cell = kernel("background = _", "background.result()")
    assert cell.stream() == "[0-3] hi\n[0]   0\n[1]   1\n[2]   2\n[3]   3\n"
    updates = [
        content["data"]["text/plain"]
        for _, kind, content in shown.messages + cell.messages
        if kind == "update_display_data"
    ]
    assert cell.error == ""
    assert all(update.startswith("cell ") for update in updates)


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
    assert [one.output_type for one in outputs] == ["stream", "stream", "error"]
    assert outputs[0].text == "[0-1] before\n"
    assert plain(outputs[1].text).count("Traceback (most recent call last)") == 1


def test_no_request_is_left_unread(kernel: Kernel) -> None:
    # Each is sent while the reply to the one before may still be under way:
    # ipykernel 7.0 to 7.3 on its own stops within some hundred of these.
    deadline = time.monotonic() + TIMEOUT
    for _ in range(1000):
        request = kernel.client.execute("1")
        idle = False
        while not idle:
            message = kernel.client.get_iopub_msg(timeout=deadline - time.monotonic())
            idle = (
                message["parent_header"].get("msg_id") == request
                and message["content"].get("execution_state") == "idle"
            )
    for _ in range(1000):
        kernel.client.get_shell_msg(timeout=deadline - time.monotonic())
