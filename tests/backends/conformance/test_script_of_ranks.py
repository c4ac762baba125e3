"""A script that starts ranks of its own functions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

SCRIPT = """
from rankscope.backends.conformance.ranks import run_ranks

def own(me):
    return me.rank

{guard}print(run_ranks(2, own, timeout=60))
"""


def run(tmp_path: Path, guard: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(guard=guard))
    return subprocess.run(
        [sys.executable, str(file)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_script_with_its_call_under_main(tmp_path: Path) -> None:
    done = run(tmp_path, 'if __name__ == "__main__": ')
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0, 1]\n"


def test_a_script_that_would_start_ranks_for_ever_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, "")
    assert done.returncode == 1
    assert 'put the call under if __name__ == "__main__":' in done.stderr
