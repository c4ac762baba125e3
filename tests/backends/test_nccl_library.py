"""nccl4py over a stub of the library, in an environment of its own.

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

from rankscope.backends import nccl_library
from tools.other_environments import nccl_python

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

compiler = shutil.which("cc") or shutil.which("gcc")


@pytest.mark.skipif(compiler is None, reason="no C compiler, which the stub needs")
@pytest.mark.skipif(sys.platform != "linux", reason="nccl4py has wheels for Linux only")
@pytest.mark.timeout(900)
def test_nccl4py_over_a_stub_of_nccl(tmp_path: Path) -> None:
    reasons: list[str] = []
    python = nccl_python(print, reasons.append)
    assert python is not None, reasons
    stub = tmp_path / "libnccl.so.2"
    soname = "-Wl,-soname,libnccl.so.2"
    source = str(HERE / "nccl_stub.c")
    assert compiler is not None
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror"]
    subprocess.run(
        [compiler, *flags, soname, source, "-o", str(stub)],
        check=True,
    )
    done = subprocess.run(
        [
            *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            str(HERE / "nccl_library.py"),
        ],
        cwd=ROOT,
        env={**os.environ, "RANKSCOPE_TEST_NCCL_STUB": str(stub)},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    summary = re.search(r"(\d+) passed", done.stdout)
    assert summary is not None
    assert int(summary[1]) > 12
    without = subprocess.run(
        [
            *(python, "-c"),
            "from rankscope.backends import nccl_library as n; print(n._no_library())",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert without.stdout.startswith("libnccl.so.2 is not there: pip install")


@pytest.mark.skipif(
    nccl_library._not_installed("cupy", "cupy") is None, reason="cupy is installed"
)
def test_an_environment_without_cupy_says_what_to_install() -> None:
    assert nccl_library.unavailable_reason() == (
        "NCCL needs cupy, which is not installed: pip install 'rankscope[cuda13]' "
        "(CUDA 12: 'rankscope[cuda12]')"
    )
