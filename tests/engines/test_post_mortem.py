"""The part of a traceback that a person looks at, and lines that come too late."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Mapping
from typing import Any

import pytest

from rankscope.backends import errors
from rankscope.engines.agent.post_mortem import Prompts, end_traceback

CELL = """
def enter(call):
    call()
enter(call)
"""


def _frames(call: Any) -> list[str]:
    """Return the names of the frames that are shown where `call` raises in a cell."""
    code = compile(CELL, "the cell", "exec")
    with pytest.raises(ZeroDivisionError) as caught:
        exec(code, {"call": call})
    shown = end_traceback(caught.value.__traceback__, lambda name: name == "the cell")
    return [frame.f_code.co_name for frame, _ in traceback.walk_tb(shown)]


def test_it_begins_in_the_cell_and_ends_before_our_own_frames() -> None:
    def fails() -> None:
        raise ZeroDivisionError

    assert _frames(fails) == ["<module>", "enter", "fails"]
    ours = eval("lambda: 1 / 0", {"__name__": errors.__name__})
    assert _frames(ours) == ["<module>", "enter"]


def test_a_traceback_of_one_frame_stays() -> None:
    ours: dict[str, Any] = {"__name__": errors.__name__}
    with pytest.raises(ZeroDivisionError) as caught:
        exec("1 / 0", ours)
    assert caught.value.__traceback__ is not None
    shown = end_traceback(caught.value.__traceback__.tb_next, lambda name: False)
    assert [line for _, line in traceback.walk_tb(shown)] == [1]
    assert end_traceback(None, lambda name: True) is None


def test_a_notebook_that_is_gone_ends_the_prompt() -> None:
    prompts = Prompts(lambda data: None, is_heard=lambda: False)
    with pytest.raises(EOFError, match="the notebook is gone"):
        prompts.ask("> ")


def test_a_line_for_another_prompt_is_dropped() -> None:
    asked: list[Mapping[str, Any]] = []
    was_asked = threading.Event()

    def publish(data: Mapping[str, Any]) -> None:
        asked.append(data)
        was_asked.set()

    prompts = Prompts(publish)
    prompts.answer(0, "of before")

    def answer() -> None:
        assert was_asked.wait(60)
        prompts.answer(0, "too late")
        prompts.answer(1, "p x")

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        assert prompts.ask("> ") == "p x"
    finally:
        thread.join()
    assert asked == [{"prompt": "> ", "number": 1}]
