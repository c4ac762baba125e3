"""The renderer in a notebook and in a terminal, on a shell that only notes."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
from IPython.core.interactiveshell import InteractiveShell

from rankscope.engines import RankError
from rankscope.engines.errors import plain
from rankscope.magics.output.deduplicate import Entry, Item
from rankscope.magics.output.parse import Bundle
from rankscope.magics.output.render import Renderer, label_lines, label_width


class Publisher:
    """Notes what is published, as a front end would get it."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def publish(
        self,
        data: dict[str, str],
        metadata: Any = None,
        *,
        transient: dict[str, str] | None = None,
        update: bool = False,
    ) -> None:
        self.events.append(("update" if update else "display", data, transient))

    def clear_output(self, wait: bool = False) -> None:
        self.events.append(("clear", wait))


def renderer_on(kernel: bool, ranks: int = 4) -> tuple[Renderer, Publisher]:
    publisher = Publisher()
    shell = SimpleNamespace(display_pub=publisher)
    if kernel:
        header = {"header": {"msg_id": "cell"}}
        shell.kernel = SimpleNamespace(get_parent=lambda channel: header)
    return Renderer(cast(InteractiveShell, shell), range(ranks)), publisher


def line(text: str, *ranks: int, kind: str = "stdout") -> Item:
    return Item(kind, ranks, (text,) * len(ranks))


def test_labels_are_as_wide_as_that_of_all_ranks() -> None:
    width = label_width(range(4))
    assert label_lines("x", range(4), width) == "[0-3] x\n"
    assert label_lines("x", [2], width) == "[2]   x\n"
    assert label_lines("x", [0, 2, 3], width) == "[0,2-3] x\n"
    assert label_lines("a\n b\n", [1], width) == "[1]   a\n[1]    b\n[1]\n"


def test_why_a_cell_hangs_is_shown_in_one_place_and_goes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    why = {"text/plain": "Deadlock: why", "text/html": "<p>Deadlock: why</p>"}
    renderer, publisher = renderer_on(kernel=True)
    for bundle in (None, why, why, {"text/plain": "other"}, None):
        renderer.hang(bundle)
    kinds = [(kind, data["text/plain"]) for kind, data, _ in publisher.events]
    assert kinds == [
        ("display", "Deadlock: why"),
        ("update", "other"),
        ("update", ""),
    ]
    assert len({str(transient) for *_, transient in publisher.events}) == 1
    # The end of the cell draws its output anew, without it.
    assert renderer.is_provisional
    renderer.redraw([])
    assert not renderer.is_provisional
    renderer, _ = renderer_on(kernel=False)
    for bundle in (why, why, None):
        renderer.hang(bundle)
    assert capsys.readouterr().err == "Deadlock: why\n"


def test_errors_are_a_line_that_opens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = RankError(0, "DistAbortedError", "<b>why</b>", ("trace",), cell=7, line=3)
    items = [Item("error", (n,), (error.replaced(rank=n),)) for n in (0, 2)]
    renderer, publisher = renderer_on(kernel=True)
    renderer.show(items)
    ((_, data, _),) = publisher.events
    lines = [
        "rank 0: op aborted at cell 7 line 3",
        "rank 2: op aborted at cell 7 line 3",
    ]
    alike = "ranks 0, 2: op aborted at cell 7 line 3"
    assert data["text/plain"] == alike
    assert f"{alike}</summary>" in data["text/html"]
    assert "trace" in data["text/html"]
    assert not renderer.is_provisional
    # Those that come later join it at the end.
    renderer.show(items[:1])
    assert renderer.is_provisional
    renderer, _ = renderer_on(kernel=False)
    renderer.show(items)
    assert capsys.readouterr().err.splitlines() == lines


def test_a_single_rank_needs_no_label(capsys: pytest.CaptureFixture[str]) -> None:
    renderer, _ = renderer_on(kernel=False, ranks=1)
    renderer.show([line("x", 0)])
    assert capsys.readouterr().out == "x\n"


def test_each_stream_gets_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    renderer, _ = renderer_on(kernel=False)
    renderer.show([line("a", 0, 1), line("b", 2), line("!", 2, kind="stderr")])
    assert capsys.readouterr() == ("[0-1] a\n[2]   b\n", "[2]   !\n")


def test_a_display_has_the_name_of_its_ranks_above_it() -> None:
    renderer, publisher = renderer_on(kernel=True)
    bundle = Bundle({"text/html": "<b>x</b>", "text/plain": "x"})
    renderer.show([Item("display", (0, 1), (bundle, bundle))])
    (_, header, _), (_, body, _) = publisher.events
    assert header["text/plain"] == "ranks 0–1"
    assert "ranks 0–1</div>" in header["text/html"]
    assert body == bundle.data


def test_a_terminal_gets_the_text_of_a_display(
    capsys: pytest.CaptureFixture[str],
) -> None:
    renderer, publisher = renderer_on(kernel=False)
    bundle = Bundle({"text/html": "<b>x</b>", "text/plain": "x"})
    renderer.show([Item("display", (3,), (bundle,))])
    assert capsys.readouterr().out == "[3]   x\n"
    assert publisher.events == []


def test_a_display_without_text_names_what_it_is() -> None:
    assert Bundle({"image/png": "…"}).text == "<image/png>"


def test_a_display_is_updated_in_place() -> None:
    renderer, publisher = renderer_on(kernel=True)
    bundle = Bundle({"text/html": "old"}, display_id="theirs")
    renderer.show([Item("display", (0,), (bundle,))])
    bundle.data = {"text/html": "new"}
    renderer.update(bundle)
    renderer.update(Bundle({"text/html": "never shown"}, display_id="other"))
    _, (_, _, shown), (kind, data, updated) = publisher.events
    assert (kind, data) == ("update", {"text/html": "new"})
    assert shown == updated
    assert shown["display_id"] != "theirs"


def test_a_redraw_takes_away_what_was_there_and_says_again_what_was_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    renderer, publisher = renderer_on(kernel=True)
    renderer.notify("aborted")
    capsys.readouterr()
    renderer.redraw([line("x", 0)])
    assert publisher.events == [("clear", True)]
    assert capsys.readouterr() == ("[0]   x\n", "aborted\n")


def test_a_redraw_of_nothing_does_not_wait_for_something() -> None:
    renderer, publisher = renderer_on(kernel=True)
    renderer.redraw([])
    assert publisher.events == [("clear", False)]


def test_unfinished_lines_are_one_display_that_changes() -> None:
    renderer, publisher = renderer_on(kernel=True)
    renderer.partials({0: "10%", 1: "10%", 2: "20%"})
    renderer.partials({0: "30%"})
    assert [(kind, data["text/plain"]) for kind, data, _ in publisher.events] == [
        ("display", "[0-1] 10%\n[2]   20%"),
        ("update", "[0]   30%"),
    ]
    assert renderer.is_provisional


def test_many_unfinished_lines_are_counted() -> None:
    renderer, publisher = renderer_on(kernel=True, ranks=20)
    renderer.partials({rank: f"{rank} %" for rank in range(20)})
    ((_, data, _),) = publisher.events
    assert data["text/plain"].splitlines()[-1] == "… and 4 more"


def test_progress_bars_are_a_table_with_a_row_for_each_rank() -> None:
    renderer, publisher = renderer_on(kernel=True)
    bars = {rank: f"load: {rank}0%|█▏   | {rank}/10 [00:01<00:09]" for rank in (0, 3)}
    renderer.partials({**bars, 1: "<waits>"})
    ((_, data, _),) = publisher.events
    assert data["text/plain"].startswith("[0]   load: 00%|█▏   | 0/10 [00:01<00:09]\n")
    html = data["text/html"]
    assert html.count("<progress") == 2
    assert 'value="30" max="100"' in html
    assert "3/10 [00:01&lt;00:09]" in html
    assert "&lt;waits&gt;" in html


def test_a_terminal_shows_one_unfinished_line_and_writes_over_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "24")
    renderer, _ = renderer_on(kernel=False)
    renderer.partials({0: "a" * 40, 1: "b"})
    written = plain(terminal.getvalue().replace("\x1b[2K", ""))
    assert written == "\r[0]   aaaaa … (2 lines)"
    renderer.show([line("done", 0)])
    assert terminal.getvalue().endswith("\r\x1b[2K[0]   done\n")
    assert not renderer.is_provisional


def test_a_terminal_has_late_output_with_its_cell(
    capsys: pytest.CaptureFixture[str],
) -> None:
    renderer, _ = renderer_on(kernel=False)
    renderer.late(2, 7, [Entry("stdout", "a", "one\ntwo"), Entry("stderr", "b", "err")])
    assert capsys.readouterr() == (
        "cell 7 [2]   one\ncell 7 [2]   two\n",
        "cell 7 [2]   err\n",
    )
