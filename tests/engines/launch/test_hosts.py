"""The hosts of a cluster: how they are named, reached, and compared."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import psutil
import pytest

from rankscope import __version__
from rankscope.backends.conformance.leaks import lives
from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster, ClusterError, ClusterStartError
from rankscope.engines.agent import fork_server
from rankscope.engines.launch import fork_servers
from rankscope.engines.launch import hosts as hosts_module
from rankscope.engines.launch.fork_servers import ForkServer
from rankscope.engines.launch.host_names import (
    HostSpec,
    is_here,
    joined_errors,
    parse_hosts,
)
from rankscope.engines.launch.hosts import compare
from rankscope.engines.launch.leashed import LeashedProcess
from rankscope.engines.launch.ssh_hosts import SshHosts, ssh_command

WAIT = 60

#: Shells of which a login may have one, of those that are here.
SHELLS = [one for one in ("sh", "bash", "fish", "tcsh", "zsh") if shutil.which(one)]

PYTHON = ".".join(map(str, sys.version_info[:3]))
#: What `describe` of the fork server says of a host.
DESCRIBED: dict[str, Any] = {
    "python": PYTHON,
    "no_room": "",
    "versions": {"numpy": "2.1.0", "torch": "2.6.0"},
    "gpus": 4,
}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("a:4,b:4", {"a": 4, "b": 4}),
        ("a, b:2", {"a": 1, "b": 2}),
        ("me@a.org:2", {"me@a.org": 2}),
        ("10.0.0.1:3,[fe80::1]:2,::1", {"10.0.0.1": 3, "fe80::1": 2, "::1": 1}),
        ("me@[fd00::1]:2,fe80::1%eth0", {"me@fd00::1": 2, "fe80::1%eth0": 1}),
        ({"b": 2, "a": 1}, {"b": 2, "a": 1}),
    ],
)
def test_hosts_are_named_with_their_ranks(
    given: HostSpec, found: dict[str, int]
) -> None:
    assert list(parse_hosts(given).items()) == list(found.items())


def test_a_hostfile_of_mpi(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two\na slots=4 max_slots=8\n\nb:2 # half\nc 3\nd\n")
    expected = {"a": 4, "b": 2, "c": 3, "d": 1}
    assert parse_hosts(file) == parse_hosts(str(file)) == expected


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("", "'' is no host: expected a:4,b:4, or a hostfile"),
        ("./hosts.txt", "there is no hostfile ./hosts.txt"),
        ("a:4,,b", "'' is no host"),
        ("a:4 b:4", "'a:4 b:4' is no host: expected a:4,b:4, or a hostfile"),
        ("a:x", "a:x: expected a number of ranks from 1"),
        ("a:0", "a:0: expected a number of ranks from 1"),
        ("a:22:4", "'a:22:4' is no host, nor an address of IPv6: expected a:4,b:4; a "),
        ({"a": True}, "a:True: expected a number of ranks"),
        ({}, "it names no host"),
        ("a:2,a:3", "a is named twice: give its ranks in one number"),
        ("a:4;b:4", "'a:4;b:4' is no host"),
        # It would be an option of ssh.
        ("-oProxyCommand=x:2", "'-oProxyCommand=x' is no host"),
    ],
)
def test_what_names_no_hosts_is_refused(given: HostSpec, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}".replace("?", r"\?")):
        parse_hosts(given)


@pytest.mark.parametrize(
    ("addresses", "here"),
    [
        (["127.0.1.1"], True),
        (["10.0.0.1"], True),
        (["10.0.0.1", "fe80::1"], True),
        (["10.0.0.2"], False),
        # A name of several hosts, such as those to log in at.
        (["10.0.0.1", "10.0.0.2"], False),
        ([], False),
    ],
)
def test_a_name_of_an_address_of_this_host_is_this_host(
    addresses: list[str], here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(name: str, port: None) -> list[tuple[Any, ...]]:
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (one, 0)) for one in addresses]

    ours = [SimpleNamespace(address=one) for one in ("10.0.0.1", "fe80::1%eth0")]
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": ours})
    is_here.cache_clear()
    try:
        assert is_here("host.example.org") is here
    finally:
        is_here.cache_clear()


@pytest.mark.processes
@pytest.mark.parametrize("shell", SHELLS)
def test_whatever_the_login_shell_is(shell: str, tmp_path: Path) -> None:
    python, folder = tmp_path / "it's a python", tmp_path / 'a!! $b !"c\\'
    folder.mkdir()
    python.write_text('#!/bin/sh\necho "$PWD" "$@"\n')
    python.chmod(0o700)
    command = ssh_command("a", str(python), str(folder))[-1]
    ran = subprocess.run(
        [shell, "-c", command], capture_output=True, text=True, check=True
    )
    assert ran.stdout == f"{folder} -m {fork_servers.MODULE} describe\n"


def test_ssh_asks_nothing_and_shares_nothing() -> None:
    command = ssh_command("a", "~/my env/bin/python", "/data/it's here")
    assert command[-3:-1] == ["--", "a"]
    assert {"-T", "-oBatchMode=yes", "-oControlMaster=no"} <= set(command)
    # What the shell of the other host makes of it.
    *_, script = shlex.split(command[-1])
    assert script == (
        """cd '/data/it'"'"'s here' 2>/dev/null; exec "$HOME"/'my env/bin/python' """
        "-m rankscope.engines.agent.fork_server describe"
    )


def test_how_long_silence_is_kept_is_one_setting() -> None:
    for lost_after, interval, count in ((600.0, 30, 20), (5.0, 1, 5), (0.1, 1, 1)):
        command = ssh_command("a", "python", "/", lost_after)
        assert f"-oServerAliveInterval={interval}" in command
        assert f"-oServerAliveCountMax={count}" in command
    with pytest.raises(ValueError, match="lost_after=0: seconds, above 0"):
        Cluster(hosts="a:2", lost_after=0)


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("root@b: Permission denied (publickey).", "`ssh -o BatchMode=yes b true` has"),
        ("Host key verification failed.", "run `ssh b` in a terminal once, and"),
        ("ssh: Could not resolve hostname b: Name or service", "it is no hostfile: "),
        ("ssh: connect to host b port 23: Connection refused", "no sshd listens there"),
        ("Connection timed out during banner exchange", "is it sshd's port"),
        ("kex_exchange_identification: Connection closed", "(MaxStartups)"),
        ("ssh: connect to host b port 22: Connection timed out", "nothing answers"),
        ("ssh: connect to host b port 22: No route to host", "no network leads there"),
        ("ssh: connect to host b port 22: Network is unreachable", "no network leads"),
        (
            "ssh: Could not resolve hostname b: Temporary failure in name resolution",
            "no name server answers here",
        ),
        ("something new", "ssh cannot log in, or a signal has ended what it ran there"),
    ],
)
def test_what_ssh_says_has_advice(said: str, advice: str) -> None:
    """And stands below it."""
    server = SimpleNamespace(
        exit_code=255, last_output=said, last_lines=lambda: f"\n--- {said}"
    )
    why = SshHosts({"b": 1}).why_refused("b", cast(LeashedProcess, server))
    assert advice in why
    assert why.endswith(f"\n--- {said}")


def test_of_many_connections_that_are_refused_ten_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = SshHosts({f"h{at}": 1 for at in range(12)})
    for name in hosts.ranks:
        hosts.servers[name] = cast(ForkServer, SimpleNamespace(is_open=True))

    async def answers(
        names: list[str], message: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        refused = ["Connection refused", *("" for _ in names)]
        return {one: {"at": ["10.0.0.1", 7], "refused": refused} for one in names}

    monkeypatch.setattr(hosts, "_ask", answers)
    with pytest.raises(ClusterStartError) as caught:
        asyncio.run(hosts.check_reach("10.0.0.9", 5))
    first, *_, last = lines = str(caught.value).splitlines()
    assert first.startswith("h0 cannot connect to the controller at 10.0.0.9, port 5 ")
    assert (len(lines), last) == (11, "and 2 other connections")


class CutHosts(SshHosts):
    """A host that is connected and then says nothing, as after a cut."""

    def command(self, name: str) -> list[str]:
        said = json.dumps({"rankscope": __version__, "host": DESCRIBED})
        return ["sh", "-c", f"echo '{said}'; exec sleep 100"]

    def probe(self, name: str) -> list[str]:
        return ["sh", "-c", "echo Connection timed out >&2; exit 255"]


@pytest.mark.processes
@pytest.mark.usefixtures("no_leaks")
def test_a_host_that_is_cut_off_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before its time is over."""
    monkeypatch.setattr(hosts_module, "_LOOK", 0.05)
    hosts = CutHosts({"b": 1})

    async def start() -> None:
        await hosts.connect("b")
        looks = asyncio.ensure_future(hosts.give_up_unreachable())
        try:
            await hosts.check_reach("10.0.0.9", 5)
        finally:
            looks.cancel()

    with pytest.raises(ClusterStartError) as caught:
        asyncio.run(asyncio.wait_for(start(), WAIT))
    assert str(caught.value) == (
        "b: it can be reached no more: nothing answers there: is it on, and does a "
        "firewall between the hosts let ssh through?\n--- its last output\n"
        "Connection timed out"
    )


def test_what_several_hosts_have_in_common_is_told_once() -> None:
    """Whatever the host's name is within the words; a name may be part of others."""
    found = {f"n{at}": f"n{at} is not known: `ssh n{at}`" for at in range(12)}
    found = {"n": "no sshd", **found, "n.org": "no sshd"}
    first = ", ".join(f"n{at}" for at in range(10))
    assert joined_errors(found).splitlines() == [
        "n, n.org: no sshd",
        f"{first} and 2 others: n0 is not known: `ssh n0`",
    ]


def test_hosts_that_are_alike() -> None:
    hosts = {name: {**DESCRIBED, "name": name} for name in "ab"}
    assert compare(hosts) == ([], [])


def test_each_difference_is_a_sentence() -> None:
    hosts = {
        "a": {**DESCRIBED, "name": "a", "gpus": 8},
        "b": {**DESCRIBED, "name": "b", "versions": {"numpy": "2.1.0"}},
        "c": {**DESCRIBED, "name": "c", "python": "3.2.1"},
    }
    here = ".".join(map(str, sys.version_info[:2]))
    assert compare(hosts) == (
        [],
        [
            f"c has Python 3.2.1, this notebook {here}: a function that is pickled may "
            "not load there",
            "hosts differ in torch: 2.6.0 on a, c; not installed on b",
            "hosts differ in GPUs: 8 on a; 4 on b, c",
        ],
    )


def test_hosts_that_cannot_work_together() -> None:
    hosts = {
        "a": {**DESCRIBED, "name": "node"},
        "b": {**DESCRIBED, "name": "node"},
    }
    (error,), _ = compare(hosts)
    assert error.startswith("a and b are one host, or both call themselves node: ")


class OlderHosts(SshHosts):
    """A host with another version, which says of itself in its own way."""

    def command(self, name: str) -> list[str]:
        return ["sh", "-c", """echo '{"rankscope": "0.0.1", "node": []}'; exec cat"""]


@pytest.mark.processes
@pytest.mark.usefixtures("no_leaks")
def test_another_version_of_rankscope_is_named() -> None:
    """Before anything else that such a host says of itself is read."""
    hosts = OlderHosts({"b": 1})
    why = f"^b: it has Rankscope 0.0.1, this notebook {__version__}: install one"
    with pytest.raises(ClusterStartError, match=why):
        asyncio.run(hosts.connect("b"))
    hosts.close()


def test_a_host_whose_disk_is_full_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    described = fork_server.describe()
    assert described["no_room"] == ""
    assert not list((tmp_path / "ipython").iterdir())
    # Root may write where nobody else may.
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "ipython"
    monkeypatch.setenv("IPYTHONDIR", str(folder))
    errors, _ = compare(
        {"here": described, "b": {**fork_server.describe(), "name": "b"}}
    )
    assert errors == [
        f"b: {folder} takes no files (Not a directory): make room there, or name a "
        "folder elsewhere by IPYTHONDIR, in the environment of a login there"
    ]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"n": 3}, "n=3: hosts='a:2' have 2 ranks; leave n out"),
        ({"engines": "local"}, "the launcher local: hosts have one of their own, or"),
        (
            {"backend": "cpu:mpi", "remote_python": "p"},
            "remote_python: mpiexec runs the Python of this one's path",
        ),
    ],
)
def test_what_does_not_go_with_hosts(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ClusterError, match=f"^{why}"):
        Cluster(hosts="a:2", **options)


def test_options_of_hosts_without_hosts() -> None:
    with pytest.raises(ClusterError, match="remote_python='p' is for hosts"):
        Cluster(2, remote_python="p")


def test_a_host_says_why_it_cannot_connect() -> None:
    """To several targets at once, of which one does not answer at all."""
    listener = fork_server._listen_towards("127.0.0.1")
    silent = socket.create_server(("127.0.0.1", 0), backlog=0)
    # The queue of what has connected is full.
    queued = [socket.socket() for _ in range(2)]
    for one in queued:
        one.setblocking(False)
        one.connect_ex(silent.getsockname())
    with socket.socket() as closed, patch.object(fork_server, "CONNECT_TIMEOUT", 0.5):
        closed.bind(("127.0.0.1", 0))
        targets = [one.getsockname() for one in (listener, closed, silent)]
        assert targets[0][0] == "127.0.0.1"
        assert fork_server._why_refused(targets) == [
            "",
            "Connection refused",
            "no answer in 0.5 s",
        ]
        # What fails at once, as without a route.
        (why,) = fork_server._why_refused([("255.255.255.255", 9)])
        assert why
    for one in (listener, silent, *queued):
        one.close()


def test_a_host_without_room_for_a_process_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its other ranks live on."""

    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    server = object.__new__(fork_server._Server)
    server._listener, server._outputs, server._living = None, {}, {7}
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(server, "send", sent.append)
    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    engines = [{"output": None}, {"output": None}]
    assert not server._fork(
        {"fork": engines, "environment": {}, "torch": False, "stay": 600.0}
    )
    why = "no other process can be started: Resource temporarily unavailable"
    assert sent == [{"failed": why}]
    assert server._living == {7}
    assert server._outputs == {}


@pytest.mark.processes
@pytest.mark.usefixtures("no_leaks")
def test_a_fork_server_ends_whose_owner_is_cut_off() -> None:
    """Some time after its last engine, with what that has started: no end of stdin."""
    daemon = "setsid sleep 600 >&- 2>&- & echo $! >&2; exit 3"
    request = {
        "fork": [
            {"output": None, "command": ["sh", "-c", daemon], "job_rank": 0},
            {"output": None, "command": ["sleep", "0.3"], "job_rank": 1},
        ],
        "environment": {},
        "torch": False,
        "stay": 0.2,
    }
    server = subprocess.Popen(
        [sys.executable, "-m", fork_servers.MODULE, "plain"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with server:
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stderr is not None
        server.stdin.write(json.dumps(request).encode() + b"\n")
        server.stdin.flush()
        _, first, second = map(json.loads, server.stdout)
        said = server.stderr.read().decode()
    assert (first["exit_code"], second["exit_code"]) == (3, 0)
    assert not psutil.pid_exists(int(first["output"]))
    assert server.returncode == 0
    assert said == (
        "rankscope: this fork server ends: for 0.2 s it has had no rank, and heard "
        "nothing of its notebook\n"
    )


@pytest.mark.processes
@pytest.mark.usefixtures("no_leaks")
def test_this_host_is_one_without_ssh() -> None:
    """One fork server stays for all starts, and tells how each rank has ended."""
    with Cluster(hosts={"localhost": 3}) as cluster:
        assert cluster._launched is not None
        (server,) = cluster._launched.fork_servers()
        first = cluster.pids
        os.kill(first[1], signal.SIGSEGV)
        until(lambda: cluster.status().dead == [1], WAIT, "the death")
        reason = cluster.status().ranks[1].reason
        assert str(reason).startswith("rank 1 is dead: killed by SIGSEGV (")
        cluster.restart([0, 1])
        cluster.rebuild()
        cluster.execute("import os\nparent = os.getppid()").result(WAIT)
        assert set(cluster.pull("parent").values()) == {server.pid}
        assert cluster.pids[2] == first[2]
        assert cluster._launched.fork_servers() == [server]
        # One that answers too late, as of a host that was cut off.
        server.suspend()
        with pytest.raises(ClusterStartError, match="no answer of localhost"):
            cluster.restart([2], start_timeout=1)
        server.resume()
        cluster.restart([2])
        cluster.rebuild()
        cluster.execute("dist.barrier()").result(WAIT)
        pids = set(cluster.pids.values())
        until(
            lambda: {one.pid for one in server.children()} == pids,
            WAIT,
            "the end of the engine that came too late",
        )
        # One that has nobody any more, as it seems, ends; a restart has another one.
        hosts = cluster._launched.hosts
        assert hosts is not None
        hosts.lost_after = 0.1
        cluster.restart([2])
        for pid in cluster.pids.values():
            os.kill(pid, signal.SIGKILL)
        until(lambda: not lives(server), WAIT, "the end of the fork server")
        until(lambda: cluster.status().dead == [0, 1, 2], WAIT, "the deaths")
        cluster.restart()
        cluster.execute("dist.barrier()").result(WAIT)
        (another,) = cluster._launched.fork_servers()
        assert another != server
    assert not another.is_running()
