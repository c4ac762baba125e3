"""The environment of ``make test-torch``: its versions, and that torch is optional."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed

from tools.other_environments import TORCH


def test_the_environment_has_torch_with_gloo() -> None:
    # `.venv-torch-2.14.1` is that of ``make test-torch TORCH=2.14.1``.
    version = Path(sys.prefix).name.removeprefix(".venv-torch").removeprefix("-")
    assert torch.__version__.partition("+")[0] == (version or TORCH)
    assert torch.distributed.is_gloo_available()


def test_rankscope_does_not_import_torch() -> None:
    script = (
        "import sys, rankscope, rankscope.magics, rankscope.engines\n"
        "import rankscope.engines.agent.agent, rankscope.widgets.board.widget\n"
        "rankscope.init_process_group\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"
