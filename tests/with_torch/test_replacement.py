"""``rankscope.run`` replaces ranks of a training that die, rank 0 among them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

BEGIN = """
import os, sys, time, torch
import torch.distributed as dist
import rankscope, rankscope.torch
sys.path.insert(0, sys.argv[1])
import backend_training as training
dist.init_process_group("rankscope")
rank, fresh = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
"""


def run(folder: Path, code: str, *options: str) -> tuple[int, str, str]:
    """Run a script; return the exit status, stdout and stderr."""
    script = folder / "train.py"
    script.write_text(BEGIN + dedent(code))
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore::FutureWarning", "-m", "rankscope.run"),
            *(*options, str(script), str(Path(__file__).parent)),
        ],
        env={**os.environ, "RANKSCOPE_REPORT": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_training_goes_on_with_fresh_ranks(tmp_path: Path) -> None:
    """Rank 1 dies before DDP has its final buckets, and then rank 0, the first."""
    code = """
    pair = dist.new_group([0, 1])
    model = training.DistributedDataParallel(training.Net(), bucket_cap_mb=0.01)
    with_graph = training.DistributedDataParallel(training.Net(), static_graph=True)
    both = torch.nn.ModuleList([model, with_graph])
    optimizer = training.adam(both)
    objects = id(model), id(model.process_group), id(pair)
    victims = {1: 1, 5: 0}
    step, joined = 0, False
    while step < 9:
        try:
            if not joined:
                step, joined = rankscope.torch.rejoin(both, optimizer), True
            if victims.get(step) == rank and not fresh:
                os.kill(os.getpid(), 9)
            optimizer.zero_grad()
            x = training.own(step)
            (model(x).pow(2).mean() + with_graph(x).pow(2).mean()).backward()
            optimizer.step()
            step += 1
        except rankscope.DistAbortedError as error:
            print(f"step {step}: {error.reason}", error.culprits)
            rankscope.torch.rebuild(120)
            joined = False
    assert objects == (id(model), id(model.process_group), id(pair))
    x = torch.ones(1)
    if rank < 2:
        dist.all_reduce(x, group=pair)
        assert x.item() == 2
    later = dist.new_group([0, 1, 2])
    flat = torch.cat([one.detach().flatten() for one in both.parameters()])
    found = [torch.empty_like(flat) for _ in range(3)]
    dist.all_gather(found, flat, group=later)
    assert all(torch.equal(one, flat) for one in found)
    for one in model, with_graph:
        assert training.difference(one.module, 9) <= 1e-6
    dist.destroy_process_group()
    print("trained")
    """
    status, out, err = run(tmp_path, code, "-n", "3", "--max-restarts", "1")
    assert status == 0, err
    assert out.count("trained") == 3
    for step, victim, others in (1, 1, (0, 2)), (5, 0, (1, 2)):
        for rank in others:
            assert re.search(
                rf"\[rank {rank}\] step {step}: rank {victim} \(process \d+ on .*\) is "
                rf"gone: killed by SIGKILL \({victim},\)",
                out,
            ), out
    assert err.count("killed by SIGKILL after") == 2


def test_a_fresh_rank_that_does_not_rejoin_is_named(tmp_path: Path) -> None:
    code = """
    x = torch.ones(1)
    dist.all_reduce(x)
    if rank == 1:
        os.kill(os.getpid(), 9)
    try:
        dist.all_reduce(x)
    except rankscope.DistAbortedError:
        rankscope.torch.rebuild(120)
        rankscope.torch.rejoin(torch.nn.Linear(2, 2))
    """
    status, _, err = run(tmp_path, code, "-n", "2", "--max-restarts", "1")
    assert status == 1
    assert (
        "all_reduce: rank 1 was started again, and the others wait for it in "
        "rankscope.torch.rejoin(model, optimizer)" in err
    )
    assert "failed: rank 1 (pid " in err.splitlines()[-1]
