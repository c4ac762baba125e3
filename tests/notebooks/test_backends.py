"""The notebook on backends is executed, and shows what its text promises."""

from __future__ import annotations

import re
import shutil
import sysconfig
from pathlib import Path

import pytest

from rankscope.backends import is_backend_available
from tools.execution import execute, text_of

PATH = Path(__file__).parents[2] / "notebooks" / "03_backends.ipynb"

_COMPILER = (sysconfig.get_config_var("CXX") or "g++").split()[0]

pytestmark = [
    pytest.mark.processes,
    pytest.mark.soak,
    pytest.mark.skipif(shutil.which(_COMPILER) is None, reason=f"no {_COMPILER} here"),
    pytest.mark.timeout(400),
]


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    """Cell id → its text."""
    notebook = execute(PATH)
    return {c.id: text_of(c) for c in notebook.cells if c.cell_type == "code"}


def said(text: str) -> list[str]:
    """The lines of a `%%distributed` cell, without the ranks they came from."""
    return [re.sub(r"^\[[\d,-]+\] +", "", line) for line in text.strip().splitlines()]


def test_config_strings_are_read_and_refused(outputs: dict[str, str]) -> None:
    assert "cpu:mpi,cuda:tcp     {'cpu': 'mpi', 'cuda': 'tcp'}" in outputs["config"]
    assert re.search(r"\(nothing\) +\{'cpu': 'tcp'", outputs["config"])
    assert outputs["config-wrong"].count("expected a backend") == 3
    for part in ("'cpu' is given twice", "unknown backend 'glue'", "'tcp,nccl'"):
        assert part in outputs["config-wrong"]


def test_a_backend_that_is_not_there_harms_nobody(outputs: dict[str, str]) -> None:
    assert said(outputs["dlpack"]) == ["(1, 0)"]
    reduced, *cuda = said(outputs["lazy"])
    assert re.fullmatch(r"cpu:\w+,cuda:nccl reduced \[3. 3. 3.\]", reduced)
    assert all("nccl" in line or "NCCL" in line for line in cuda)
    assert len(cuda) in (1, 2)
    assert said(outputs["lazy-after"]) == ["array([6., 6., 6.])"]


def test_the_backend_in_python_communicates(outputs: dict[str, str]) -> None:
    assert said(outputs["python-use"]) == ["array([3., 3., 3.])"]
    assert said(outputs["python-free"]) == [
        "mean [5. 5.], my part [0. 2.], gathered [0. 5.]",
        "mean [5. 5.], my part [4. 6.], gathered [0. 5.]",
    ]
    assert said(outputs["python-missing"]) == [
        "backend 'board' does not implement broadcast"
    ]


def test_the_backend_in_python_is_aborted_and_rebuilt(outputs: dict[str, str]) -> None:
    waited, aborted = said(outputs["python-abort"])
    # The broadcast that the backend refused has no number.
    assert "all_reduce #5 of group 'board' on rank 0 (cell" in waited
    assert "it is still in flight" in waited
    assert "the group was aborted: rank 1 is not coming" in aborted
    assert said(outputs["python-again"]) == ["array([3., 3., 3.])"]


def test_the_groups_on_the_same_ranks_are_compared(outputs: dict[str, str]) -> None:
    found = re.findall(r"(\w+) +cpu:(\w+) +([\d.]+) ms", outputs["side-by-side"])
    installed = [name for name in ("ucx", "gloo") if is_backend_available(name)]
    assert [name for name, *_ in found] == ["default", *installed, "board"]
    assert [backend for _, backend, _ in found] == ["tcp", *installed, "board"]


def test_the_backend_in_cpp_is_compiled_and_found(outputs: dict[str, str]) -> None:
    assert "PYBIND11_MODULE" in outputs["cpp-source"]
    assert "class DummyWork(dist.Work)" in outputs["cpp-python-source"]
    assert said(outputs["cpp-use"]) == [
        "imported before its first use: False",
        "[0. 0. 0.] <class 'rankscope_dummy.DummyWork'>",
    ]
    seen = [int(part) for part in re.findall(r"(\d+)%", outputs["cpp-slow"])]
    assert len(seen) >= 2
    assert seen == sorted(seen)
    assert "completed" in outputs["cpp-slow"]


def test_it_stands_beside_the_default_backend(outputs: dict[str, str]) -> None:
    assert said(outputs["ext"]) == ["here [2. 2. 2. 2.], there [0. 0. 0. 0.]"]
    lacks, *refused = said(outputs["ext-missing"])
    assert lacks == (
        "NotImplementedError: backend 'dummy' does not implement broadcast"
    )
    assert len(refused) == 2
    for line in refused:
        assert "ValueError: broadcast in group 'default'" in line
        assert "no backend for device type 'ext'" in line
    assert re.search(r"\d+ µs for each operation", outputs["overhead"])
    for group in ("default", "both", "board", "zeros", "slow", "mixed"):
        assert group in outputs["status"]
