"""The wheel: what it holds, and what it needs on each Python and platform."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.soak]

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("magics", "widgets", "engines", "backends")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from an sdist, which is built from a copy.

    setuptools would leave its traces in the tree.
    """
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    for name in ("rankscope", *ROOMS, "notebooks", "tests", "tools", "bench"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
    out = tmp_path_factory.mktemp("wheel")
    script = f"from setuptools import build_meta as b; b.build_sdist({str(out)!r})"
    _run(sys.executable, "-c", script, cwd=source)
    (sdist,) = out.glob("rankscope-*.tar.gz")
    _run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
        *("--no-build-isolation", "--wheel-dir", out, sdist),
    )
    (built,) = out.glob("rankscope-*.whl")
    return built


def _run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


def test_wheel_holds_the_rooms_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packed = {name for name in names if ".dist-info/" not in name}
    expected = {
        f"rankscope/{path.relative_to(ROOT).as_posix()}"
        for room in ROOMS
        for path in _files(room)
    } | {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "rankscope").iterdir()
        if path.is_file()
    }
    assert packed == expected
    assert "rankscope/py.typed" in packed
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_installs_and_imports(wheel: Path, tmp_path: Path) -> None:
    """In a fresh environment that borrows only the dependencies from this one."""
    _run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    _run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
        *("--no-index", "--no-deps", wheel),
    )
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(_run(python, "-c", where).strip())
    ours = _run(sys.executable, "-c", where).strip()
    # The .pth files in the borrowed folder, the editable one among them, are
    # not read from there.
    (site / "borrowed.pth").write_text(ours + "\n")
    script = (
        "import rankscope, rankscope.backends, rankscope.engines, rankscope.magics\n"
        "import rankscope.widgets\n"
        "assert callable(rankscope.load_ipython_extension)\n"
        "print(*(m.__file__ for m in (rankscope, rankscope.backends,"
        " rankscope.engines, rankscope.magics, rankscope.widgets)), sep='\\n')"
    )
    for line in _run(python, "-c", script, cwd=tmp_path).splitlines():
        assert Path(line).is_relative_to(site)
    # There the folder rankscope of the checkout is found first.
    assert _run(python, "-m", "rankscope", "--version", cwd=ROOT)
    assert {path.name for path in site.iterdir()} <= {
        "borrowed.pth",
        "rankscope",
        *(path.name for path in site.glob("rankscope-*.dist-info")),
    }


def _files(room: str) -> list[Path]:
    return [
        path
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]


# -- the library of gloo on each target ------------------------------------------

_MINORS = range(10, 15)
_MACHINES = ("x86_64", "aarch64")
#: What uv says where it cannot reach the package index.
_OFFLINE = re.compile(r"Failed to fetch|error sending request|dns error", re.IGNORECASE)


Resolved = dict[tuple[int, str, str], dict[str, str]]
#: Python's minor version, platform and extras of each resolution.
_TARGETS = [
    *(
        (minor, f"{machine}-manylinux_2_28", extra)
        for minor in _MINORS
        for machine in _MACHINES
        for extra in ("", "[gloo]")
    ),
    *(
        (12, f"{machine}-manylinux_2_28", extra)
        for machine in _MACHINES
        for extra in ("[ucx]", "[ucx13]")
    ),
    (12, "aarch64-apple-darwin", "[gloo]"),
]


@pytest.fixture(scope="module")
def resolved(wheel: Path) -> Resolved:
    """Name -> version of what pip would install, by Python, platform and extra.

    Most of the time is the package index's: all are asked for at once.
    """
    with ThreadPoolExecutor(max_workers=4) as pool:
        found = pool.map(lambda one: _resolve(wheel, *one), _TARGETS)
        return dict(zip(_TARGETS, found, strict=True))


def _resolve(wheel: Path, minor: int, platform: str, extra: str) -> dict[str, str]:
    """Return what one resolution chooses, from wheels."""
    return _compile(f"rankscope{extra} @ {wheel.as_uri()}", minor, platform)


def _compile(
    requirements: str, minor: int, platform: str, *options: str
) -> dict[str, str]:
    """Return what one resolution of `requirements` chooses, from wheels.

    pip evaluates the markers of the running interpreter alone, and uv those of the
    target.
    """
    done = subprocess.run(
        [
            *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header"),
            *("--no-annotate", "--only-binary", ":all:", "--no-config", *options),
            *("--python-version", f"3.{minor}", "--python-platform", platform, "-"),
        ],
        input=f"{requirements}\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0 and _OFFLINE.search(done.stderr):
        pytest.skip(
            "needs the package index (PyPI, or the one that UV_DEFAULT_INDEX names), "
            f"which uv cannot reach: {done.stderr.strip()[-300:]}"
        )
    assert done.returncode == 0, done.stderr
    lines = (line.split("==") for line in done.stdout.splitlines() if "==" in line)
    return {name.strip(): version.strip() for name, version in lines}


@pytest.mark.parametrize("machine", _MACHINES)
@pytest.mark.parametrize("minor", _MINORS)
def test_the_extra_gloo_brings_one_library(
    resolved: Resolved, minor: int, machine: str
) -> None:
    found = resolved[minor, f"{machine}-manylinux_2_28", "[gloo]"]
    libraries = [name for name in found if name in ("pygloo", "xoscar")]
    pygloo = (minor, machine) == (10, "x86_64")
    assert libraries == ["pygloo" if pygloo else "xoscar"]


@pytest.mark.parametrize("machine", _MACHINES)
@pytest.mark.parametrize("minor", _MINORS)
def test_the_package_alone_brings_no_backend_library(
    resolved: Resolved, minor: int, machine: str
) -> None:
    found = resolved[minor, f"{machine}-manylinux_2_28", ""]
    assert not {"pygloo", "xoscar", "pandas", "scipy", "mpi4py"} & found.keys()


@pytest.mark.parametrize("machine", _MACHINES)
@pytest.mark.parametrize(("extra", "cuda"), [("[ucx]", 12), ("[ucx13]", 13)])
def test_the_extras_of_ucx_bring_its_wheel(
    resolved: Resolved, extra: str, cuda: int, machine: str
) -> None:
    found = resolved[12, f"{machine}-manylinux_2_28", extra]
    ucx = [name for name in found if name.startswith("libucx")]
    assert ucx == [f"libucx-cu{cuda}"]


def test_other_platforms_get_no_library_of_gloo(resolved: Resolved) -> None:
    """They install: `unavailable_reason` tells there why gloo is missing."""
    found = resolved[12, "aarch64-apple-darwin", "[gloo]"]
    assert not {"pygloo", "xoscar"} & found.keys()


# -- the packages for GPUs ---------------------------------------------------------


@pytest.mark.parametrize("minor", [10, 14])
@pytest.mark.parametrize(("cuda", "bindings"), [(12, "12.9.6"), (13, "13.2.0")])
def test_the_lowest_versions_for_gpus_go_together(
    wheel: Path, cuda: int, bindings: str, minor: int
) -> None:
    """With them, the tests over stubs of the libraries pass (test_nccl_library)."""
    (name,) = (one for one in zipfile.ZipFile(wheel).namelist() if "METADATA" in one)
    metadata = zipfile.ZipFile(wheel).read(name).decode()
    needed = re.findall(
        rf"^Requires-Dist: (.*); extra == .cuda{cuda}.$", metadata, re.M
    )
    found = _compile(
        "\n".join(needed),
        minor,
        "x86_64-manylinux_2_28",
        *("--resolution", "lowest-direct"),
    )
    lowest = {
        "nccl4py": "0.6.0",
        "cuda-core": "1.0.0",
        "cuda-pathfinder": "1.5.4",
        "cuda-bindings": bindings,
    }
    assert {package: found[package] for package in lowest} == lowest
    assert found[f"nvidia-nccl-cu{cuda}"].startswith("2.28.")
