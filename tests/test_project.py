"""The imports between packages, what README names, and `tools/environment.sh`."""

from __future__ import annotations

import ast
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tools.install import install, options

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("magics", "widgets", "engines", "backends")  # each may use those after it
JUPYTER = {
    "IPython",
    "anywidget",
    "ipykernel",
    "ipyparallel",
    "ipywidgets",
    "jupyter_client",
    "jupyter_core",
    "matplotlib",
    "nbclient",
    "nbformat",
    "traitlets",
}


def _imports(path: Path) -> list[tuple[int, str]]:
    """Return line and absolute name of each import of a module, at any depth."""
    package = ["rankscope", *path.relative_to(ROOT).parts[:-1]]
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            # `from rankscope import engines` names a room by its alias.
            found += [(node.lineno, f"{name}.{alias.name}") for alias in node.names]
    return found


def _room_files(room: str) -> list[Path]:
    return sorted(
        path
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_depend_one_way(room: str) -> None:
    allowed = ROOMS[ROOMS.index(room) :]
    wrong = []
    for path in _room_files(room):
        if path.suffix != ".py":
            continue
        for line, name in _imports(path):
            parts = name.split(".")
            if parts[0] != "rankscope":
                continue
            # The agent hands the front door to the ranks, as `dist`.
            if room != "backends" and parts[1:] in ([], ["__version__"]):
                continue
            if len(parts) < 2 or parts[1] not in allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert wrong == []


def test_backends_know_nothing_of_jupyter() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in _room_files("backends")
        if path.suffix == ".py"
        for line, name in _imports(path)
        if name.split(".")[0] in JUPYTER
    ]
    assert wrong == []


def test_engines_alone_use_msgspec() -> None:
    users = {
        room
        for room in (*ROOMS, "rankscope")
        for path in _room_files(room)
        if path.suffix == ".py"
        for _, name in _imports(path)
        if name.split(".")[0] == "msgspec"
    }
    assert users == {"engines"}


@pytest.mark.processes
def test_backends_load_without_jupyter() -> None:
    """No module that the backends import loads Jupyter either."""
    script = (
        "import sys, rankscope.backends as b\n"
        "[getattr(b, name) for name in b.__all__]\n"
        f"print(sorted({JUPYTER!r} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


#: What takes long to import, and most programs do not need.
HEAVY = {
    *("asyncio", "email", "hashlib", "importlib.metadata", "pdb", "psutil", "ssl"),
    *("subprocess", "zmq", "cupy", "mpi4py", "nccl", "torch", "pandas", "matplotlib"),
    *("rankscope.backends.gloo", "rankscope.backends.observe", "rankscope.engines"),
    *JUPYTER,
}


@pytest.mark.processes
def test_a_script_loads_nothing_heavy_but_numpy() -> None:
    script = (
        "import sys, numpy\n"
        "by_numpy = set(sys.modules)\n"
        "import rankscope as dist\n"
        "dist.init_process_group, dist.new_group, dist.all_reduce, dist.isend\n"
        "dist.all_gather_object, dist.coalescing_manager, dist.ReduceOp\n"
        f"print(sorted({HEAVY!r} & set(sys.modules) - by_numpy))"
    )
    assert _run(sys.executable, "-c", script) == "[]\n"


@pytest.mark.processes
@pytest.mark.parametrize(
    "imported", ["rankscope", "rankscope.terminal, rankscope.widgets.top.app"]
)
def test_who_looks_on_from_a_terminal_starts_without_numpy(imported: str) -> None:
    script = f"import sys, {imported}\nprint('numpy' in sys.modules)"
    assert _run(sys.executable, "-c", script) == "False\n"


@pytest.mark.processes
def test_the_live_view_of_a_job_needs_no_ipyparallel() -> None:
    script = (
        "import sys, rankscope.widgets.top.live\nfrom rankscope.engines import Job\n"
    )
    script += "print('ipyparallel' in sys.modules)"
    assert _run(sys.executable, "-c", script) == "False\n"


@pytest.mark.processes
def test_a_completion_shows_what_is_imported_later() -> None:
    script = (
        "import rankscope\n"
        "print(sorted({*rankscope.__all__} - {*dir(rankscope)}), end='')\n"
        "print(sorted({*rankscope.backends.__all__} - {*dir(rankscope.backends)}))"
    )
    assert _run(sys.executable, "-c", script) == "[][]\n"


@pytest.mark.processes
def test_the_watch_of_torch_is_there_without_an_import_of_its_own() -> None:
    script = (
        "import sys, rankscope\n"
        "assert 'rankscope.torch' not in sys.modules\n"
        "print(callable(rankscope.torch.rewrap), 'torch' in sys.modules)"
    )
    assert _run(sys.executable, "-c", script) == "True False\n"


def _run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


# -- the README ----------------------------------------------------------------


def _readme_blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_readme_make_targets_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 200  # the rest is in docs/
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z]+)", "\n".join(_readme_blocks("bash"))))
    named |= set(re.findall(r"`make ([a-z]+)", text))
    assert {"demo", "test"} <= named
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    assert named <= targets


def test_contributing_names_what_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80  # more is a page of docs/howto
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert [link for link in links if not (ROOT / link).exists()] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([a-z]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    rooms = ("", "backends/", "engines/", "magics/", "widgets/")
    for path in re.findall(r"`([a-z_0-9/]+(?:/|\.py|\.md|\.toml|\.ipynb))`", text):
        assert any((ROOT / room / path).exists() for room in rooms), path


def test_readme_files_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)]+)\)", text)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.processes
def test_readme_magics_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"%(dist_[a-z]+)", text))
    assert "dist_init" in named
    script = (
        "from IPython.testing.globalipapp import start_ipython\n"
        "ip = start_ipython(); ip.run_line_magic('load_ext', 'rankscope')\n"
        "print(*ip.magics_manager.magics['line'])"
    )
    registered = set(_run(sys.executable, "-c", script).split())
    assert named <= registered


@pytest.mark.processes
def test_readme_script_runs(tmp_path: Path) -> None:
    (script,) = (b for b in _readme_blocks("python") if b.startswith("# hello.py"))
    (launch,) = (b for b in _readme_blocks("bash") if "hello.py" in b)
    (tmp_path / "hello.py").write_text(script, encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        launch = launch.replace("29500", str(probe.getsockname()[1]))
    done = subprocess.run(
        ["bash", "-c", launch],
        cwd=tmp_path,
        env=os.environ
        | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RANKSCOPE_KEY": "of the test",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    # Unbuffered, the ranks' lines may run into each other.
    line = r"rank (\d): \[10. 10. 10.\], #\d+ took \d+\.\d+ ms"
    found = re.findall(line, done.stdout)
    assert sorted(found) == ["0", "1", "2", "3"], done.stdout + done.stderr


# -- what tools of others read -------------------------------------------------


def test_pre_commit_runs_what_make_lint_runs() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (parts,) = re.findall(r"^lint: ([a-z ]+?) *##", makefile, re.MULTILINE)
    assert re.findall(r"entry: make ([a-z]+)", hooks) == parts.split()
    # Nothing is fetched: no hook is another repository's.
    assert re.findall(r"repo: (\S+)", hooks) == ["local"]


def test_citation_names_this_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    said = dict(re.findall(r"^(version|license): (.+)$", citation, re.MULTILINE))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert said == dict(re.findall(r'^(version|license) = "(.+)"$', project, re.M))


# -- the environment -----------------------------------------------------------

# Stands in for a Python: makes environments of itself and notes what is to be
# installed.
FAKE_PYTHON = """#!/bin/bash
case "$*" in
    *version_info*) exit {version_differs} ;;
    "-c import ensurepip, venv") exit {lacks_ensurepip} ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m tools.install "*) echo "$*" >> install.log ;;
    --version) echo "Python 3.10.0" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what tools/environment.sh reads."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "environment.sh", tmp_path / "tools")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / ".python-version", tmp_path)
    return tmp_path


def _environment(
    checkout: Path, *, differs: int = 0, lacks: int = 0
) -> subprocess.CompletedProcess[str]:
    tools = checkout / "path"
    tools.mkdir(exist_ok=True)
    fake = tools / "python3.10"
    fake.write_text(
        FAKE_PYTHON.format(version_differs=differs, lacks_ensurepip=lacks),
        encoding="utf-8",
    )
    fake.chmod(0o755)
    for name in ("bash", "cat", "cksum", "cp", "dirname", "mkdir", "rm"):
        link = tools / name
        if not link.exists():
            link.symlink_to(str(shutil.which(name)))
    return subprocess.run(
        [checkout / "tools" / "environment.sh"],
        env={"PATH": str(tools), "HOME": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.processes
def test_environment_is_installed_once(checkout: Path) -> None:
    log = checkout / "install.log"
    assert _environment(checkout).returncode == 0
    assert log.read_text().count("--editable .[dev,mpi]") == 1
    assert _environment(checkout).returncode == 0
    assert len(log.read_text().splitlines()) == 1

    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert _environment(checkout).returncode == 0
    assert len(log.read_text().splitlines()) == 2


@pytest.mark.processes
def test_environment_says_how_to_get_venv(checkout: Path) -> None:
    done = _environment(checkout, lacks=1)
    assert done.returncode != 0
    assert "apt-get install python3.10-venv" in done.stderr


@pytest.mark.processes
def test_environment_says_which_pythons_will_do(checkout: Path) -> None:
    done = _environment(checkout, differs=1)
    assert done.returncode != 0
    assert "No Python from 3.10 to 3.14" in done.stderr


@pytest.mark.processes
def test_make_lab_opens_another_folder() -> None:
    for given, folder in ((), "lab"), (("NOTEBOOK_DIR=/x",), "/x"):
        command = ["make", "--dry-run", "lab", *given]
        run = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert f"--notebook-dir={folder} " in run.stdout


@pytest.mark.processes
def test_make_tests_another_torch_in_an_environment_of_its_own() -> None:
    for given, version, folder in (
        ((), "torch", ".venv-torch"),
        (("TORCH=2.14.1",), "torch==2.14.1", ".venv-torch-2.14.1"),
    ):
        command = ["make", "--dry-run", "test-torch", *given]
        run = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert f"-m tools.other_environments {version}\n" in run.stdout
        assert f"\n{folder}/bin/python -m pytest" in run.stdout


def test_the_settings_of_pip_hold_for_uv() -> None:
    listed = [
        ":env:.find-links='/wheels'",
        "global.cert='/certificates'",
        "global.extra-index-url='file:///a file:///b'",
        "global.find-links='/others'",
        "global.index-url='https://one.example'",
        "install.index-url='https://two.example'",
        "download.index-url='https://three.example'",
    ]
    assert options(listed) == [
        *("--extra-index-url", "file:///a", "--extra-index-url", "file:///b"),
        *("--find-links", "/wheels", "--index-url", "https://two.example"),
    ]


def test_what_uv_cannot_install_is_for_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[list[str]] = []

    def failing(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        run.append(command)
        return subprocess.CompletedProcess(command, command[2] == "uv", "", "")

    monkeypatch.setattr(subprocess, "run", failing)
    install(["numpy>=2"], "/a/python")
    uv, pip = run[-2:]
    assert (uv[2], pip[2]) == ("uv", "pip")
    for command in (uv, pip):
        assert command[-1] == "numpy>=2"
        assert command[command.index("--python") + 1] == "/a/python"
