"""Two hosts on one machine, with a cable between them that can fail: a program.

Run by `steps_of`, it makes the first host of this process, and a second one of a
process that waits. The controller and ranks 0 and 1 are on the first, ranks 2 and 3 on
the second. What is seen is printed as a line of JSON for each step; the tests read it.
Both hosts, the cable and all processes are gone with this one, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ipyparallel
import numpy as np

from rankscope.backends.conformance.waiting import until
from rankscope.backends.observe.lateness import findings_of
from rankscope.engines import Cluster, ClusterError, Execution
from rankscope.engines.cluster.value_server import ValueServer
from rankscope.engines.launch.clusters import _CONTROLLER_ARGS
from rankscope.widgets.lateness_text import lateness_text
from tests.engines.cluster.cable import TUN, Cable
from tests.environment import environment

WAIT = 60
#: Of the group, in seconds.
TIMEOUT = 4.0
#: Of a poor cable: seconds, and the share of packets.
DELAY, LOSS = 0.01, 0.02
#: An address that is nobody's: of the range for tests of network devices.
HERE, THERE = "198.18.0.1", "198.18.0.2"

SUM = "y = np.full({n}, rank + 1.0)\ndist.all_reduce(y)\nassert (y == 10).all()"
#: Collectives until one fails; what it said is kept.
STREAM = """
caught = None
try:
    while True:
        dist.all_reduce(np.ones(1000))
except dist.DistError as error:
    caught = f"{type(error).__name__}: {error}"
"""

#: Large collectives of a rank of each host; then small ones, which tell their clocks.
TRAIN = """
import time
for step in range(24):
    if rank in (0, 2):
        if rank == 0: time.sleep({seconds})
        dist.all_reduce(np.ones(2000), group=pair)
        {small}
"""
SMALL = "dist.barrier(group=pair)\n        dist.barrier(group=pair)"
#: Bytes a second from the first host to the second: 16 kB take 160 ms.
RATE = 1e5


#: A network, a hostname, memory and processes of its own, as root of its own if we are
#: not root. All processes end with the first one, and that with us.
UNSHARE = [
    *("setpriv", "--pdeathsig", "KILL", "unshare"),
    *([] if os.geteuid() == 0 else ["--map-root-user"]),
    *("--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"),
]
#: The first process: it takes over those whose parents end, and ends with the command.
FIRST = ["sh", "-c", '"$@"; exit $?', "sh"]


#: Else the kernel tries ever less often in a cut, and each connection goes on at a time
#: of its own afterwards. Linux has it since 6.15.
RESEND = """cd /proc/sys/net/ipv4; [ ! -e tcp_rto_max_ms ] || {
echo 1000 >tcp_rto_max_ms; echo 200 >tcp_retries2; }"""

#: The kinds of namespaces whose file has another name.
_FILES = {"mount": "mnt"}

#: A ``/sys`` with the network devices of this namespace, in which UCX looks for them.
SYSFS = ["mount", "-t", "sysfs", "sysfs", "/sys"]


def why_not(separate: bool = False) -> str:
    """Return why there can be no two hosts here; empty if there can."""
    needed = ("setpriv", "unshare", "nsenter", "ip")
    missing = [one for one in needed if shutil.which(one) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    if not os.access(TUN, os.R_OK | os.W_OK):
        return f"needs {TUN}, for the cable"
    tried = subprocess.run(
        [*UNSHARE, "ip", "tuntap", "add", "trial", "mode", "tun"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode == 0 and separate:
        tried = subprocess.run(
            [*UNSHARE, *SYSFS], capture_output=True, text=True, check=False
        )
    return f"may not make namespaces: {tried.stderr}" if tried.returncode else ""


def command_of(program: str, *arguments: str | Path) -> list[str]:
    """Return the command that runs a program with all of a host for itself."""
    return [*UNSHARE, *FIRST, sys.executable, program, *map(str, arguments)]


def steps_of(
    program: str,
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    timeout: float = 150,
) -> list[dict[str, Any]]:
    """Run a program as `command_of` says; return the steps that it prints."""
    ran = subprocess.run(
        command_of(program, *arguments),
        env=environment() if env is None else env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    print(ran.stdout)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def run(*command: str) -> None:
    """Run a command of iproute2, which says by itself what went wrong."""
    subprocess.run(command, check=True)


class Hosts:
    """This host, a second one, and the cable between them.

    With `separate` the second reaches no shared memory of the first, and both have a
    ``/sys`` with the network devices of their own.
    """

    def __init__(self, separate: bool = False) -> None:
        kinds = ("net", "uts", *(("ipc", "mount") if separate else ()))
        up = "echo up; exec cat"
        if separate:
            run(*SYSFS)
            up = f"{' '.join(SYSFS)} && {up}"
        socket.sethostname("host-a")
        # Its stdin ends with this process, and with it the host.
        self._holder = subprocess.Popen(
            [
                "unshare",
                *(f"--{kind}" for kind in kinds),
                *("sh", "-c", up),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        self._holder.stdout.readline()
        pid = str(self._holder.pid)
        there = [f"--{kind}=/proc/{pid}/ns/{_FILES.get(kind, kind)}" for kind in kinds]
        #: What a command is to begin with to run on the second host.
        self.there = ["nsenter", *there]
        run(*self.there, "hostname", "host-b")
        self.cable = Cable()
        run("ip", "link", "set", "cable-b", "netns", pid)
        self._set_up([], "cable-a", HERE)
        self._set_up(self.there, "cable-b", THERE)

    def _set_up(self, where: list[str], device: str, address: str) -> None:
        run(*where, "sh", "-c", RESEND)
        run(*where, "ip", "link", "set", "lo", "up")
        run(*where, "ip", "address", "add", f"{address}/30", "dev", device)
        run(*where, "ip", "link", "set", device, "up")

    def know_names(self, folder: Path) -> None:
        """Have both hosts, which are `separate`, know both names."""
        names = f"127.0.0.1 localhost\n{HERE} host-a\n{THERE} host-b\n"
        (folder / "hosts").write_text(names)
        for where in ((), self.there):
            run(*where, "mount", "--bind", f"{folder}/hosts", "/etc/hosts")

    def close(self) -> None:
        """End the cable, then the second host, which holds one end of it."""
        self.cable.close()
        self._holder.communicate()


@contextlib.contextmanager
def four_ranks(
    hosts: Hosts, backend: str | None = None, interfaces: bool = False
) -> Iterator[Cluster]:
    """A controller and two engines here, two engines there.

    With `interfaces` the engines' environment names the ends of the cable.
    """
    here, there = {}, {}
    if interfaces:
        here["GLOO_SOCKET_IFNAME"], there["GLOO_SOCKET_IFNAME"] = "cable-a", "cable-b"
    os.environ.update(here)
    args = [f"--{name}={value}" for name, value in _CONTROLLER_ARGS.items()]
    args.append("--HeartMonitor.max_heartmonitor_misses=120")
    cluster = ipyparallel.Cluster(
        n=2, controller_ip=HERE, controller_args=args, delay=0, log_level=40
    )
    engines: list[subprocess.Popen[bytes]] = []
    with cluster as client:
        client.wait_for_engines(2, timeout=WAIT)
        file = cluster.controller.connection_files["engine"]
        command = [sys.executable, "-m", "ipyparallel.engine", f"--file={file}"]
        try:
            for _ in range(2):
                engines.append(
                    subprocess.Popen(
                        [*hosts.there, *command],
                        env={**os.environ, **there},
                        start_new_session=True,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
                )
            client.wait_for_engines(4, timeout=WAIT)
            with Cluster.attach(
                connection_file=cluster.controller.connection_files["client"],
                backend=backend,
                timeout=TIMEOUT,
            ) as attached:
                yield attached
        finally:
            for engine in engines:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(engine.pid, signal.SIGKILL)
                engine.wait()


def tell(step: str, **seen: Any) -> None:
    """One step is done: print what was seen."""
    print(json.dumps({"step": step, **seen}), flush=True)


def stream(cluster: Cluster) -> Execution:
    """Start collectives on all ranks and wait until they flow."""
    issued = [one.groups[0].issued or 0 for one in cluster.status(fresh=True).ranks]
    cell = cluster.execute(STREAM, cell=9)

    def flows() -> bool:
        now = [one.groups[0].issued or 0 for one in cluster.status().ranks]
        return all(x > y + 5 for x, y in zip(now, issued, strict=True))

    until(flows, WAIT, "collectives")
    return cell


def large(cluster: Cluster) -> None:
    """Push and pull a value that has a connection of its own to each rank."""
    moved: list[int] = []
    close = ValueServer.close

    def note(server: ValueServer) -> None:
        close(server)
        moved.append(server.moved)

    value = np.arange(1 << 19)
    with patch.object(ValueServer, "close", note):
        cluster.push({"value": value}, timeout=WAIT)
        cluster.execute("value += rank").result(WAIT)
        found = cluster.pull("value", timeout=WAIT)
    equal = [bool((found[rank] == value + rank).all()) for rank in cluster.ranks]
    tell("large", equal=equal, moved=[count // value.nbytes for count in moved])


def silent(cluster: Cluster) -> list[int]:
    """The ranks that nothing was heard of."""
    return [one.rank for one in cluster.status().ranks if one.state == "unreachable"]


def main() -> None:
    hosts = Hosts()
    with four_ranks(hosts) as cluster:
        story(cluster, hosts.cable)
    hosts.close()


def slow_link(cluster: Cluster, cable: Cable) -> None:
    """What comes to rank 2 is slow; rank 0, which sleeps for less, makes none wait."""
    cable.rate = RATE
    found = []
    # A loaded machine carries the small ones as slowly now and then.
    for _ in range(4):
        found.append(late(cluster, SMALL, 0.0))
        if found[-1]["found"]:
            break
    tell("slow link", told=found, hidden=late(cluster, "", 0.08))
    cable.rate = math.inf


def late(cluster: Cluster, small: str, seconds: float) -> dict[str, Any]:
    """Let a group of ranks 0 and 2 train; return what is said of it."""
    code = "pair = dist.new_group([0, 2])\n"
    cluster.execute(code + TRAIN.format(small=small, seconds=seconds), cell=7).result(
        WAIT
    )
    groups = cluster.lateness().groups()[-1:]
    cluster.execute("dist.destroy_process_group(pair)").result(WAIT)
    found = findings_of(groups)
    return {
        "found": [(one.pattern.value, one.ranks) for one in found],
        "said": lateness_text(groups, found),
    }


def story(cluster: Cluster, cable: Cable) -> None:
    cluster.execute("mine = rank * 100\n" + SUM.format(n=100)).result(WAIT)
    status = cluster.status(fresh=True)
    tell("start", hosts=[one.host for one in status.ranks])

    large(cluster)

    cable.delay, cable.loss = DELAY, LOSS
    for n in (1, 1000, 200_000):
        began = time.monotonic()
        cluster.execute(SUM.format(n=n)).result(WAIT)
        tell("poor", n=n, seconds=time.monotonic() - began)
    tell("carried", carried=cable.carried, lost=cable.lost)
    cable.delay = cable.loss = 0.0

    slow_link(cluster, cable)

    cell = stream(cluster)
    cable.up = False
    began = time.monotonic()
    until(lambda: set(cell.ranks_running) <= {2, 3}, WAIT, "ranks 0, 1 to end")
    ended = time.monotonic() - began
    until(lambda: silent(cluster) == [2, 3], WAIT, "silence")
    unheard = time.monotonic() - began
    try:
        cluster.abort(reason="nobody there")
        said = ""
    except ClusterError as error:
        said = str(error)
    try:
        cluster.rebuild()
        refused = ""
    except ClusterError as error:
        refused = str(error)
    tell(
        "down",
        ended=ended,
        unheard=unheard,
        abort=said,
        rebuild=refused,
        verdicts=[str(one) for one in cluster.diagnose()],
        caught=cluster.pull("caught", [0, 1], timeout=WAIT),
    )
    cable.up = True
    began = time.monotonic()
    assert cell.wait(WAIT), "the other host's ranks have not ended"
    received = time.monotonic() - began
    until(lambda: not silent(cluster), WAIT, "a status of the other host")
    tell("up", ended=received, caught=cluster.pull("caught", timeout=WAIT))
    began = time.monotonic()
    cluster.rebuild()
    cluster.execute(SUM.format(n=100)).result(WAIT)
    tell(
        "rebuilt",
        seconds=time.monotonic() - began,
        mine=cluster.pull("mine", timeout=WAIT),
    )


if __name__ == "__main__":
    main()
