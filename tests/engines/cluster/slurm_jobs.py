"""Ranks on the two nodes of a real Slurm, as a notebook starts them: a program.

``slurm_jobs.py FOLDER``, run by `two_hosts.steps_of` as root: the notebook and Slurm's
controller are on the first host, and both are nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from rankscope.backends.conformance.leaks import lives
from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster, ClusterError
from rankscope.widgets.board.model import BoardModel
from tests.engines.cluster import two_hosts
from tests.engines.cluster.ssh_hosts import PLACE, left_by, listening, owners
from tests.engines.cluster.two_hosts import HERE, SUM, THERE, WAIT, Hosts, tell

#: Debian's packages slurmctld, slurmd, slurm-client and munge.
DAEMONS = {
    name: shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    for name in ("munged", "slurmctld", "slurmd", "salloc")
}

#: Of each node. Jobs that take `MOST` do not fit beside each other, others do.
CPUS, MOST = 8, 5
TWO_EACH = ("-N", "2", "--ntasks-per-node", "2", "-t", "10")

CONFIGURATION = """
ClusterName=tests
SlurmctldHost=host-a({here})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
KillWait=2
ReturnToService=2
SchedulerParameters=sched_interval=1
GresTypes=gpu
NodeName=host-a NodeAddr={here} CPUs={cpus} Gres=gpu:2 State=UNKNOWN
NodeName=host-b NodeAddr={there} CPUs={cpus} Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=host-a,host-b Default=YES MaxTime=60 State=UP
"""

#: A notebook whose ranks run a cell: until their job ends, or it is killed.
NOTEBOOK = """
import sys
from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster
with Cluster(slurm=sys.argv[1]) as cluster:
    cell = cluster.execute("import time\\nwhile True: time.sleep(0.1)")
    print(cluster.slurm_job.id, *cluster.pids.values(), flush=True)
    cell.wait(100)
    print(repr(cluster.status().ranks[0].reason), flush=True)
"""

#: A script, as `srun` starts it, without a variable of its own.
HELLO = """
import os, socket
import numpy as np
import rankscope as dist
dist.init_process_group()
x = np.ones(3)
dist.all_reduce(x)
local = os.environ["LOCAL_RANK"]
print(socket.gethostname(), dist.get_rank(), local, int(x[0]), flush=True)
dist.destroy_process_group()
"""
#: The same with torch.
TRAIN = (
    HELLO.replace("import numpy as np", "import torch")
    .replace("import rankscope as dist", "import torch.distributed as dist")
    .replace("init_process_group()", 'init_process_group("gloo")')
    .replace("np.ones", "torch.ones")
)

#: A script of which rank 1 does not come.
HANGS = """
import time
import numpy as np
import rankscope as dist
dist.init_process_group()
dist.barrier()
if dist.get_rank() == 1:
    time.sleep(100)
dist.all_reduce(np.ones(3))
"""

#: A script of which rank 2, on the second host, keeps the others waiting.
LATE = """
import time
import numpy as np
import rankscope as dist
dist.init_process_group()
for step in range(40):
    if dist.get_rank() == 2:
        time.sleep(0.15)
    dist.all_reduce(np.ones(3))
dist.destroy_process_group()
"""

#: A notebook within a job.
INSIDE = """
from rankscope.engines import Cluster
with Cluster(slurm=True) as cluster:
    cluster.execute("import socket; here = socket.gethostname()").result(60)
    print(cluster.slurm_job.id, *cluster.pull("here").values())
"""

#: A notebook within a job, whose ranks mpiexec starts on the nodes.
MPI_INSIDE = f"""
from rankscope.engines import Cluster
with Cluster(hosts="host-a:2,host-b:2", backend="cpu:mpi") as cluster:
    cluster.execute({SUM.format(n=1000)!r}).result(60)
    cluster.execute("import socket; here = socket.gethostname()").result(60)
    print(*cluster.pull("here").values())
"""

#: A notebook on another login node, which ends the ranks of a job.
ELSEWHERE = """
import sys
from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster
cluster = Cluster.attach(slurm=sys.argv[1])
print(*cluster.pull("mine").values())
until(lambda: "left" in cluster.status().allocation, 60, "the time that is left")
print(cluster.status().allocation)
cluster.shutdown()
"""


def why_not() -> str:
    """Return why there can be no such nodes here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root, as whom Slurm's daemons start jobs"
    missing = [name for name, path in DAEMONS.items() if path is None]
    if missing:
        return f"needs {', '.join(missing)}: slurmctld, slurmd, slurm-client, munge"
    return two_hosts.why_not(separate=True)


class Slurm:
    """Its daemons on both hosts, and its commands on this one."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        folder.chmod(0o755)
        for name in ("state", "spool-host-a", "spool-host-b"):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        hosts.know_names(folder)
        values = {"folder": folder, "here": HERE, "there": THERE, "cpus": CPUS}
        (folder / "slurm.conf").write_text(CONFIGURATION.format(**values))
        # Files in the place of devices. Without cgroups, which namespaces do not have.
        for number in range(2):
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        os.environ["PATH"] += ":/usr/sbin"
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        # One munged serves both: its socket is in a folder that they share.
        paths = {
            "socket": "munge.sock",
            "key-file": "munge.key",
            "pid-file": "munged.pid",
            "log-file": "munged.log",
            "seed-file": "munged.seed",
        }
        files = [f"--{option}={folder}/{name}" for option, name in paths.items()]
        self._start("munged", "--foreground", "--force", *files)
        until((folder / "munge.sock").exists, WAIT, "munged")
        self._start("slurmctld", "-D")
        self._start("slurmd", "-D", "-N", "host-a")
        self._start("slurmd", "-D", "-N", "host-b", where=hosts.there)
        until(lambda: self.nodes() == ["idle", "idle"], WAIT, "the nodes")

    def _start(self, name: str, *options: str, where: list[str] | None = None) -> None:
        command = [*(where or ()), str(DAEMONS[name]), *options]
        with (self._folder / f"{name}.output").open("ab") as output:
            one = subprocess.Popen(command, stdout=output, stderr=output)
        self._daemons.append(one)

    @staticmethod
    def nodes() -> list[str]:
        """The states of the nodes."""
        return slurm("sinfo", "-h", "-N", "-o", "%T").split()

    @staticmethod
    def jobs() -> list[str]:
        """The jobs that have not ended, with their states."""
        return slurm("squeue", "-h", "-o", "%i %T").splitlines()

    def close(self) -> None:
        for one in reversed(self._daemons):
            one.terminate()
            one.wait()


def slurm(*command: str) -> str:
    """Run a command of Slurm, and return what it prints."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@contextlib.contextmanager
def nothing_stays() -> Iterator[None]:
    """Check that all processes and jobs end that are started within the block."""
    here = psutil.Process()
    before, jobs = set(here.children(recursive=True)), numbers()
    yield
    until(lambda: numbers() <= jobs, WAIT, "the end of the jobs")
    until(lambda: set(here.children(recursive=True)) <= before, WAIT, "the end here")


def numbers() -> set[str]:
    """The numbers of the jobs that have not ended."""
    return {one.split()[0] for one in Slurm.jobs()}


def ranks() -> None:
    """A start, a restart, an interrupt, and the end."""
    progress: list[str] = []
    began = time.monotonic()
    with nothing_stays():
        with Cluster(
            slurm="-N 2 --ntasks-per-node 2 -t 10", progress=progress.append
        ) as cluster:
            tell("start", seconds=time.monotonic() - began, progress=progress)
            cluster.execute(PLACE).result(WAIT)
            tell("places", ranks=cluster.pull("place"))
            cluster.execute(SUM.format(n=1000)).result(WAIT)
            tell("listening", **listening(hosts, owners(cluster)))
            status = slurm(sys.executable, "-m", "rankscope", "status")
            tell("left", text=cluster.status().allocation, status=status)
            restart(cluster)
            began = time.monotonic()
        tell("end", seconds=time.monotonic() - began)
        with Cluster(slurm="-N 2 --gpus-per-node 2 -t 10") as cluster:
            cluster.execute(PLACE).result(WAIT)
            places = cluster.pull("place")
        with Cluster(3, slurm="-N 2 -t 10") as cluster:
            cluster.execute(PLACE).result(WAIT)
            blocks = cluster.pull("place")
        tell("placed", gpus=places, blocks=blocks)


def restart(cluster: Cluster) -> None:
    """Rank 3 dies, and comes back on its own node in the same job."""
    jobs = numbers()
    cluster.execute("os.kill(os.getpid(), 9)", ranks=[3])
    until(lambda: cluster.status().dead == [3], WAIT, "the death")
    reason = cluster.status().ranks[3].reason
    cluster.restart([3])
    cluster.rebuild()
    cluster.execute(SUM.format(n=1000)).result(WAIT)
    cluster.execute(PLACE).result(WAIT)
    # Another one may have ended meanwhile.
    same = numbers() <= jobs
    tell("restart", reason=reason, ranks=cluster.pull("place"), same=same)


def refused() -> None:
    """What cannot work says so before a rank starts, and leaves nothing."""
    (fake := Path(sys.argv[1], "python-without")).write_text(
        '#!/bin/sh\necho "$0: No module named rankscope" >&2\nexit 1\n'
    )
    fake.chmod(0o755)
    tried: dict[str, dict[str, Any]] = {
        "partition": {"slurm": "-p nowhere"},
        "option": {"slurm": "-N 2 --nodez 2"},
        "ranks": {"slurm": "-N 2 -t 10", "n": 1},
        "python": {"slurm": "-N 2 -t 10", "remote_python": "/nowhere/python"},
        "rankscope": {"slurm": "-N 1 -t 10", "remote_python": str(fake)},
        "no job": {"slurm": True},
    }
    said = {}
    for what, options in tried.items():
        with nothing_stays():
            try:
                Cluster(**options)
            except ClusterError as error:
                said[what] = str(error)
    tell("refused", said=said)


def pending() -> None:
    """A job that has to wait says why; it ends by an interrupt, and with its notebook.

    The last one has its turn.
    """
    large = f"-N 2 -n 2 -c {MOST} -t 10"
    progress: list[str] = []

    def note(text: str) -> None:
        progress.append(text)
        if len(progress) == 4:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        elif len(progress) > 4:
            raise AssertionError(text)

    def turn(text: str) -> None:
        if "pending" in text:
            time.sleep(patience)
            first.stdin.close()

    first = subprocess.Popen(
        ["salloc", *large.split(), "sh", "-c", "echo up; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert first.stdin is not None
    assert first.stdout is not None
    first.stdout.readline()
    interrupted = False
    with nothing_stays():
        try:
            Cluster(slurm=large, progress=note)
        except KeyboardInterrupt:
            interrupted = True
    before = numbers()
    victim = notebook(large)
    until(lambda: numbers() > before, WAIT, "another job")
    victim.kill()
    victim.communicate()
    until(lambda: numbers() == before, WAIT, "the end of the job of the dead notebook")
    patience = 2.0
    with (
        nothing_stays(),
        Cluster(slurm=large, progress=turn, start_timeout=60) as cluster,
    ):
        cluster.execute(SUM.replace("10", "3").format(n=10)).result(WAIT)
    first.wait()
    tell("pending", interrupted=interrupted, progress=progress)


def ended_jobs() -> None:
    """The ranks of a job that is cancelled, or loses a node, name that.

    Also for a notebook that had attached to them.
    """
    before = numbers()
    left_by(slurm="-N 1 -n 1 -t 10", cluster_id="attached")
    attached = Cluster.attach(cluster_id="attached")
    slurm("scancel", *(numbers() - before))
    node = ["scontrol", "update", "nodename=host-b"]
    said = {
        "scancel": ended_by("scancel"),
        "node": ended_by(*node, "state=down", "reason=test"),
    }
    slurm(*node, "state=resume")
    until(lambda: attached.status().dead == [0], WAIT, "the end of the job")
    reason = attached.status().ranks[0].reason
    attached.close()
    tell("ended", said=said, attached=reason)


def ended_by(*command: str) -> dict[str, Any]:
    """Return what is seen where a command ends the job; scancel gets its number."""
    with nothing_stays(), Cluster(slurm="-N 2 -t 10") as cluster:
        assert cluster.slurm_job is not None
        job = cluster.slurm_job.id
        cell = cluster.execute("if rank == 0: dist.barrier()")
        slurm(*command, *([job] if command == ("scancel",) else []))
        until(lambda: cluster.status().dead == [0, 1], WAIT, "the end")
        reasons = [one.reason for one in cluster.status().ranks]
        board = str(BoardModel.of(cluster.status()).banner())
        cell.wait(WAIT)
        again = []
        for repair in (partial(cluster.restart, [0]), cluster.rebuild):
            try:
                repair()
            except ClusterError as error:
                again.append(str(error))
        return {
            "job": job,
            "reasons": reasons,
            "errors": [str(one) for one in cell.errors.values()],
            "text": cluster.status().allocation,
            "again": again,
            "board": board,
        }


def killed() -> None:
    """The end of a notebook that is killed ends its job."""
    before = numbers()
    victim = notebook("-N 2 --ntasks-per-node 2 -t 10")
    assert victim.stdout is not None
    _, *pids = victim.stdout.readline().split()
    processes = [psutil.Process(int(pid)) for pid in pids]
    began = time.monotonic()
    victim.kill()
    victim.communicate()
    until(
        lambda: (
            numbers() <= before and not any(map(psutil.Process.is_running, processes))
        ),
        WAIT,
        "the end of all",
    )
    tell("killed", processes=len(pids), seconds=time.monotonic() - began)


def kept() -> None:
    """A job outlives its notebook; others use it, here and on another host."""
    before = numbers()
    processes = left_by(slurm="-N 2 --ntasks-per-node 2 -t 10")
    (job,) = numbers() - before
    cluster = Cluster.attach(slurm=job)
    found, text = cluster.pull("mine"), cluster.allocation
    cluster.restart([3])
    cluster.rebuild()
    cluster.execute(SUM.format(n=1000) + "\nmine = rank").result(WAIT)
    cluster.close()
    try:
        Cluster.attach(slurm="999")
        unknown = ""
    except ClusterError as error:
        unknown = str(error)
    command = [*hosts.there, sys.executable, "-c", ELSEWHERE, job]
    away = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    until(
        lambda: numbers() <= before and not any(map(lives, processes)),
        WAIT,
        "the end of all",
    )
    tell("kept", found=found, text=text, away=away, unknown=unknown, job=job)


def inside() -> None:
    """A notebook in a job takes its nodes, and leaves the job as it was.

    As `mpiexec` does; and scripts find their ranks in their steps.
    """
    script = Path(sys.argv[1], "hello.py")
    script.write_text(HELLO)
    torch = Path(__file__).parents[3] / ".venv-torch" / "bin" / "python"
    steps = [
        'echo $SLURM_JOB_ID; "$0" -c "$1"; squeue -h -j $SLURM_JOB_ID -o "%i %T"',
        'echo mpi; "$0" -c "$2"',
        'echo script; srun "$0" "$3"',
    ]
    if torch.exists():
        train = Path(sys.argv[1], "train.py")
        train.write_text(TRAIN)
        steps.append(f"echo torch; srun {torch} -m rankscope.torch {train}")
    ran = slurm(
        *("salloc", *TWO_EACH),
        *("sh", "-c", "; ".join(steps), sys.executable),
        *(INSIDE, MPI_INSIDE, str(script)),
    )
    tell("inside", said=ran.splitlines(), torch=torch.exists())


def hanging() -> None:
    """``--jobs`` finds the ranks of a step on this host, and why they hang."""
    script = Path(sys.argv[1], "hangs.py")
    script.write_text(HANGS)
    found: list[dict[str, Any]] = []

    def look() -> bool:
        said = slurm(sys.executable, "-m", "rankscope", "diagnose", "--jobs", "--json")
        jobs = json.loads(said)["jobs"] if said else ()
        found[:] = [one for one in jobs if [*one["command"][1:]] == [str(script)]]
        return any(one["verdicts"] for one in found)

    before = numbers()
    with nothing_stays():
        step = subprocess.Popen(
            ["srun", *TWO_EACH, sys.executable, str(script)],
            stderr=subprocess.DEVNULL,
            # The tests turn off what the ranks record for others.
            env={**os.environ, "RANKSCOPE_REPORT": str(script.with_name("report"))},
        )
        until(look, WAIT, "the verdict")
        slurm("scancel", *(numbers() - before))
        step.wait()
    (job,) = found
    tell(
        "hanging",
        launcher=job["launcher"],
        ranks=[one["rank"] for one in job["processes"]],
        verdicts=[(one["culprits"], one["text"]) for one in job["verdicts"]],
    )


def late() -> None:
    """What the ranks of both hosts say at their end of who kept the others waiting."""
    script = Path(sys.argv[1], "late.py")
    script.write_text(LATE)
    with nothing_stays():
        step = subprocess.run(
            ["srun", *TWO_EACH, sys.executable, str(script)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "RANKSCOPE_REPORT": str(script.with_name("report"))},
        )
    tell("late", said=[x for x in step.stderr.splitlines() if "rankscope" in x])


def notebook(options: str) -> subprocess.Popen[str]:
    """Start a notebook with ranks of its own job."""
    command = [sys.executable, "-c", NOTEBOOK, options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    hosts = Hosts(separate=True)
    daemons = Slurm(hosts, Path(sys.argv[1]))
    try:
        # Slurm looks for jobs at their time limit every half minute.
        limited = notebook("-N 1 -n 2 -t 10 -w host-a")
        assert limited.stdout is not None
        job = limited.stdout.readline().split()[0]
        slurm("scontrol", "update", f"jobid={job}", "EndTime=now")
        before = numbers()
        abandoned = left_by(slurm="-N 1 -n 1 -t 10 -w host-b", cluster_id="abandoned")
        slurm("scancel", *(numbers() - before))
        for step in (ranks, refused, pending, inside, hanging, late, killed, kept):
            step()
        tell("limit", said=limited.communicate(timeout=WAIT)[0].strip(), job=job)
        ended_jobs()
        until(lambda: not any(map(lives, abandoned)), WAIT, "the end of all")
        tell("abandoned", processes=len(abandoned))
    finally:
        daemons.close()
        hosts.close()
