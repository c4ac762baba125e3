"""A test that starts a process without the marker for it fails in ``make check``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MISSED = """
import multiprocessing, os, subprocess
import pytest

def test_swallows_the_refusal():
    try:
        getattr(subprocess, "run")(["true"])
    except PermissionError:
        pass

def test_forks():
    if os.fork() == 0:
        os._exit(0)

def test_says_so():
    subprocess.run(["true"], check=True)

@pytest.mark.processes
def test_is_marked():
    assert False, "is not run"

def test_starts_none():
    pass
"""


@pytest.mark.processes
def test_a_test_that_was_missed_fails_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "test_missed.py").write_text(MISSED, encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "--no-processes", "-p", "tests.conftest"),
            *("-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml"),
            *("--rootdir", tmp_path, tmp_path),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "3 failed, 1 passed, 1 deselected" in done.stdout, done.stdout + done.stderr
    for name, event in (
        ("test_swallows_the_refusal", "subprocess.Popen"),
        ("test_forks", "os.fork"),
    ):
        assert f"{name} starts a process ({event}" in done.stdout
    assert "mark it with @pytest.mark.processes" in done.stdout
