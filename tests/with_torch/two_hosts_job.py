"""A script's job on two hosts of one machine, seen from a notebook on the first.

``two_hosts_job.py FOLDER`` makes the hosts, as `tests.engines.cluster.two_hosts` does.
Ranks 0 and 1 are on the first host, ranks 2 and 3 on the second. What is seen is
printed as a line of JSON for each step.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from rankscope.backends.conformance.waiting import until
from rankscope.engines import Job
from rankscope.engines.script.meeting import TIMEOUT
from tests.engines.cluster.two_hosts import HERE, Hosts, tell
from tests.with_torch.scripts import verdict, waiting

WAIT = 90
PORT = 29400

SCRIPT = """
import os, time
from pathlib import Path
import rankscope.torch
rankscope.torch.watch()
import torch
import torch.distributed as dist
folder = Path(os.environ["TEST_FOLDER"])
def wait(name):
    while not (folder / name).exists():
        time.sleep(0.01)
dist.init_process_group("gloo")
x, rank = torch.ones(4), dist.get_rank()
dist.all_reduce(x)
if rank == 3:
    wait("never")
try:
    dist.all_reduce(x)
except RuntimeError as error:
    (folder / f"error.{rank}").touch()
wait("never")
"""


def agent(place: int, where: list[str], folder: Path, output: int) -> subprocess.Popen:
    """Start torchrun on a host."""
    return subprocess.Popen(
        [
            *where,
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
            *("--node-rank", str(place), "--nproc-per-node", "2"),
            *("--master-addr", HERE, "--master-port", str(PORT)),
            str(folder / "train.py"),
        ],
        env={
            **os.environ,
            "TEST_FOLDER": str(folder),
            "GLOO_SOCKET_IFNAME": ("cable-a", "cable-b")[place],
            "RANKSCOPE_HOST": HERE,
            "RANKSCOPE_ALLOW_ABORT": "1",
            "OMP_NUM_THREADS": "1",
        },
        stdout=output,
        stderr=subprocess.STDOUT,
    )


def main(folder: Path) -> None:
    """Start the job, look at it, hang, stop and kill ranks of the second host."""
    (folder / "train.py").write_text(SCRIPT)
    log = folder / "output"
    hosts = Hosts()
    agents = []
    try:
        with log.open("w") as output:
            for place, where in enumerate(([], hosts.there)):
                agents.append(agent(place, where, folder, output.fileno()))
        printed = until(
            lambda: re.search(r"%dist_attach (\S+) --key (\w+)", log.read_text()), WAIT
        )
        assert printed is not None
        with Job.attach(printed[1], printed[2]) as job:
            watch(job, folder)
    except BaseException:
        sys.stderr.write(log.read_text())
        raise
    finally:
        for one in agents:
            one.terminate()
        for one in agents:
            one.wait()
        hosts.close()


def watch(job: Job, folder: Path) -> None:
    """Tell what the notebook sees of each step."""
    until(lambda: waiting(job, 0, 1, 2), WAIT, "ranks 0 to 2 wait")
    status = job.status(fresh=True)
    tell("seen", hosts=[one.host for one in status.ranks])
    found = verdict(job)
    tell("hang", culprits=found.culprits, text=str(found))
    pid = status.ranks[3].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        stopped = until(
            lambda: [one for one in job.diagnose() if "not answered" in str(one)], WAIT
        )
        tell("stopped", text=str(stopped[0]))
        # Longer than a request to the job's channel may take.
        until(lambda: (job.status().ranks[3].heartbeat_age or 0) > TIMEOUT + 2, WAIT)
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: "has not entered" in str(job.diagnose()), WAIT, "the rank's answer")
    tell("continued", age=job.status(fresh=True).ranks[3].heartbeat_age)
    tell("aborted", ranks=sorted(job.abort("default_pg")))
    errors = [folder / f"error.{rank}" for rank in range(3)]
    until(lambda: all(one.exists() for one in errors), WAIT, "the errors")
    os.kill(pid, signal.SIGKILL)
    until(lambda: 3 in job.status(fresh=True).dead or job.closed, WAIT, "the death")
    tell("killed", why=job.status().ranks[3].reason, ended=job.ended)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
