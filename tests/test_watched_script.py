"""``python -m rankscope.torch``: how the script ends is known to the other ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rankscope import torch
from rankscope.backends.errors import DistNetworkError
from rankscope.backends.groups.world import world


def test_the_line_that_ends_a_script_is_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("end_with_launcher", "fill_environment", "watch"):
        monkeypatch.setattr(torch, name, lambda **_: None)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(world, "exit_line", "")
    script = tmp_path / "train.py"
    script.write_text("import sys\ndef stop():\n    sys.exit(3)\nstop()\n")
    with pytest.raises(SystemExit, match="3"):
        torch.main([str(script)])
    assert world.exit_line == "train.py:3"


def test_the_port_of_a_step_that_another_one_has_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("end_with_launcher", "fill_environment", "watch"):
        monkeypatch.setattr(torch, name, lambda **_: None)
    monkeypatch.setattr(torch, "why_port_is_taken", lambda: "port 20031 is taken")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "train.py"
    script.write_text('raise RuntimeError("cannot listen: name: EADDRINUSE")\n')
    with pytest.raises(DistNetworkError, match="^port 20031 is taken$"):
        torch.main([str(script)])
