"""Install commands: what works for a Rankscope from an index, a checkout, a URL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rankscope.backends import install


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        (None, "'rankscope[mpi]'"),
        ({"url": "file://{folder}", "dir_info": {}}, "'{folder}[mpi]'"),
        (
            {"url": "file://{folder}", "dir_info": {"editable": True}},
            "-e '{folder}[mpi]'",
        ),
        # A wheel, and a checkout that is gone.
        (
            {"url": "file:///x/rankscope-1.0-py3-none-any.whl", "archive_info": {}},
            "'rankscope[mpi] @ file:///x/rankscope-1.0-py3-none-any.whl'",
        ),
        (
            {
                "url": "https://example.org/rankscope.git",
                "vcs_info": {"vcs": "git", "commit_id": "c0ffee"},
            },
            "'rankscope[mpi] @ git+https://example.org/rankscope.git@c0ffee'",
        ),
    ],
)
def test_an_extra_is_installed_from_where_rankscope_came(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    origin: dict[str, object] | None,
    requirement: str,
) -> None:
    (tmp_path / "pyproject.toml").touch()
    text = json.dumps(origin).replace("{folder}", str(tmp_path))
    found = install.read_origin(text) if origin else ("", False)
    monkeypatch.setattr(install, "_origin", lambda: found)
    wanted = requirement.replace("{folder}", str(tmp_path))
    assert install.with_extra("mpi") == wanted
    assert install.pip_install(wanted).endswith(f"pip install {wanted}")


def test_an_environment_of_uv_has_no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "find_spec", lambda name: None)
    assert install.pip_install("torch") == "uv pip install torch"
