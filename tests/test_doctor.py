"""``python -m rankscope doctor``, run for real, and with parts missing."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

import rankscope as dist
from rankscope import doctor
from rankscope.backends.attach.py_spy import PySpyError
from rankscope.backends.interface.base import Backend
from rankscope.backends.interface.registry import resolve


def _doctor(
    *arguments: str, before: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rankscope", "doctor", *arguments]
    if before:
        command = ["bash", "-c", f'{before}; exec "$@"', "bash", *command]
    return subprocess.run(
        command,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def _lines(report: str) -> list[tuple[str, str, str]]:
    """Level, name and text of each finding, its continuation lines included."""
    joined = re.sub(r"\n {22}", " ", report)
    found = re.findall(r"^  (ok|none|note|fault) +(.{13}) (.*)$", joined, re.MULTILINE)
    return [(level, name.strip(), text) for level, name, text in found]


@pytest.mark.processes
def test_it_reports_what_is_here() -> None:
    done = _doctor()
    assert (done.returncode, done.stderr) == (0, "")
    gloo = dist.is_gloo_available()
    headings = [one for one, _ in doctor.CHECKS if one != "gloo" or gloo]
    printed = re.findall(r"^(\S.*)$", done.stdout, re.MULTILINE)
    assert [line for line in printed if line in headings] == headings
    assert printed[-1] == "No faults: %dist_init -n 4 starts ranks here."
    found = _lines(done.stdout)
    texts = {name: text for level, name, text in found if level == "ok"}
    if gloo:
        info = dist.gloo_info()
        library = f"{info.library} {info.version} over {info.transport}"
        assert ("ok", "library", library) in found
    assert texts["ipyparallel"] == importlib.metadata.version("ipyparallel")
    assert "mpiexec" in texts["launcher"]
    assert texts["one host"].startswith("Unix sockets")
    assert texts["other hosts"].startswith("TCP at ")
    assert texts["tcp"] == "for cpu arrays"
    assert all(len(line) <= 100 for line in done.stdout.splitlines())


@pytest.mark.processes
def test_the_help_tells_the_exit_status() -> None:
    done = _doctor("--help")
    assert done.returncode == 0
    assert "exit status: 0" in done.stdout


@pytest.mark.processes
def test_a_gloo_that_is_not_there_is_no_fault() -> None:
    done = _doctor(RANKSCOPE_GLOO="nonsense")
    assert (done.returncode, done.stderr) == (0, "")
    assert any(
        (level, name) == ("none", "gloo") and "nonsense" in text
        for level, name, text in _lines(done.stdout)
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("variables", "one_host", "encrypted"),
    [
        ({"RANKSCOPE_TCP_TRANSPORTS": "unix"}, "Unix sockets, as RANK", False),
        ({"RANKSCOPE_TCP_TRANSPORTS": "tcp"}, "TCP on loopback, as RANK", False),
        ({"RANKSCOPE_TCP_ENCRYPT": "1"}, "Unix sockets", True),
    ],
)
def test_what_the_default_uses(
    variables: dict[str, str],
    one_host: str,
    encrypted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    here, others = doctor.check_tcp()
    assert {here.level, others.level} == {"ok"}
    assert here.text.startswith(one_host)
    assert others.text.endswith(", encrypted") == encrypted


@pytest.mark.processes
def test_reads_that_the_system_forbids_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "_can_be_read", lambda: False)
    here, _ = doctor.check_tcp()
    assert here.text.startswith("Unix sockets alone")


@pytest.mark.processes
def test_a_setting_that_is_none_is_a_fault() -> None:
    done = _doctor(RANKSCOPE_TCP_TRANSPORTS="pigeon")
    assert done.returncode == 1
    assert "pigeon is no transport of the tcp backend" in re.sub(
        r"\n +", " ", done.stdout
    )
    assert done.stdout.splitlines()[-1] == "1 fault: tcp: this check"


@pytest.mark.processes
def test_too_few_descriptors_are_a_fault() -> None:
    done = _doctor(before="ulimit -n 128")
    assert done.returncode == 1
    texts = {name: text for level, name, text in _lines(done.stdout)}
    assert texts["descriptors"].startswith("128 per process")
    assert texts["descriptors"].endswith("ulimit -n 1024")


def test_the_default_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"gloo", "mpi", "ucx", "nccl"}
    for name in others:
        missing = replace(resolve(name), unavailable=lambda: "it is missing")
        monkeypatch.setitem(Backend.registry, name, missing)
    found = {one.name: one for one in doctor.check_backends()}
    assert found["tcp"].level == "ok"
    assert all(found[name].level == "none" for name in others)
    assert {found[name].text for name in others} == {"it is missing"}


@pytest.mark.parametrize(
    ("package", "version", "level", "advice"),
    [
        ("ipyparallel", "8.9.0", "fault", "pip install 'ipyparallel>=9,<10'"),
        ("ipykernel", "7.3.0", "note", "can stop answering"),
        ("ipykernel", "6.30.1", "note", "no subshells"),
        ("ipykernel", "7.4.0rc1", "ok", "7.4.0rc1"),
        ("anywidget", "0.8.1", "fault", "anywidget>=0.9"),
    ],
)
def test_versions_that_are_known(
    package: str,
    version: str,
    level: str,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(
        "importlib.metadata.version",
        lambda name: version if name == package else real(name),
    )
    (found,) = (one for one in doctor.check_jupyter() if one.name == package)
    assert found.level == level
    assert version in found.text
    assert advice in found.text


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    found = {one.name: one for one in doctor.check_jupyter()}
    assert found["ipykernel"].level == "fault"
    assert "pip install ipykernel" in found["ipykernel"].text
    assert found["jupyterlab"].level == "none"


@pytest.mark.parametrize("version", [None, "2.9.1"])
def test_torch_is_read_without_its_import(
    monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: version)
    (found,) = doctor.check_torch()
    assert "torch" not in sys.modules
    if version is None:
        assert (found.level, "pip install torch" in found.text) == ("none", True)
    else:
        assert found.level == "ok"
        assert found.text.startswith("2.9.1; %dist_init -n 4 --torch starts ranks")


def test_what_reads_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(py_spy: str, pid: int) -> bytes:
        raise PySpyError("kernel.yama.ptrace_scope is 2: run as root")

    monkeypatch.setattr(doctor, "find_py_spy", lambda: "/opt/py-spy")
    monkeypatch.setattr(doctor, "dump", lambda py_spy, pid: b"[]")
    (found,) = doctor.check_stacks()
    assert (found.level, found.name) == ("ok", "py-spy")
    assert "/opt/py-spy" in found.text
    monkeypatch.setattr(doctor, "dump", refuse)
    (found,) = doctor.check_stacks()
    assert found.level == "note"
    assert "run as root" in found.text
    monkeypatch.undo()
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(sys, "executable", "/opt/python")
    (found,) = doctor.check_stacks()
    assert found.level == "none"
    assert re.search(r"pip install .*\[attach\]'", found.text)


def test_a_check_that_fails_is_one_more_fault() -> None:
    def check() -> Iterator[doctor.Finding]:
        yield doctor.Finding("ok", "first", "there")
        raise OSError("no such device")

    first, second = doctor.examine(check)
    assert (first.level, second.level) == ("ok", "fault")
    assert second.text == "OSError: no such device"
