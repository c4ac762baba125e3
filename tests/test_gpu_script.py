"""tests/gpu/run.sh without a GPU: it ends at once, with a sentence that says why."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "gpu" / "run.sh"


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("arguments", [(), ("three",), ("wheels",)])
def test_it_names_its_parts(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"usage: {SCRIPT} ")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(
    importlib.util.find_spec("cupy") is not None, reason="cupy is installed"
)
@pytest.mark.parametrize("part", ["one", "two", "faults"])
def test_a_part_without_cupy(part: str, tmp_path: Path) -> None:
    done = run(part, PYTHON=sys.executable, OUT=str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stdout == (
        f"{sys.executable} has no cupy: name one that has (PYTHON=...), or pip install "
        "cupy-cuda13x\n"
    )
    log = tmp_path / "out" / f"gpu-{part}.log"
    assert log.read_text(encoding="utf-8") == done.stdout


def test_wheels_that_are_not_there(tmp_path: Path) -> None:
    done = run("one", WHEELS=str(tmp_path / "none"), OUT=str(tmp_path))
    assert (done.returncode, done.stdout) == (
        2,
        f"WHEELS={tmp_path / 'none'} is no folder\n",
    )
