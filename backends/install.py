"""Commands that install what is missing, as this Rankscope was itself installed."""

from __future__ import annotations

import json
import shlex
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["pip_install", "read_origin", "with_extra"]


def pip_install(*requirements: str) -> str:
    """Return the command for `requirements`, which are quoted for a shell already."""
    return f"{_installer()} install {' '.join(requirements)}"


def with_extra(extra: str) -> str:
    """Return the requirement of this Rankscope with `extra`, quoted for a shell.

    A Rankscope from a checkout, or from a repository, is on no package index: its name
    alone would install nothing, or something else.
    """
    url, editable = _origin()
    if not url:
        return shlex.quote(f"rankscope[{extra}]")
    folder = unquote(urlsplit(url).path) if url.startswith("file:") else ""
    if folder and Path(folder, "pyproject.toml").is_file():
        return f"{'-e ' * editable}{shlex.quote(f'{folder}[{extra}]')}"
    return shlex.quote(f"rankscope[{extra}] @ {url}")


@cache
def _origin() -> tuple[str, bool]:
    """Return the URL that Rankscope was installed from, ``""`` for an index."""
    from importlib import metadata  # takes 15 ms, for a message

    for found in metadata.distributions(name="rankscope"):
        # The metadata that setuptools leaves in a checkout has none: look on.
        text = found.read_text("direct_url.json")
        if text is not None:
            return read_origin(text)
    return "", False


def read_origin(text: str) -> tuple[str, bool]:
    """Return the URL in a ``direct_url.json`` (PEP 610), and whether it is editable."""
    origin = json.loads(text)
    url, vcs = str(origin["url"]), origin.get("vcs_info")
    if vcs is not None:
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return url, bool(origin.get("dir_info", {}).get("editable"))


def _installer() -> str:
    """Return ``uv pip`` in an environment that uv made, which has no pip."""
    return "pip" if find_spec("pip") is not None else "uv pip"
