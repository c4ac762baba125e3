"""The stream: outputs of ranks become what a person sees, in time and in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from rankscope.backends.rank_sets import format_ranks
from rankscope.engines import Execution, RankError
from rankscope.engines.wire.print_marks import mark
from rankscope.magics.output.deduplicate import Entry
from rankscope.magics.output.parse import Bundle
from rankscope.magics.output.stream import OutputStream, Shown


@dataclass
class Board:
    """A surface that remembers what stands on it, as ``"0-3 text"``."""

    can_redraw: bool = True
    lines: list[str] = field(default_factory=list)
    redraws: int = 0
    is_provisional: bool = False
    unfinished: dict[int, str] = field(default_factory=dict)

    def show(self, items: Shown) -> None:
        for item in items:
            content = item.content
            if isinstance(content, Bundle):
                content = content.text
            if isinstance(content, RankError):
                content = content.ename
            self.lines.append(f"{format_ranks(item.ranks)} {content}")

    def redraw(self, items: Shown) -> None:
        self.lines.clear()
        self.redraws += 1
        self.is_provisional = False
        self.show(items)

    def update(self, bundle: Bundle) -> None:
        self.lines.append(f"update {bundle.text}")

    def partials(self, lines: dict[int, str]) -> None:
        self.is_provisional = True
        self.unfinished = lines

    def late(self, rank: int, cell: int | None, entries: Sequence[Entry]) -> None:
        raise AssertionError(f"{entries} of rank {rank} came after the end")


class Cell:
    """A cell whose ranks say what a test has them say, at times it sets."""

    def __init__(
        self, ranks: int = 3, board: Board | None = None, **options: Any
    ) -> None:
        self.execution = Execution("", range(ranks), 7, None)
        self.board = board or Board()
        self.now = 0.0
        self.stream = OutputStream(
            self.execution, self.board, clock=lambda: self.now, **options
        )

    def message(self, rank: int, kind: str, **content: Any) -> None:
        message = {"header": {"msg_type": kind}, "content": content}
        self.execution.receive(rank, message)
        self.stream.pump(0.0)

    def print(self, rank: int, text: str, name: str = "stdout") -> None:
        self.message(rank, "stream", name=name, text=text)

    def show(self, rank: int, display_id: str | None = None, **data: Any) -> None:
        bundle = {name.replace("_", "/"): value for name, value in data.items()}
        transient = {} if display_id is None else {"display_id": display_id}
        self.message(
            rank, "display_data", data=bundle, metadata={}, transient=transient
        )

    def fail(self, rank: int, ename: str, evalue: str = "", line: int = 3) -> None:
        trace = [f"Cell In[7], line {line}", f"{ename}: {evalue}"]
        self.message(rank, "error", ename=ename, evalue=evalue, traceback=trace)

    def after(self, seconds: float) -> list[str]:
        self.now += seconds
        self.stream.pump(0.0)
        return self.board.lines

    def end(self) -> list[str]:
        for rank in self.execution.ranks_running:
            self.execution.finish(rank)
        self.stream.pump(0.0)
        assert self.stream.done
        self.stream.close()
        return self.board.lines


def test_output_is_shown_while_the_cell_runs() -> None:
    cell = Cell()
    cell.print(1, "working\n")
    assert cell.after(0.0) == []
    assert cell.after(0.2) == ["1 working"]
    assert not cell.execution.done


def test_what_all_ranks_print_is_shown_once_and_at_once() -> None:
    cell = Cell()
    for rank in range(3):
        cell.print(rank, "epoch 1\n")
    assert cell.after(0.0) == ["0-2 epoch 1"]


def test_a_short_cell_is_shown_in_its_final_form_without_a_redraw() -> None:
    cell = Cell()
    for rank in (2, 0, 1):
        cell.print(rank, f"rank {rank}\n")
        cell.show(rank, text_plain=f"result {rank}")
    assert cell.end() == [
        *(f"{rank} rank {rank}" for rank in range(3)),
        *(f"{rank} result {rank}" for rank in range(3)),
    ]
    assert cell.board.redraws == 0


def test_a_late_rank_is_merged_in_at_the_end() -> None:
    cell = Cell()
    cell.print(0, "x\n")
    cell.print(1, "x\n")
    assert cell.after(0.2) == ["0-1 x"]
    cell.print(2, "x\n")
    assert cell.after(0.2) == ["0-1 x", "2 x"]
    assert cell.end() == ["0-2 x"]
    assert cell.board.redraws == 1


def test_where_nothing_can_be_taken_back_the_late_rank_stays_apart() -> None:
    cell = Cell(board=Board(can_redraw=False))
    cell.print(0, "x\n")
    cell.after(0.2)
    cell.print(1, "x\n")
    assert cell.end() == ["0 x", "1 x"]


def test_a_partial_line_comes_with_the_end_of_the_rank() -> None:
    cell = Cell()
    for rank in range(3):
        cell.print(rank, "no newline")
    assert cell.after(0.2) == []
    assert cell.end() == ["0-2 no newline"]


def test_a_progress_bar_is_shown_while_it_moves_and_once_in_the_end() -> None:
    cell = Cell()
    for step in range(3):
        for rank in range(3):
            cell.print(rank, f"\r{step + 1}/3", name="stderr")
        cell.after(0.5)
    assert cell.board.unfinished == dict.fromkeys(range(3), "3/3")
    for rank in range(3):
        cell.print(rank, "\n", name="stderr")
    assert cell.end() == ["0-2 3/3"]


def test_stdout_and_stderr_are_not_taken_for_each_other() -> None:
    cell = Cell(ranks=2)
    cell.print(0, "x\n")
    cell.print(1, "x\n", name="stderr")
    assert cell.end() == ["0 x", "1 x"]


def test_equal_displays_are_shown_once() -> None:
    cell = Cell()
    for rank in range(3):
        cell.show(rank, text_html="<b>same</b>", text_plain="same")
    assert cell.end() == ["0-2 same"]


WIDGET = "application/vnd.jupyter.widget-view+json"


def test_a_widget_of_a_rank_is_a_sentence() -> None:
    cell = Cell(ranks=2)
    for rank in range(2):
        data = {"text/plain": "IntSlider(value=0)", WIDGET: {"model_id": f"{rank}"}}
        cell.message(rank, "display_data", data=data, metadata={})
    (line,) = cell.end()
    assert line.startswith("0-1 IntSlider(value=0): a widget lives on its rank")


def test_a_widget_that_is_html_as_well_is_shown_so() -> None:
    cell = Cell(ranks=1)
    data = {"text/plain": "Figure", "text/html": "<svg>", WIDGET: {}}
    cell.message(0, "display_data", data=data, metadata={})
    assert cell.end() == ["0 Figure"]


def test_what_one_call_prints_is_folded_as_a_whole() -> None:
    """Lines of different matrices are equal: a common one would tear them apart."""
    cell = Cell()
    for rank in range(3):
        cell.print(rank, mark(f"[[{min(rank, 1)} 2]\n ...\n [3 4]]\n") + "done\n")
    assert cell.end() == [
        "0 [[0 2]\n ...\n [3 4]]",
        "1-2 [[1 2]\n ...\n [3 4]]",
        "0-2 done",
    ]


def test_a_call_is_one_whole_wherever_its_messages_end() -> None:
    cell = Cell(ranks=1)
    text = mark("a\nb\nc\n") + mark("d\ne")
    for at in range(0, len(text), 3):
        cell.print(0, text[at : at + 3])
    assert cell.end() == ["0 a\nb\nc", "0 d\ne"]


def test_marks_are_for_the_notebook_alone() -> None:
    cell = Cell(ranks=1)
    cell.print(0, mark("a\nb\n"))
    (output,) = cell.execution.outputs(0)
    assert output == {"output_type": "stream", "name": "stdout", "text": "a\nb\n"}


def test_a_warning_of_all_ranks_is_shown_once() -> None:
    cell = Cell()
    for rank in range(3):
        where = f"/tmp/ipykernel_{700 + rank}/99.py:3"
        cell.print(rank, mark(f"{where}: UserWarning: old\n  f(x)\n"), "stderr")
    assert cell.end() == ["0-2 /tmp/ipykernel_700/99.py:3: UserWarning: old\n  f(x)"]


def test_a_display_that_a_rank_updates_changes_in_place() -> None:
    cell = Cell()
    for rank in range(2):
        cell.show(rank, display_id="d", text_html="old", text_plain="old")
    assert cell.after(0.2) == ["0 old", "1 old"]
    cell.message(
        1,
        "update_display_data",
        data={"text/plain": "new"},
        metadata={},
        transient={"display_id": "d"},
    )
    assert cell.after(0.0) == ["0 old", "1 old", "update new"]


def test_a_rank_can_clear_its_output_and_no_one_elses() -> None:
    cell = Cell(ranks=2)
    for rank in range(2):
        cell.print(rank, "frame 1\n")
    cell.after(0.0)
    cell.message(1, "clear_output", wait=True)
    assert cell.after(0.1) == ["0-1 frame 1"]
    cell.print(1, "frame 2\n")
    assert cell.after(0.2) == ["0 frame 1", "1 frame 2"]


def test_an_error_is_shown_while_other_ranks_run_on() -> None:
    cell = Cell()
    cell.fail(2, "ValueError", "boom")
    cell.execution.finish(2)
    assert cell.after(0.1) == []
    assert cell.after(0.4) == ["2 ValueError"]
    assert cell.stream.failures[2].line == 3


def test_an_error_that_ranks_share_is_shown_once_with_every_message() -> None:
    cell = Cell()
    for rank in range(3):
        cell.fail(rank, "ValueError", f"bad value {rank}")
    assert cell.end() == ["0-2 ValueError"]


def test_errors_on_other_lines_are_not_shared() -> None:
    cell = Cell(ranks=2)
    cell.fail(0, "ValueError", "bad", line=3)
    cell.fail(1, "ValueError", "bad", line=5)
    assert cell.end() == ["0 ValueError", "1 ValueError"]


def test_ranks_that_were_let_go_are_told_in_brief_beside_the_cause() -> None:
    cell = Cell()
    cell.fail(2, "ValueError", "boom")
    cell.after(0.2)
    for rank in range(2):
        cell.fail(rank, "DistAbortedError", "rank 2 raised ValueError")
    assert cell.end() == ["2 ValueError", "0-1 DistAbortedError"]


def test_ranks_of_which_it_was_told_are_not_told_of_again() -> None:
    cell = Cell()
    cell.fail(2, "ValueError", "boom")
    cell.stream.aborts_announced = True
    cell.fail(0, "DistAbortedError", "rank 2 raised ValueError")
    assert cell.end() == ["2 ValueError"]


def test_an_error_of_ours_is_a_line_as_the_error_of_the_cell_tells_it() -> None:
    cell = Cell()
    for rank in range(3):
        cell.fail(rank, "DistAbortedError", "requested from the board")
    assert cell.end() == ["0-2 DistAbortedError"]


@pytest.mark.parametrize("ename", ["KeyboardInterrupt", "DistAbortedError"])
def test_ranks_that_are_being_stopped_do_not_say_so_again(ename: str) -> None:
    cell = Cell()
    cell.print(0, "before\n")
    cell.after(0.2)
    cell.stream.stopping = True
    for rank in range(3):
        cell.fail(rank, ename)
    cell.print(1, "\nKeyboardInterrupt\n", name="stderr")
    assert cell.end() == ["0 before"]
    assert cell.board.redraws == 0


def test_a_dead_engine_is_an_error_that_nobody_published() -> None:
    cell = Cell()
    cell.execution.finish(1, RankError(1, "EngineDied", "killed by SIGKILL"))
    cell.after(0.0)
    assert cell.after(0.5) == ["1 EngineDied"]


def test_without_collapse_every_rank_stands_by_itself() -> None:
    cell = Cell(collapse=False)
    for rank in range(3):
        cell.print(rank, "same\n")
    assert cell.end() == ["0 same", "1 same", "2 same"]


def test_an_execution_that_is_over_is_replayed() -> None:
    cell = Cell(ranks=2)
    for rank in range(2):
        cell.print(rank, "said\n")
    cell.end()
    board = Board()
    again = OutputStream(cell.execution, board)
    again.pump(0.0)
    assert again.done
    again.close()
    assert board.lines == ["0-1 said"]


def test_a_rank_that_prints_faster_than_it_is_read_is_shown_nevertheless() -> None:
    execution, board = Execution("", range(1), 7, None), Board()
    seconds = count(step=0.06)
    stream = OutputStream(execution, board, clock=lambda: float(next(seconds)))

    def say(text: str) -> None:
        content = {"name": "stdout", "text": text}
        message = {"header": {"msg_type": "stream"}, "content": content}
        execution.receive(0, message)

    for number in range(10):
        say(f"{number}\n")
    stream.pump(0.0)
    assert 0 < len(board.lines) < 10
    execution.finish(0, None)
    while not stream.done:
        stream.pump(0.0)
    stream.close()
    assert board.lines == [f"0 {number}" for number in range(10)]


def test_what_ranks_print_without_end_is_left_out_while_they_are_stopped() -> None:
    cell = Cell(ranks=1)
    cell.stream.stopping = True
    for _ in range(3):
        cell.print(0, 500 * f"{'x' * 99}\n")
    assert cell.stream.left_out == 500
    cell.message(0, "error", ename="KeyboardInterrupt", evalue="", traceback=[])
    assert 0 in cell.stream.failures
