"""Further virtual environments, made at their first use.

Each has Rankscope, and packages that the main environment cannot have: PyTorch, a
large download, for whose tests any Python will do; MPICH, whose wheel excludes Open
MPI's; ipykernel 6, which excludes ipykernel 7; nccl4py and cupy, large and of use on
a GPU alone. Tests that need an environment are skipped where it cannot be made.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from tools.install import install
from tools.interpreters import find, succeeds

__all__ = ["TORCH", "mpich_python", "nccl_python", "notebook_python", "torch_python"]

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"
VERSIONS = ("3.11", "3.12", "3.13", "3.10")
#: The requirements of ``import rankscope``, its stores and their tests.
NEEDED = ("numpy>=2.1", "psutil>=5.9", "pyzmq>=26", "pytest>=8")
#: Further requirements of `rankscope.engines`.
ENGINES = ("ipyparallel>=9", "msgspec>=0.20")
#: Further requirements of the tests of MPI.
MPI_TESTS = (
    "mpi4py>=4",
    "mpich>=4",
    *ENGINES,
    "ml_dtypes>=0.5",
    "pytest-timeout>=2.3",
    "scipy>=1.13",
)
#: Further requirements of the tests of torch's groups on the ranks of a cluster.
TORCH_TESTS = (
    *ENGINES,
    "ipykernel>=6.29",
    "ipywidgets>=8.1",
    "anywidget>=0.9",
    "accelerate>=1",
    "ml_dtypes>=0.5",
    "nbclient>=0.10",
    "matplotlib>=3.8",
    "py-spy>=0.4",
    "requests>=2",  # for torch's debug server, as tabulate
    "tabulate>=0.9",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.7",
)
#: Further requirements of the tests of the board: another front end, the older kernel.
NOTEBOOK_TESTS = (
    "notebook>=7.4,<8",
    "ipykernel>=6.29,<7",
    *ENGINES,
    "ipywidgets>=8.1",
    "anywidget>=0.9",
)

#: Further requirements of the tests of NCCL; libnccl itself is a stub there.
NCCL_TESTS = (
    "nccl4py>=0.6",
    "cuda-bindings>=13.2,<14",
    "cupy-cuda13x>=14",
    "pytest-timeout>=2.3",
)

Report = Callable[[str], None]


def torch_python(
    report: Report, report_missing: Report, version: str | None = None
) -> str | None:
    """Return the Python of ``.venv-torch``, made if need be; ``None`` if it cannot be.

    `report_missing` is called with the reason if the environment cannot be made, and
    `report` before it is made, which takes long. With `version`, as ``2.14.1``, it is
    that of ``.venv-torch-2.14.1``, which has another version of torch.
    """
    name = f".venv-torch-{version}" if version else ".venv-torch"
    version = version or TORCH
    check = (
        "import rankscope.magics, rankscope.widgets.board.widget;"
        "import pytest_timeout, xdist, nbclient, accelerate, importlib.metadata as m;"
        "m.version('py-spy');"
        "import torch, torch.distributed as d;"
        f"assert torch.__version__.partition('+')[0] == '{version}';"
        "assert d.is_gloo_available()"
    )
    base = next(filter(None, map(find, VERSIONS)), None)
    if base is None:
        report_missing(f"torch.distributed: no Python of {', '.join(VERSIONS)} found")
        return None
    what = f"PyTorch {version} (once; a large download)"
    wanted = (f"torch=={version}", *NEEDED, *TORCH_TESTS)
    return _environment(name, base, wanted, check, what, report, report_missing)


def _of_this_python(name: str, report: Report, report_missing: Report) -> str | None:
    """Return the Python of an environment of our own version; see `torch_python`."""
    wanted, check, what = _OF_THIS_PYTHON[name]
    base = getattr(sys, "_base_executable", sys.executable)
    wanted = (*NEEDED, *wanted)
    return _environment(
        f".venv-{name}", base, wanted, check, what, report, report_missing
    )


#: What each has, a check of that, and what it is made for.
_OF_THIS_PYTHON = {
    "mpich": (
        MPI_TESTS,
        "import rankscope, ipyparallel, pytest_timeout, scipy, mpi4py, ml_dtypes",
        "MPICH (once)",
    ),
    "nccl": (
        NCCL_TESTS,
        "import rankscope, pytest_timeout, cupy, nccl.core, cuda.bindings",
        "nccl4py and cupy (once; a large download)",
    ),
    "notebook": (
        NOTEBOOK_TESTS,
        "import rankscope.magics, rankscope.widgets.board.widget, notebook, ipykernel;"
        "assert notebook.version_info[0] == 7 and ipykernel.version_info[0] == 6",
        "Notebook 7 and ipykernel 6 (once)",
    ),
}
mpich_python, nccl_python, notebook_python = (
    partial(_of_this_python, name) for name in _OF_THIS_PYTHON
)


def _environment(
    name: str,
    base: str,
    wanted: Sequence[str],
    check: str,
    what: str,
    report: Report,
    report_missing: Report,
) -> str | None:
    """Return the Python of `name`, made by that of `base` to have what is `wanted`.

    `check` is Python code that succeeds in an environment which is complete; `what`
    tells in the report what it is made for.
    """
    with _locked(name):
        folder = ROOT / name
        python = folder / "bin" / "python"
        if succeeds(python, check):
            return str(python)
        report(f"  making {name} with {what}")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            subprocess.run(
                [base, "-m", "venv", "--without-pip", folder],
                capture_output=True,
                text=True,
                check=True,
            )
            install(wanted, python)
            # The tests need the requirements in `wanted`; the others take long.
            install(["--no-deps", "--editable", ROOT], python)
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip().splitlines() or ["no message"])[-1]
            report_missing(f"{name}: {' '.join(map(str, error.cmd))}: {last}")
            return None
        if not succeeds(python, check):
            report_missing(f"{name}: {what.partition(' (')[0]} does not load there")
            return None
        return str(python)


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """Wait while another process makes `name`: two tests at once may need it."""
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / f"{name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


#: By the names that the command line takes; ``torch==2.14.1`` is another torch.
_MAKERS: Mapping[str, Callable[..., str | None]] = {
    "torch": torch_python,
    **{name: partial(_of_this_python, name) for name in _OF_THIS_PYTHON},
}

if __name__ == "__main__":
    # A list, so that one failure does not prevent the other environments.
    asked = [wanted.split("==") for wanted in sys.argv[1:] or _MAKERS]
    made = [_MAKERS[name](print, print, *version) for name, *version in asked]
    sys.exit(0 if all(made) else 1)
