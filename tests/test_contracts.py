"""The import contracts of pyproject.toml: they see every module, and they fail."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("magics", "widgets", "engines", "backends")
LINT = [
    *(sys.executable, "-c", "import importlinter.cli as c; c.lint_imports_command()"),
    *("--config", "pyproject.toml", "--no-cache", "--no-logo"),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the package as it is installed, with the contracts beside it."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "rankscope", tmp_path / "rankscope", ignore=ignored)
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / "rankscope" / room, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def _lint(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        LINT,
        cwd=tree,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.processes
def test_the_contracts_hold_and_see_every_module(tree: Path) -> None:
    done = _lint(tree)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = re.search(r"Analyzed (\d+) files", done.stdout)
    assert seen, done.stdout
    files = [*(tree / "rankscope").rglob("*.py")]
    assert int(seen[1]) == len(files) > 150


@pytest.mark.processes
@pytest.mark.parametrize(
    ("importer", "imported", "contract"),
    [
        ("backends/work/state.py", "rankscope.engines.errors", "The rooms"),
        ("backends/stores/base.py", "rankscope.backends.groups", "of backends"),
        ("backends/gloo/library.py", "rankscope.backends.mpi", "of backends"),
        ("backends/messaging/queue.py", "rankscope.backends.mpi", "of backends"),
        ("backends/nccl/progress.py", "rankscope.backends.groups", "of backends"),
        ("backends/gloo/child_main.py", "rankscope.backends.errors", "side process"),
        ("engines/agent/gpus.py", "rankscope.engines.cluster", "packages of engines"),
        ("backends/errors.py", "rankscope.backends.groups", "of backends"),
        (
            "backends/stores/tcp_client.py",
            "rankscope.backends.stores.tcp_server",
            "halves of the TCP store",
        ),
        ("backends/work/state.py", "rankscope.backends.work.work", "No circles"),
    ],
)
def test_an_import_the_wrong_way_is_refused(
    tree: Path, importer: str, imported: str, contract: str
) -> None:
    with (tree / "rankscope" / importer).open("a") as file:
        file.write(f"\nimport {imported}\n")
    done = _lint(tree)
    assert done.returncode == 1, done.stdout + done.stderr
    broken = [line for line in done.stdout.splitlines() if line.endswith("BROKEN")]
    broken += [line for line in done.stdout.splitlines() if " BROKEN (" in line]
    assert any(contract in line for line in broken), done.stdout


def test_the_side_process_needs_the_standard_library_alone() -> None:
    """A library of gloo is loaded by its path."""
    for path in (ROOT / "backends" / "gloo" / "side").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                if node.level:
                    assert node.level == 1, f"{path.name}:{node.lineno}"
                    continue
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                known = name.partition(".")[0] in sys.stdlib_module_names
                assert known, f"{path.name}:{node.lineno} imports {name}"
