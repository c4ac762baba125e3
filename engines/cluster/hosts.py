"""The hosts of a cluster: named by a person, reached by ssh, compared at the start."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from rankscope import __version__
from rankscope.backends.routes import address_towards
from rankscope.backends.stores.process_end import describe_exit_code

from ..errors import ClusterStartError
from . import fork_servers, preconditions
from .fork_servers import ForkServer, ServerEnd

__all__ = [
    "HOSTS",
    "LOST_AFTER",
    "HostSpec",
    "Hosts",
    "compare",
    "parse_hosts",
    "ssh_command",
]

T = TypeVar("T")

#: What ``hosts=`` takes: text, ranks by host, or a hostfile.
HostSpec = str | os.PathLike[str] | Mapping[str, int]

#: The name of the launcher that starts ranks on them.
HOSTS = "hosts"
#: Seconds without an answer after which the connection to a host is given up, and its
#: ranks end: here by ssh, there by the heartbeat of the controller.
LOST_AFTER = 600
#: Seconds between two requests for an answer.
_ALIVE = 30
#: Seconds that ssh gets to connect.
_CONNECT = 20
#: Seconds that hosts get to end their ranks.
_END = 5.0

#: What the ranks of other hosts have from the notebook's environment, as local ones do:
#: variables of the libraries, not those of the notebook's own host.
FORWARDED = ("GLOO_", "NCCL_", "OMP_NUM_THREADS", "RANKSCOPE_", "TORCH_", "UCX_")

#: What ssh says → what it means, and what to do; ``{host}`` is the host's name.
_ADVICE = {
    "Host key verification failed": (
        "its host key is not known here, or is another one than before: run "
        "`ssh {host}` in a terminal once, and compare the key that it shows"
    ),
    "Permission denied": (
        "it lets nobody in without a password: `ssh -o BatchMode=yes {host} true` has "
        "to work in a terminal; `ssh-copy-id {host}` makes it so, or `ssh-add` where "
        "the key has a passphrase"
    ),
    "Could not resolve hostname": (
        "its name is not known here: name it by its address, or in ~/.ssh/config"
    ),
    "Connection refused": "no sshd listens there: start it, or name another port for "
    "{host} in ~/.ssh/config",
    "Connection timed out": "nothing answers there: is it on, and does a firewall "
    "between the hosts let ssh through?",
    "No route to host": "no network leads there from this host",
    "Network is unreachable": "no network leads there from this host",
}


def parse_hosts(given: HostSpec) -> dict[str, int]:
    """Return the number of ranks by host, in the order of the ranks.

    `given` is as ``a:4,b:4``; a host without a number has one rank. Of a hostfile each
    line names a host: ``a:4``, ``a slots=4`` or ``a 4``, with ``#`` before a comment.

    Raises `ValueError` saying what is wrong.
    """
    if isinstance(given, Mapping):
        return _checked(given.items())
    if isinstance(given, os.PathLike) or (
        "," not in given and Path(given).expanduser().is_file()
    ):
        lines = Path(given).expanduser().read_text(encoding="utf-8").splitlines()
        entries = [line.partition("#")[0].split() for line in lines]
        return _checked(_entry(words) for words in entries if words)
    return _checked(_entry([one.strip()]) for one in given.split(","))


def _entry(words: list[str]) -> tuple[str, int | str]:
    name, *rest = words
    for word in rest:
        key, equals, value = word.rpartition("=")
        if not equals or key == "slots":
            return name, value
    # An address of IPv6 has its own colons.
    host, colon, number = name.rpartition(":")
    if colon and ":" not in host.rpartition("]")[2]:
        return host.strip("[]"), number
    return name.strip("[]"), 1


def _checked(entries: Iterable[tuple[str, int | str]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, number in entries:
        # One that begins with a dash would be an option of ssh.
        if not isinstance(name, str) or not name or name.startswith("-"):
            raise ValueError(f"{name!r} is no host: expected a:4,b:4, or a hostfile")
        if isinstance(number, bool) or not str(number).isdecimal() or int(number) < 1:
            raise ValueError(f"{name}:{number}: expected a number of ranks from 1")
        if name in found:
            raise ValueError(f"{name} is named twice: give its ranks in one number")
        found[name] = int(number)
    if not found:
        raise ValueError("it names no host: expected a:4,b:4")
    return found


def is_here(name: str) -> bool:
    """Return whether a name is that of this host, which needs no ssh."""
    return name in ("localhost", "127.0.0.1", "::1", socket.gethostname())


def ssh_command(name: str, python: str, folder: str) -> list[str]:
    """Return the command that runs a fork server on the host `name`.

    It asks no question: a password, or the key of a host that is not known, is an
    error. `folder` is the working directory where the host has it, else it is home.
    """
    home = python.startswith("~/")
    quoted = f'"$HOME"/{shlex.quote(python[2:])}' if home else shlex.quote(python)
    script = (
        f"cd {shlex.quote(folder)} 2>/dev/null; "
        f"exec {quoted} -m {fork_servers.MODULE} describe"
    )
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": _CONNECT,
        "ServerAliveInterval": _ALIVE,
        "ServerAliveCountMax": LOST_AFTER // _ALIVE,
        # A shared connection would outlive the ranks; the notebook needs no forwarding.
        "ControlMaster": "no",
        "ClearAllForwardings": "yes",
        "RemoteCommand": "none",
    }
    chosen = [f"-o{key}={value}" for key, value in options.items()]
    return ["ssh", "-T", *chosen, "--", name, f"exec sh -c {shlex.quote(script)}"]


class Hosts:
    """The hosts of a cluster, each with a fork server once it is connected.

    Parameters
    ----------
    ranks : mapping
        The number of ranks by host.
    python : str, optional
        The Python of the other hosts; by default the path of this one.
    interface : str, optional
        The network interface of this host, or its address, at which the others reach
        the controller; by default the one by which ssh has reached them.
    """

    def __init__(
        self,
        ranks: Mapping[str, int],
        python: str | None = None,
        interface: str | None = None,
    ) -> None:
        self.ranks = dict(ranks)
        self.python = python or sys.executable
        self.interface = interface
        #: The name of the host of each rank.
        self.names = [name for name, n in self.ranks.items() for _ in range(n)]
        self.servers: dict[str, ForkServer] = {}
        #: What each host has said of itself.
        self.descriptions: dict[str, dict[str, Any]] = {}
        #: One sentence for each difference between the hosts.
        self.differences: list[str] = []
        #: Whether no host may have more ranks than its cores and memory allow.
        self.limited = False

    async def connect(self, name: str) -> dict[str, Any]:
        """Start the fork server of a host; return what it says of the host.

        Raises `ClusterStartError` that says what to do.
        """
        if is_here(name):
            command = [sys.executable, "-m", fork_servers.MODULE, "describe"]
        elif shutil.which("ssh") is None:
            raise ClusterStartError(
                f"{name}: there is no ssh on this host: install openssh-client"
            )
        else:
            command = ssh_command(name, self.python, os.getcwd())
        server = self.servers[name] = ForkServer(command, self._server_ended)
        try:
            answer = await server.reply()
        except ServerEnd:
            raise ClusterStartError(f"{name}: {self._why_ended(name)}") from None
        self.descriptions[name] = answer["host"]
        return self.descriptions[name]

    async def connect_again(self, names: Iterable[str]) -> None:
        """Connect to those of the hosts whose connection has ended."""
        lost = [name for name in names if not self.servers[name].is_open]
        await asyncio.gather(*map(self.connect, lost))

    def _why_ended(self, name: str) -> str:
        """Return why the process of a host has ended before it said anything."""
        server, python = self.servers[name], self.python
        said = server.last_output
        if lacks := re.search(r"No module named '?([\w.]+)", said):
            return (
                f"its {python} has no {lacks[1]}: install Rankscope {__version__} "
                "there, and what your cells import, or name another Python with "
                "--remote-python"
            )
        if server.exit_code in (126, 127):
            return (
                f"there is no {python} there: name the Python that has Rankscope with "
                f"--remote-python PATH{server.last_lines()}"
            )
        if server.exit_code == 255:
            for words, advice in _ADVICE.items():
                if words in said:
                    return f"{advice.format(host=name)}{server.last_lines()}"
            return f"ssh cannot log in{server.last_lines()}"
        return f"its fork server {server.why}"

    def check(self) -> None:
        """Raise `ClusterStartError` where the hosts cannot work together."""
        # In the order of the ranks, not in that of the answers.
        in_order = {name: self.descriptions[name] for name in self.ranks}
        errors, self.differences = compare(in_order)
        if errors:
            raise ClusterStartError("; ".join(errors))
        if self.limited:
            for name, n in self.ranks.items():
                found = self.descriptions[name]
                preconditions.check_room(n, found["cores"], found["free"], name)

    @property
    def address(self) -> str:
        """The address of this host at which every host reaches the controller."""
        if self.interface is not None:
            return _address_of(self.interface)
        others = [name for name in self.ranks if not is_here(name)]
        for name in others:
            # As sshd there has seen this host: the way back is known to work.
            if _is_ours(client := self.descriptions[name]["client"]):
                return client
        # By a jump host, or a router that translates addresses.
        return _route_to(others[0]) if others else "127.0.0.1"

    async def check_reach(self, address: str, port: int) -> None:
        """Raise `ClusterStartError` if a host cannot connect to the others or to here.

        The controller listens at `address` and `port`; ranks listen at free ports.
        """
        names = [name for name, one in self.servers.items() if one.is_open]
        answers = await self._ask(names, {"listen": address})
        targets = {name: answer["at"] for name, answer in answers.items()}
        asked = {"connect": [[address, port], *targets.values()]}
        errors = []
        for name, answer in (await self._ask(names, asked)).items():
            to_here, *to_hosts = answer["refused"]
            if to_here:
                errors.append(
                    f"{name} cannot connect to the controller at {address}, port {port}"
                    f" of {socket.gethostname()} ({to_here}): name an interface or "
                    "address of this host that it reaches with --interface, or open "
                    "the firewall for it"
                )
            errors += [
                f"{name} cannot connect to {other} at {there}, port {free} ({why}): "
                "their ranks would not reach each other; open the firewall of "
                f"{other} to {name}, for all free ports"
                for (other, (there, free)), why in zip(
                    targets.items(), to_hosts, strict=True
                )
                if why and other != name
            ]
        if errors:
            raise ClusterStartError("\n".join(errors))

    async def _ask(
        self, names: Sequence[str], message: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        asked = (self.answer_of(one, self.servers[one].ask(message)) for one in names)
        return dict(zip(names, await asyncio.gather(*asked), strict=True))

    async def answer_of(self, name: str, answer: Awaitable[T]) -> T:
        """Return an answer of the fork server of a host; its errors name the host."""
        try:
            return await answer
        except ServerEnd as end:
            raise ClusterStartError(f"{name}: its fork server {end}") from None
        except ClusterStartError as error:
            raise ClusterStartError(f"{name}: {error}") from None

    def silent(self) -> list[str]:
        """Return the hosts that have not answered what they were asked."""
        return [name for name, one in self.servers.items() if one.owes_answer]

    def environment(self) -> dict[str, str]:
        """Return what the ranks of other hosts have from this process's environment."""
        return {k: v for k, v in os.environ.items() if k.startswith(FORWARDED)}

    def processes(self) -> list[psutil.Process]:
        """The processes of this host: fork servers, and one ssh for each other host."""
        return [one.process for one in self.servers.values()]

    def _server_ended(self, server: ForkServer) -> None:
        name = next(name for name, one in self.servers.items() if one is server)
        assert server.exit_code is not None
        what = "the fork server of" if is_here(name) else "the ssh to"
        said = server.last_output.splitlines()[-1:]
        why = (
            f"{what} {name} has ended ({describe_exit_code(server.exit_code)}), and "
            f"with it the ranks there{''.join(f'; it said: {line}' for line in said)}"
        )
        for launcher in server.take_engines():
            launcher.ended(None, why=why)

    def close(self) -> None:
        """End the ranks of all hosts, on the thread of the loop."""
        deadline = time.monotonic() + _END
        for server in self.servers.values():
            server.end_input()
        for server in self.servers.values():
            server.close(max(0.1, deadline - time.monotonic()))
            for launcher in server.take_engines():
                launcher.ended(None)


def compare(hosts: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Return what keeps hosts from working together, and other differences.

    `hosts` is what `describe` of the fork server returned, by the names that a person
    gave them.
    """
    errors: list[str] = []
    names: dict[str, str] = {}
    for given, host in hosts.items():
        other = names.setdefault(host["name"], given)
        if other != given:
            errors.append(
                f"{other} and {given} are one host, or both call themselves "
                f"{host['name']}: name each host once, and give each a hostname"
            )
        if host["rankscope"] != __version__:
            errors.append(
                f"{given} has Rankscope {host['rankscope']}, this notebook "
                f"{__version__}: install one version on all hosts"
            )
    here = ".".join(map(str, sys.version_info[:2]))
    differences = [
        f"{given} has Python {host['python']}, this notebook {here}: a function that "
        "is pickled may not load there"
        for given, host in hosts.items()
        if host["python"].rpartition(".")[0] != here
    ]
    packages = {name for host in hosts.values() for name in host["versions"]}
    for package in sorted(packages):
        found = {
            given: host["versions"].get(package, "not installed")
            for given, host in hosts.items()
        }
        differences += _difference(package, found)
    differences += _difference("GPUs", {k: str(v["gpus"]) for k, v in hosts.items()})
    return errors, differences


def _difference(what: str, found: Mapping[str, str]) -> list[str]:
    """Return a sentence if what was found is not the same everywhere."""
    where: dict[str, list[str]] = {}
    for name, value in found.items():
        where.setdefault(value, []).append(name)
    if len(where) < 2:
        return []
    each = (f"{value} on {', '.join(names)}" for value, names in where.items())
    return [f"hosts differ in {what}: {'; '.join(each)}"]


def _is_ours(address: str) -> bool:
    """Return whether an address is an IPv4 address of this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return bool(address)


def _route_to(name: str) -> str:
    """Return this host's address on the route to a host that ssh knows by `name`."""
    try:
        known = subprocess.run(
            ["ssh", "-G", "--", name],
            capture_output=True,
            text=True,
            check=False,
            timeout=_CONNECT,
        ).stdout
    except subprocess.TimeoutExpired:
        # Its configuration runs programs, or asks for names.
        known = ""
    words = (line.split(" ", 1) for line in known.splitlines())
    host = dict(one for one in words if len(one) == 2).get("hostname", name)
    try:
        return address_towards(host)
    except OSError as error:
        raise ClusterStartError(
            f"{name}: no route leads there from this host but ssh's own "
            f"({error.strerror or error}): name the address at which it reaches "
            "this host with --interface"
        ) from None


def _address_of(interface: str) -> str:
    """Return the address of an interface of this host, or the address that it is."""
    if _is_ours(interface):
        return interface
    interfaces = psutil.net_if_addrs()
    for found in interfaces.get(interface, []):
        if found.family is socket.AF_INET:
            return found.address
    raise ClusterStartError(
        f"--interface {interface}: no interface or address of this host; there are "
        f"{', '.join(sorted(interfaces))}"
    )
