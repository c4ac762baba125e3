"""Files of Rankscope have the names of its packages in a report, a user's their own."""

from __future__ import annotations

import os

import pytest

import rankscope
from rankscope import backends
from rankscope.backends.hang_report.part import _named

PACKAGE, BACKENDS = (os.path.abspath(one.__path__[0]) for one in (rankscope, backends))


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (f"{BACKENDS}/groups/state.py", "rankscope/backends/groups/state.py"),
        (f"{PACKAGE}/torch.py", "rankscope/torch.py"),
        (f"{os.path.dirname(PACKAGE)}/train.py",) * 2,
    ],
)
def test_a_script_in_a_checkout_is_the_users(file: str, name: str) -> None:
    assert _named({"file": file, "line": 3, "source": f"{file}:3"})["file"] == name
