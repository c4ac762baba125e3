"""Two steps of Slurm whose numbers lead to one port, and scripts of torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

SCRIPT = """
from datetime import timedelta
import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
x = torch.ones(1)
dist.all_reduce(x)
print(f"rank {dist.get_rank()}: {x.item():g}")
dist.destroy_process_group()
"""


def test_a_rank_of_another_step_is_in_no_group_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 of step 101.0 finds rank 0 of step 100.31, whose rank 1 is late."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def start(job: int, step: int, rank: int) -> subprocess.Popen[str]:
        env = {
            "SLURM_JOB_ID": str(job),
            "SLURM_STEP_ID": str(step),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NODEID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_STEP_TASKS_PER_NODE": "2",
        }
        return subprocess.Popen(
            [sys.executable, "-m", "rankscope.torch", str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )

    started = [start(100, 31, 0), start(101, 0, 1)]
    try:
        _, why = started[1].communicate(timeout=100)
        started.append(start(100, 31, 1))
        said = [started[one].communicate(timeout=100)[0] for one in (0, 2)]
    finally:
        for one in started:
            one.kill()
            one.wait()
    assert (
        "at 127.0.0.1:23131 are ranks of Slurm's step 100.31, and this one is of step "
        "101.0" in why
    )
    assert [text.splitlines()[-1:] for text in said] == [["rank 0: 2"], ["rank 1: 2"]]
    assert [one.returncode for one in started] == [0, 1, 0]
