"""nccl4py and cuda-bindings over stubs, in an environment of their own.

nccl4py and cupy are large, and of no use where there is no GPU; the tests'
own environment is without them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.backends.install import pip_install, with_extra
from rankscope.backends.nccl import nccl4py as nccl_library
from tools.other_environments import nccl_python

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent

compiler = shutil.which("cc") or shutil.which("gcc")


def compiled(folder: Path, source: str, soname: str) -> str:
    made = folder / soname
    assert compiler is not None
    subprocess.run(
        [
            *(compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror"),
            *(f"-Wl,-soname,{soname}", str(HERE / source), "-o", str(made)),
        ],
        check=True,
    )
    return str(made)


@pytest.mark.processes
@pytest.mark.skipif(compiler is None, reason="no C compiler, which the stubs need")
@pytest.mark.skipif(sys.platform != "linux", reason="nccl4py has wheels for Linux only")
@pytest.mark.timeout(900)
def test_the_packages_over_stubs_of_the_libraries(tmp_path: Path) -> None:
    reasons: list[str] = []
    python = nccl_python(print, reasons.append)
    assert python is not None, reasons
    stubs = {
        "RANKSCOPE_TEST_NCCL_STUB": compiled(tmp_path, "nccl_stub.c", "libnccl.so.2"),
        "RANKSCOPE_TEST_CUDA_STUB": compiled(tmp_path, "cuda_stub.c", "libcuda.so.1"),
        "RANKSCOPE_TEST_NVML_STUB": compiled(
            tmp_path, "nvml_stub.c", "libnvidia-ml.so.1"
        ),
    }
    done = subprocess.run(
        [
            *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            str(HERE / "nccl_library.py"),
        ],
        cwd=ROOT,
        env={**os.environ, **stubs},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    summary = re.search(r"(\d+) passed", done.stdout)
    assert summary is not None
    assert int(summary[1]) > 15
    without = subprocess.run(
        [
            *(python, "-c"),
            "from rankscope.backends.nccl import nccl4py as n; print(n._no_library())",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.match(r"libnccl\.so\.2 is not there: (uv )?pip install", without.stdout)


@pytest.mark.skipif(
    nccl_library._not_installed("cupy", "cupy") is None, reason="cupy is installed"
)
def test_an_environment_without_cupy_says_what_to_install() -> None:
    assert nccl_library.unavailable_reason() == (
        f"NCCL needs cupy, which is not installed: {pip_install(with_extra('cuda13'))} "
        f"(CUDA 12: {with_extra('cuda12')})"
    )
