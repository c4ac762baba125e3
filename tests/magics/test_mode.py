"""%dist_mode: which lines of which cells go to the ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from rankscope.magics.mode import MODE_CELL, CellMode


class Shell:
    """What the mode needs of a shell, and the message that the kernel handles."""

    def __init__(self) -> None:
        self.input_transformers_cleanup: list[Any] = []
        self.called: dict[str, Any] = {}
        self.events = SimpleNamespace(
            register=self.called.__setitem__,
            unregister=lambda name, function: self.called.pop(name),
        )
        self.content: dict[str, Any] = {}
        parent = {"content": self.content}
        self.kernel = SimpleNamespace(get_parent=lambda channel: parent)

    def cell(self, *lines: str) -> str:
        text = [f"{line}\n" for line in lines]
        for transform in self.input_transformers_cleanup:
            text = transform(text)
        return "".join(text)


@pytest.fixture
def shell() -> Shell:
    return Shell()


@pytest.fixture
def mode(shell: Shell) -> CellMode:
    made: Any = shell
    mode = CellMode(made)
    mode.install()
    mode.options = "-r 0"
    return mode


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(
    ("lines", "local"),
    [
        (["x = 1", "x"], 0),
        (["%matplotlib inline", "", "x = 1"], 1),
        (["!ls", "# all ranks", "x = 1"], 1),
        (["# all ranks", "x = 1", "%time x"], 0),
        (["x = y % 2", "'%' + '?'"], 0),
    ],
)
def test_python_goes_to_the_ranks(shell: Shell, lines: list[str], local: int) -> None:
    body = "".join(f"{line}\n" for line in lines[local:])
    here = "".join(f"{line}\n" for line in lines[:local])
    call = f"get_ipython().run_cell_magic({MODE_CELL!r}, '-r 0', {body!r})\n"
    assert shell.cell(*lines) == here + call


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(
    "lines",
    [
        ["%dist_status"],
        ["%%time", "x"],
        ["# why", "%%time", "x"],
        ["%cd /", "!ls"],
        ["dist.all_reduce?"],
        ["", "# nothing"],
        [""],
    ],
)
def test_magics_stay_in_the_notebook(shell: Shell, lines: list[str]) -> None:
    assert shell.cell(*lines) == "".join(f"{line}\n" for line in lines)


def test_only_what_is_typed_goes_to_the_ranks(shell: Shell, mode: CellMode) -> None:
    shell.content["silent"] = True
    assert shell.cell("x") == "x\n"
    shell.content.clear()
    shell.content["store_history"] = False
    assert shell.cell("x") == "x\n"
    shell.content.clear()
    # %time transforms its code while its own cell runs.
    shell.called["pre_execute"]()
    assert shell.cell("x") == "x\n"
    shell.called["post_execute"]()
    assert shell.cell("x") != "x\n"
    mode.options = None
    assert shell.cell("x") == "x\n"


def test_the_mode_is_removed(shell: Shell, mode: CellMode) -> None:
    mode.remove()
    mode.remove()
    assert shell.input_transformers_cleanup == []
    assert shell.called == {}


def test_the_mode_needs_ranks(ipython: InteractiveShell) -> None:
    result = ipython.run_cell("%dist_mode on")
    assert "no cluster" in str(result.error_in_exec)
    assert ipython.run_cell("6 * 7").result == 42
    result = ipython.run_cell("%dist_mode maybe")
    assert "'maybe': expected on or off" in str(result.error_in_exec)
