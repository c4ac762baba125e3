"""Install packages as pip would, by uv: ``python -m tools.install REQUIREMENT...``.

uv takes a tenth of the time, and keeps what it has unpacked for the next environment.
It does not read the settings of pip: those that say where packages come from are passed
on. Where uv fails, as at an index that asks for a password, pip installs.
`tools/environment.sh` runs this first of all: it imports the standard library alone.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

__all__ = ["install", "options"]

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
#: What pip's settings and uv's options both have.
_SHARED = ("index-url", "extra-index-url", "find-links", "constraint")
#: The sections of pip's settings; a later one wins.
_SECTIONS = ("global", "install", ":env:")


def install(
    arguments: Sequence[str | Path], python: str | Path = sys.executable
) -> None:
    """Install into the environment of `python` what `arguments` name.

    Raises
    ------
    subprocess.CalledProcessError
        uv could not, nor could pip, whose words are in ``stderr``.
    """
    if find_spec("uv") is None:
        subprocess.run([*PIP, "install", "--quiet", "uv>=0.5"], check=False)
    listed = subprocess.run(
        [*PIP, "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    uv = [
        *(sys.executable, "-m", "uv", "--quiet", "pip", "install"),
        # As pip: the best version of all indexes.
        *("--python", python, "--index-strategy", "unsafe-best-match"),
        *options(listed.splitlines()),
        *arguments,
    ]
    if subprocess.run(uv, capture_output=True, check=False).returncode != 0:
        pip = [*PIP, "--python", python, "install", "--quiet", *arguments]
        subprocess.run(pip, capture_output=True, text=True, check=True)


def options(listed: Iterable[str]) -> list[str]:
    """Return options of uv for the lines of ``pip config list``."""
    found: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in listed:
        section, _, setting = line.partition(".")
        name, _, value = setting.partition("=")
        if section in found and name in _SHARED:
            found[section][name] = ast.literal_eval(value)
    settings = {k: v for section in _SECTIONS for k, v in found[section].items()}
    # One line may have several values.
    return [
        part
        for name, value in settings.items()
        for each in value.split()
        for part in (f"--{name}", each)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.install", allow_abbrev=False)
    parser.add_argument("--python", default=sys.executable)
    chosen, arguments = parser.parse_known_args()
    try:
        install(arguments, chosen.python)
    except subprocess.CalledProcessError as error:
        print(error.stderr, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
