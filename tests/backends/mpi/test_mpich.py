"""MPICH passes the tests of MPI, in an environment of its own.

Its wheel cannot be installed beside Open MPI's: the very test files are run
there, on its ``mpiexec``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

from tools.other_environments import mpich_python

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[3]
FILES = (
    "tests/backends/mpi/test_mpi.py",
    "tests/backends/groups/test_aborts.py",
    "tests/engines/cluster/test_mpi.py",
)


@pytest.mark.soak
@pytest.mark.mpi
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="this environment is without MPI"
)
def test_mpich_passes_the_tests_of_mpi() -> None:
    reasons: list[str] = []
    python = mpich_python(print, reasons.append)
    assert python is not None, reasons
    # Open MPI's settings, which tests of ours may have made, mean nothing to it.
    kept = {k: v for k, v in os.environ.items() if not re.match("OMPI|PMIX|PRTE", k)}
    files = [str(ROOT / file) for file in FILES]
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "mpi", *files],
        cwd=ROOT,
        env=kept,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0
    summary = re.search(r"(\d+) passed", done.stdout)
    assert summary is not None
    assert int(summary[1]) > 30
