"""Ranks on two hosts, one of them reached by ssh and a real sshd: a program.

``ssh_hosts.py FOLDER``, run by `two_hosts.steps_of` as root: the notebook and ranks 0
and 1 are on the first host, ranks 2 and 3 on the second.
With the path of a notebook as second argument that is executed, and nothing else.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from rankscope.backends.conformance.leaks import lives
from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster, ClusterStartError
from tests.engines.cluster import two_hosts
from tests.engines.cluster.two_hosts import HERE, SUM, THERE, WAIT, Hosts, silent, tell

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

#: The environment in which a rank was started.
PLACE = """
import os, socket
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
place = socket.gethostname(), *(os.environ[name] for name in names)
"""

#: Runs until a file is there.
AWAITS = "import os, time\nwhile not os.path.exists({file!r}): time.sleep(0.05)\n"

#: Seconds for which a notebook sleeps, after which it gives up its hosts, and for which
#: the cable is out at least.
ASLEEP, LOST_AFTER, CUT = 3.0, 8.0, 20.0
#: A notebook on a laptop that sleeps, and loses its host afterwards.
LAPTOP = """
import sys, time
from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster
python, lost_after, cell = sys.argv[1:]
with Cluster(
    hosts="host-b:2", remote_python=python, lost_after=float(lost_after)
) as cluster:
    running = cluster.execute(cell)
    print("runs", flush=True)
    running.result(60)
    print("goes on", flush=True)
    until(lambda: cluster.status().dead == [0, 1], 60, "the loss")
    print(cluster.status().ranks[0].reason, flush=True)
"""

#: Prints to which of the ports of a host one can connect, and what listens on this one.
SCAN = """
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), 5).close()
    except OSError:
        continue
    print(port)
"""
LISTENERS = """
import psutil
for one in psutil.net_connections("tcp"):
    if one.status == psutil.CONN_LISTEN:
        print(one.laddr.ip, one.laddr.port, one.pid)
"""

#: A notebook that is killed: at a line of the start's or a restart's progress, or while
#: a cell runs; given the options of its ranks.
VICTIM = """
import json, os, sys
from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster
state, options = sys.argv[1], json.loads(sys.argv[2])
def progress(text):
    if text.startswith(state):
        os.kill(os.getpid(), 9)
with Cluster(progress=progress, **options) as cluster:
    if state == "restart":
        state = "1 of 1 engines"
        cluster.restart([1], progress=progress)
    cells = {
        "loop": "import time\\nwhile True: time.sleep(0.1)",
        "hang": "if rank: dist.barrier()",
    }
    cell = cluster.execute(cells[state])
    until(lambda: cluster.status().ranks[1].busy, 60, "the cell")
    os.kill(os.getpid(), 9)
"""
#: What the processes of a victim have in their environment.
MARK = "RANKSCOPE_TESTS_VICTIM"
#: States in which a notebook is killed; in the first ones also one whose ranks are to
#: outlive it.
STARTING = ("host-b: conn", "starting 3", "making")
RUNNING = ("loop", "hang", "restart")

#: A notebook that is killed, and keeps its ranks; given by name the options of these.
#: One that was forked from it, as by multiprocessing, sees the end of the controller.
KEEPER = """
import json, os, select, sys
from rankscope.engines import Cluster
cluster = Cluster(keep=True, **{"cluster_id": "kept", **json.loads(sys.argv[1])})
cluster.execute("mine = rank * 100").result(60)
pids = [*(one.pid for one in cluster._launched.processes()), *cluster.pids.values()]
if os.fork() == 0:
    os.closerange(0, 3)
    select.select([os.pidfd_open(cluster._launched.controller_pid)], [], [], 300)
    os._exit(0)
print(json.dumps(pids), flush=True)
os.kill(os.getpid(), 9)
"""

#: A notebook with ranks of mpiexec, which runs a cell on them.
MPI = """
import json, sys, time
from rankscope.engines import Cluster
cluster = Cluster(hosts="host-a:2,host-b:2", backend="cpu:mpi")
cluster.execute(sys.argv[1]).result(60)
found = [cluster.pull("place"), *(one.pid for one in cluster._launched.processes())]
print(json.dumps([*found, *cluster.pids.values()]), flush=True)
time.sleep(1000)
"""


def why_not() -> str:
    """Return why there can be no such hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root, as whom sshd lets root in"
    if SSHD is None or shutil.which("ssh") is None:
        return "needs ssh and sshd: openssh-client, openssh-server"
    return two_hosts.why_not(separate=True)


class Sshd:
    """The second host's sshd, and an ssh on PATH that logs in there by a key."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        for name in ("login", "host"):
            file = str(folder / name)
            key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file]
            subprocess.run(key, check=True)
        hosts.know_names(folder)
        public = (folder / "host.pub").read_text()
        (folder / "known").write_text(f"host-b {public}")
        Path("/run/sshd").mkdir(exist_ok=True)
        two_hosts.run(
            *hosts.there, "mount", "-t", "tmpfs", "-omode=755", "t", "/run/sshd"
        )
        # Where a login without rights can read it, too.
        two_hosts.run(*hosts.there, "cp", str(folder / "login.pub"), "/run/sshd")
        (folder / "sshd_config").write_text(
            f"HostKey {folder}/host\nAuthorizedKeysFile /run/sshd/login.pub\n"
            "StrictModes no\nUsePAM no\nPidFile none\nPasswordAuthentication no\n"
            "PermitRootLogin prohibit-password\nMaxStartups 100\n"
            # For mpiexec, which runs this Python there.
            f"SetEnv PYTHONPATH={os.environ['PYTHONPATH']}\n"
        )
        (folder / "config").write_text(
            f"Host host-b strange closed\n  HostName {THERE}\n"
            "Host closed\n  Port 23\nHost host-b *@host-b\n  HostKeyAlias host-b\n"
            f"Host *\n  User root\n  IdentityFile {folder}/login\n"
            f"  UserKnownHostsFile {folder}/known\n  GlobalKnownHostsFile /dev/null\n"
            "  IdentitiesOnly yes\n  HashKnownHosts no\n  UpdateHostKeys no\n"
            "  CheckHostIP no\n"
        )
        ssh = shutil.which("ssh")
        self.program(folder / "ssh", f'exec {ssh} -F {folder}/config "$@"')
        path = shlex.quote(os.environ["PYTHONPATH"])
        #: What ``remote_python`` is to be: the code that is tested.
        self.python = str(folder / "python")
        # As of a login that says something, and sets the title of a terminal.
        said = "echo '{\"welcome\": 1}'; printf title"
        python = f'PYTHONPATH={path} exec {sys.executable} "$@"'
        self.program(folder / "python", f"{said}; {python}")
        os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
        assert SSHD is not None
        self._sshd = subprocess.Popen(
            [
                *hosts.there,
                SSHD,
                "-D",
                "-f",
                folder / "sshd_config",
                "-E",
                folder / "log",
            ]
        )
        until(self._answers, WAIT, "sshd")

    @staticmethod
    def program(path: Path, line: str) -> None:
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o700)

    @staticmethod
    def _answers() -> bool:
        there = ["ssh", "-oBatchMode=yes", "host-b", "true"]
        return subprocess.run(there, capture_output=True, check=False).returncode == 0

    def processes(self) -> list[psutil.Process]:
        """What runs for those who are logged in."""
        return psutil.Process(self._sshd.pid).children(recursive=True)

    def close(self) -> None:
        self._sshd.terminate()
        self._sshd.wait()


@contextmanager
def nothing_stays(sshd: Sshd) -> Iterator[None]:
    """Check that all processes end that are started within the block."""
    here = psutil.Process()
    before = set(here.children(recursive=True))
    yield
    until(lambda: not sshd.processes(), WAIT, "the end on the second host")
    until(lambda: set(here.children(recursive=True)) <= before, WAIT, "the end here")


def ranks(sshd: Sshd) -> None:
    """A start, a death, a restart, an interrupt, a cut, and the end."""
    progress: list[str] = []
    began = time.monotonic()
    with nothing_stays(sshd):
        with Cluster(
            hosts="host-a:2,host-b:2",
            remote_python=sshd.python,
            progress=progress.append,
        ) as cluster:
            tell("start", seconds=time.monotonic() - began, progress=progress)
            cluster.execute(PLACE).result(WAIT)
            tell("places", ranks=cluster.pull("place"))
            cluster.execute(SUM.format(n=1000)).result(WAIT)
            tell("listening", **listening(hosts, owners(cluster)))
            restart(cluster)
            interrupt(cluster)
            cut(cluster, sshd)
            began = time.monotonic()
        tell("end", seconds=time.monotonic() - began)


def listening(hosts: Hosts, owners: Mapping[int, str]) -> dict[str, Any]:
    """What listens on both hosts, and to what of it the other one can connect.

    Each is an address and whose it is: of `owners` by pid, or else a program's name.
    The namespaces have no listeners but ours.
    """
    found: dict[str, Any] = {}
    ends = {"here": ((), hosts.there, HERE), "there": (hosts.there, (), THERE)}
    for name, (on, other, address) in ends.items():
        there = _printed(*on, sys.executable, "-c", LISTENERS)
        listeners = {}
        for line in there.splitlines():
            at, port, pid = line.split()
            owner = owners.get(int(pid)) or psutil.Process(int(pid)).name()
            listeners[port] = (at, owner)
        scan = _printed(*other, sys.executable, "-c", SCAN, address, *listeners)
        found[name] = sorted({*listeners.values()})
        found[f"reached {name}"] = sorted({listeners[one] for one in scan.split()})
    return found


def owners(cluster: Cluster) -> dict[int, str]:
    """Whose the processes of a cluster are, by pid."""
    assert cluster._launched is not None
    pid = cluster._launched.controller_pid
    assert pid is not None
    controller = {pid, *(one.pid for one in psutil.Process(pid).children(True))}
    return {
        **dict.fromkeys(controller, "controller"),
        **{pid: f"rank {rank}" for rank, pid in cluster.pids.items()},
    }


def _printed(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def restart(cluster: Cluster) -> None:
    """Rank 3 dies, and comes back on its own host; ranks 1 and 2 at once."""
    cluster.execute("os.kill(os.getpid(), 11)", ranks=[3])
    until(lambda: cluster.status().dead == [3], WAIT, "the death")
    reason = cluster.status().ranks[3].reason
    for chosen in ([3], [1, 2]):
        cluster.restart(chosen)
        cluster.rebuild()
        cluster.execute(SUM.format(n=1000)).result(WAIT)
    cluster.execute(PLACE).result(WAIT)
    tell("restart", reason=reason, ranks=cluster.pull("place"))


def interrupt(cluster: Cluster) -> None:
    """A signal to the notebook's group, as of a terminal, does not reach ssh."""
    cell = cluster.execute("import time\nwhile True: time.sleep(0.01)")
    until(lambda: all(one.busy for one in cluster.status().ranks), WAIT, "the cell")
    cluster.interrupt()
    ended = cell.wait(WAIT)
    assert cluster._launched is not None
    groups = {os.getpgid(one.pid) for one in cluster._launched.fork_servers()}
    tell(
        "interrupt",
        ended=ended,
        errors=sorted({error.ename for error in cell.errors.values()}),
        apart=os.getpgid(0) not in groups,
    )


def cut(cluster: Cluster, sshd: Sshd) -> None:
    """The cable is out until a notebook that has slept gives up its host, and back.

    A cluster that is kept has lost all its hosts then.
    """
    morning, joined = (str(Path(sshd.python).with_name(n)) for n in ("woken", "joined"))
    laptop = subprocess.Popen(
        [
            *(sys.executable, "-c", LAPTOP, sshd.python, str(LOST_AFTER)),
            AWAITS.format(file=morning) + "dist.barrier()",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert laptop.stdout is not None
    said = [laptop.stdout.readline()]
    process = psutil.Process(laptop.pid)
    asleep = [process, *process.children(recursive=True)]
    for one in asleep:
        one.suspend()
    time.sleep(ASLEEP)
    for one in asleep:
        one.resume()
    Path(morning).touch()
    said.append(laptop.stdout.readline())

    kept = left_by(
        hosts="host-b:1",
        remote_python=sshd.python,
        lost_after=LOST_AFTER,
        cluster_id="lost",
    )
    kept_alive = all(map(lives, kept))
    cell = cluster.execute(AWAITS.format(file=joined) + SUM.format(n=1000))
    hosts.cable.up = False
    began = time.monotonic()
    until(lambda: silent(cluster) == [2, 3], WAIT, "the silence")
    lost = laptop.communicate(timeout=WAIT)[0]
    until(lambda: not any(map(lives, kept)), WAIT, "the end of what was kept")
    until(lambda: time.monotonic() > began + CUT, WAIT, "the end of the cut")
    dead = cluster.status().dead
    hosts.cable.up = True
    Path(joined).touch()
    cell.result(WAIT)
    tell("cut", dead=dead, slept=said, lost=lost, kept=[kept_alive, len(kept)])


def refused(sshd: Sshd) -> None:
    """What cannot work says what to do, and leaves nothing."""
    (fake := Path(sshd.python).with_name("python-without")).write_text(
        '#!/bin/sh\necho "$0: No module named rankscope" >&2\nexit 1\n'
    )
    fake.chmod(0o700)
    tried: dict[str, tuple[str, dict[str, Any]]] = {
        "python": ("host-b:1", {"remote_python": "/nowhere/python"}),
        "rankscope": ("host-b:1", {"remote_python": str(fake)}),
        "key": ("strange:1", {}),
        "port": ("closed:1", {}),
        "login": ("unknown@host-b:1", {}),
        "shell": ("nobody@host-b:1", {}),
        "twice": ("host-b:1,root@host-b:1", {}),
        "interface": ("host-b:1", {"interface": "eth7"}),
        "reach": ("host-a:1,host-b:1", {"interface": "lo"}),
        "firewall": ("host-a:1,host-b:1", {}),
        "room": ("host-b:100000", {}),
        "mpi": ("host-a:1,strange:1", {"engines": "mpi", "remote_python": None}),
    }
    said = {}
    for what, (named, options) in tried.items():
        firewalls = {"cable-a": set[int](), "cable-b": {22}}
        hosts.cable.admitted = firewalls if what == "firewall" else {}
        with nothing_stays(sshd):
            try:
                Cluster(hosts=named, **{"remote_python": sshd.python, **options})
            except ClusterStartError as error:
                said[what] = str(error)
    tell("refused", said=said)


def many(sshd: Sshd) -> None:
    """24 ranks on two hosts."""
    began = time.monotonic()
    with nothing_stays(sshd):
        with Cluster(
            hosts="host-a:12,host-b:12", remote_python=sshd.python, force=True
        ) as cluster:
            cluster.execute("x = np.ones(1)\ndist.all_reduce(x)").result(WAIT)
            sums = sorted({float(one[0]) for one in cluster.pull("x").values()})
            ready = time.monotonic() - began
            began = time.monotonic()
        tell("many", sums=sums, ready=ready, end=time.monotonic() - began)


def interrupted_starts(sshd: Sshd) -> None:
    """An interrupt at each step of the start leaves nothing; of 24 ranks, too."""
    ended = []
    steps = ("connecting to", "host-b: conn", "starting the c", "starting 24", "making")
    for step in steps:

        def interrupt(text: str, step: str = step) -> None:
            if text.startswith(step):
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

        with nothing_stays(sshd):
            try:
                few = "1" if step != "starting 24" else "12"
                with Cluster(
                    hosts=f"host-a:{few},host-b:{few}",
                    remote_python=sshd.python,
                    force=True,
                    progress=interrupt,
                ):
                    time.sleep(WAIT)
            except KeyboardInterrupt:
                ended.append(step)
    tell("interrupted", missing=[one for one in steps if one not in ended])


def killed(sshd: Sshd) -> None:
    """The end of a notebook that is killed ends all within seconds, in any state."""
    options = {"hosts": "host-a:1,host-b:2", "remote_python": sshd.python}
    seconds = {}
    for keep in (False, True):
        for state in STARTING if keep else STARTING + RUNNING:
            said = json.dumps({**options, "keep": keep})
            mark = f"{MARK}={state}{keep}"
            ended = subprocess.run(
                ["env", mark, sys.executable, "-c", VICTIM, state, said],
                capture_output=True,
                text=True,
                check=False,
            )
            assert ended.returncode == -signal.SIGKILL, ended.stderr
            began = time.monotonic()
            while marked(mark) or sshd.processes():
                assert time.monotonic() < began + WAIT, f"{mark}: what does not end"
                time.sleep(0.05)
            seconds[mark] = time.monotonic() - began
    tell("killed", seconds=seconds)


def marked(mark: str) -> list[psutil.Process]:
    """The processes that have a variable in their environment."""
    name, _, value = mark.partition("=")
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if one.environ().get(name) == value and lives(one):
                found.append(one)
    return found


def mpi(sshd: Sshd) -> None:
    """Open MPI starts the ranks, by ssh; all end with a notebook that is killed."""
    command = [sys.executable, "-c", MPI, SUM.format(n=1000) + f"\n{PLACE}"]
    victim = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert victim.stdout is not None
    places, *pids = json.loads(victim.stdout.readline())
    processes = [psutil.Process(pid) for pid in pids]
    ranks = {pid: f"rank {rank}" for rank, pid in enumerate(pids[-4:])}
    listen = listening(hosts, ranks)
    began = time.monotonic()
    victim.kill()
    victim.communicate()
    until(
        lambda: not (any(map(lives, processes)) or sshd.processes()),
        WAIT,
        "the end of all",
    )
    seconds = time.monotonic() - began
    tell("mpi", ranks=places, listening=listen, seconds=seconds)


def left_by(**options: Any) -> set[psutil.Process]:
    """Return what a notebook that was killed has left of the cluster that it keeps."""
    command = [sys.executable, "-c", KEEPER, json.dumps(options)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return {psutil.Process(pid) for pid in json.loads(ended.stdout)}


def kept(sshd: Sshd) -> None:
    """Ranks outlive their notebook; another one uses them, and ends them all."""
    processes = left_by(hosts="host-a:2,host-b:2", remote_python=sshd.python)
    cluster = Cluster.attach(cluster_id="kept")
    alive = all(map(psutil.Process.is_running, processes))
    found = cluster.pull("mine")
    cluster.restart([3])
    cluster.rebuild()
    cluster.execute(SUM.format(n=1000) + f"\n{PLACE}").result(WAIT)
    places = cluster.pull("place")
    processes |= {psutil.Process(pid) for pid in cluster.pids.values()}
    began = time.monotonic()
    cluster.shutdown()
    until(
        lambda: not (any(map(lives, processes)) or sshd.processes()),
        WAIT,
        "the end of all",
    )
    seconds = time.monotonic() - began
    tell("kept", alive=alive, found=found, places=places, seconds=seconds)


def notebook(sshd: Sshd) -> None:
    """The notebook on several hosts is executed, with two."""
    from tools.execution import outputs_of

    os.environ["HOSTS"] = "host-a:2,host-b:2"
    with nothing_stays(sshd):
        tell("notebook", outputs=outputs_of(Path(sys.argv[2]), patience=1))


if __name__ == "__main__":
    hosts = Hosts(separate=True)
    sshd = Sshd(hosts, Path(sys.argv[1]))
    try:
        all_steps = (ranks, many, refused, interrupted_starts, killed, kept, mpi)
        for step in (notebook,) if sys.argv[2:] else all_steps:
            step(sshd)
    finally:
        sshd.close()
        hosts.close()
