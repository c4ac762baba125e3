"""Whose a line is: stacks and dumps judge the path of a file alike."""

from __future__ import annotations

import pytest

from rankscope.backends.post_mortem.source_lines import users_line
from rankscope.backends.post_mortem.user_frames import Frame, position

USER = "/home/me/train.py"


@pytest.mark.parametrize(
    "library",
    [
        "/env/lib/python3.12/site-packages/accelerate/state.py",
        "/usr/lib/python3/dist-packages/numpy/core.py",
        "/usr/lib/python3.12/contextlib.py",
        "/usr/lib64/python3.12/contextlib.py",
        "/src/pytorch/torch/distributed/c10d_logger.py",
        "/src/pytorch/aten/src/ATen/core.cpp",
    ],
)
def test_a_librarys_line_is_not_the_users(library: str) -> None:
    line, _ = position([Frame(library, 81, "inner"), Frame(USER, 7, "step")])
    assert str(line) == "train.py:7"
    frames = [
        {"filename": library, "line": 81, "name": "inner"},
        {"filename": USER, "line": 7, "name": "step"},
    ]
    assert str(users_line(frames)) == "train.py:7"
