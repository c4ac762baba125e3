"""What ``make test-pythons`` finds and says; the target itself takes minutes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rankscope import doctor
from rankscope.backends.conformance.leaks import lives
from rankscope.backends.conformance.waiting import until
from tools import interpreters, other_pythons

HERE = "{}.{}".format(*sys.version_info)


@pytest.mark.processes
def test_a_python_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(other_pythons, "find", lambda version: None)
    assert other_pythons.main([]) == 0
    said = capsys.readouterr().out
    named = re.findall(r"^Python (3\.\d+): not found .*: not tested$", said, re.M)
    assert named == [one for one in interpreters.SUPPORTED if one != HERE]


@pytest.mark.processes
def test_a_python_that_fails_fails_the_target(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(other_pythons, "FOLDER", tmp_path / "work")
    monkeypatch.setattr(other_pythons, "find", lambda version: f"/python{version}")
    monkeypatch.setattr(other_pythons, "_build", lambda: tmp_path / "a.whl")
    monkeypatch.setattr(other_pythons, "_copy", lambda names, target: None)
    tried: dict[str, bool] = {}

    def attempt(version: str, python: str, wheel: Path, is_oldest: bool) -> bool:
        tried[version] = is_oldest
        return version != "3.13"

    monkeypatch.setattr(other_pythons, "_try", attempt)
    assert other_pythons.main(["3.13", "3.10", "3.11"]) == 1
    assert tried == {"3.13": False, "3.11": False, "3.10": True}
    assert other_pythons.main(["3.11"]) == 0
    assert tried["3.11"]


@pytest.mark.processes
@pytest.mark.parametrize("oldest", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_tests_that_fail_run_once_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, second: bool, oldest: bool
) -> None:
    run: list[str] = []

    def step(version: str, name: str, command: Sequence[str]) -> bool:
        run.append(name)
        if name == "retest":
            # It collects nothing else: a run that ended early left no record.
            assert set(other_pythons.TESTS) <= set(command)
            ignored = {f"--ignore={file}" for file in other_pythons.OLDEST}
            assert ignored & {*command} == (set() if oldest else ignored)
        return name != "tests" and (second or name != "retest")

    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(other_pythons, "_step", step)
    wheel = tmp_path / "a.whl"
    assert other_pythons._try("3.11", "/python3.11", wheel, oldest) == second
    assert run == ["install", "doctor", "demo", "tests", "retest"]


@pytest.mark.processes
def test_a_command_that_does_not_end_leaves_its_stacks_and_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(other_pythons, "FOLDER", tmp_path)
    monkeypatch.setattr(other_pythons, "ROOT", tmp_path)
    monkeypatch.setattr(other_pythons, "LIMIT", 5)
    (tmp_path / "tree").mkdir()
    waits = "import faulthandler, signal; faulthandler.enable(); signal.pause()"
    worker = f"subprocess.Popen([sys.executable, '-c', {waits!r}])"
    program = f"import subprocess, sys; print({worker}.pid, flush=True); {waits}"
    assert not other_pythons._step("3.11", "tests", [sys.executable, "-c", program])
    said = capsys.readouterr().out
    assert "tests    ended after 5 s, " in said
    log = (tmp_path / "3.11-tests.log").read_text()
    assert log.count("Fatal Python error: Aborted") == 2
    until(lambda: not lives(int(log.split()[0])), what="the worker's end")


@pytest.mark.processes
def test_the_python_that_is_found_is_of_that_version() -> None:
    python = interpreters.find(HERE)
    assert python is not None
    told = subprocess.run(
        [python, "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert told.startswith(f"Python {HERE}.")
    assert interpreters.find("3.99") is None


def test_one_list_of_supported_pythons() -> None:
    root = Path(__file__).resolve().parent.parent
    metadata = (root / "pyproject.toml").read_text(encoding="utf-8")
    classified = re.findall(r"Programming Language :: Python :: (3\.\d+)", metadata)
    assert sorted(interpreters.SUPPORTED) == sorted(classified)
    numbers = sorted(tuple(map(int, one.split("."))) for one in interpreters.SUPPORTED)
    assert (numbers[0], numbers[-1]) == doctor.SUPPORTED
    script = (root / "tools" / "environment.sh").read_text(encoding="utf-8")
    (versions,) = re.findall(r'^versions=\("\$preferred" (.*)\)$', script, re.M)
    assert versions.split() == list(interpreters.SUPPORTED)
