"""The line at which a plain script has ended."""

from __future__ import annotations

import contextlib
import sys
from types import FrameType

import pytest

from rankscope.backends.groups.job import line_that_ended

_MAIN = "def main():\n    {}\n\nmain()\n"
_CAUGHT = "try:\n    raise SystemExit\nexcept SystemExit:\n    pass\n"


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("for i in range(3):\n    if i == 1:\n        raise SystemExit\n", 4),
        (_MAIN.format("raise SystemExit(3)"), 5),
        (_MAIN.format("pass"), 0),
        ("x = 1\n", 0),
        (_CAUGHT, 0),
    ],
)
def test_the_line_of_a_system_exit_is_known_after_it(script: str, line: int) -> None:
    kept: list[FrameType] = []
    variables = {"note": lambda: kept.append(sys._getframe(1))}
    code = compile(f"note()\n{script}", "/job/train.py", "exec")
    with contextlib.suppress(SystemExit):
        exec(code, variables)
    assert line_that_ended(kept[0]) == (f"train.py:{line}" if line else "")
    assert line_that_ended(None) == ""
