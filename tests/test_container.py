"""The Dockerfile and the devcontainer name what is there; nothing builds them here."""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


@pytest.fixture
def devcontainer() -> dict[str, Any]:
    path = ROOT / ".devcontainer" / "devcontainer.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_the_python_is_the_one_that_the_suite_runs_on() -> None:
    (version,) = re.findall(r"^FROM python:([\d.]+)-slim$", DOCKERFILE, re.MULTILINE)
    assert version == (ROOT / ".python-version").read_text().strip()


def test_the_extras_are_there() -> None:
    (extras,) = re.findall(r"pip install .*'\.\[(.*)\]'", DOCKERFILE)
    known = metadata("rankscope").get_all("Provides-Extra") or []
    assert set(extras.split(",")) <= set(known)


def test_what_the_notebooks_import_is_there() -> None:
    """Without torch, whose notebooks an image would need gigabytes for."""
    text = "".join(map(Path.read_text, (ROOT / "notebooks").glob("*.ipynb")))
    imported = {*re.findall(r'^ *"(?:import|from) (\w+)', text, re.MULTILINE)}
    own = {"rankscope", "rankscope_dummy", "torch", "IPython"}
    others = imported - own - sys.stdlib_module_names
    (installed,) = re.findall(r"pip install ((?:.*\\\n)*.*)", DOCKERFILE)
    assert "scipy" in others
    assert others <= {*installed.split()}


@pytest.mark.processes
def test_it_opens_the_first_notebook() -> None:
    """The address that JupyterLab prints is that of the notebook."""
    # Its import takes long, and runs Node.
    from jupyterlab.labapp import LabApp  # type: ignore[import-untyped]

    (line,) = re.findall(r"^CMD (\[.*?\])$", DOCKERFILE, re.MULTILINE | re.DOTALL)
    program, lab, *options = json.loads(line.replace("\\\n", ""))
    assert (program, lab) == ("jupyter", "lab")
    given = dict(one.removeprefix("--").split("=") for one in options if "=" in one)
    notebook = given.pop("LabApp.default_url").removeprefix("/lab/tree/")
    assert "default_url" in LabApp.class_trait_names()
    assert (ROOT / notebook).is_file()
    flags = {one.removeprefix("--") for one in options if "=" not in one}
    assert given.keys() | flags <= {*LabApp.aliases, *LabApp.flags}


def test_the_devcontainer_is_made_of_it(devcontainer: dict[str, Any]) -> None:
    folder = ROOT / ".devcontainer"
    build = devcontainer["build"]
    assert (folder / build["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert (folder / build["context"]).resolve() == ROOT
    assert f"useradd --create-home --uid 1000 {devcontainer['remoteUser']}" in (
        DOCKERFILE
    )
    # JupyterLab as process 1 reaps nothing that a kernel has left.
    assert devcontainer["init"] is True
    assert "docker run --init " in DOCKERFILE
    # What serves the port is the command of the image, on the person's own files.
    assert devcontainer["overrideCommand"] is False
    assert f"WORKDIR {devcontainer['workspaceFolder']}\n" in DOCKERFILE
    for port in devcontainer["forwardPorts"]:
        assert f"EXPOSE {port}\n" in DOCKERFILE
    for path in devcontainer["customizations"]["codespaces"]["openFiles"]:
        assert (ROOT / path).is_file()
