"""Hosts that a person names, reached by ssh."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from rankscope.backends.routes import address_towards

from ..errors import ClusterStartError
from . import fork_servers
from .host_names import is_here
from .hosts import LOST_AFTER, Hosts
from .leashed import LeashedProcess
from .processes import printed

__all__ = ["SshHosts", "ssh_command"]

#: Requests for an answer until a host is given up.
_ALIVE = 20
#: Seconds that ssh gets to connect.
_CONNECT = 20

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
    # Before the next one, which it also says.
    "Temporary failure in name resolution": (
        "no name server answers here, and /etc/hosts does not have it: name it by its "
        "address, or in ~/.ssh/config"
    ),
    "Could not resolve hostname": (
        "its name is not known here, and it is no hostfile: name it by its address, or "
        "in ~/.ssh/config"
    ),
    "Connection refused": "no sshd listens there: start it, or name another port for "
    "{host} in ~/.ssh/config",
    "banner exchange": (
        "what accepts the connection there does not speak ssh in time: is it sshd's "
        "port, and does the host hang?"
    ),
    "kex_exchange_identification": (
        "the connection ends before the login: sshd has too many (MaxStartups), or "
        "takes none from this host, or a jump host does not lead there"
    ),
    "Connection timed out": "nothing answers there: is it on, and does a firewall "
    "between the hosts let ssh through?",
    "No route to host": "no network leads there from this host",
    "Network is unreachable": "no network leads there from this host",
}


def ssh_command(
    name: str, python: str, folder: str, lost_after: float = LOST_AFTER
) -> list[str]:
    """Return the command that runs a fork server on the host `name`.

    It asks no question: a password, or the key of a host that is not known, is an
    error. `folder` is the working directory where the host has it, else it is home.
    ssh ends where the host does not answer for `lost_after` seconds.
    """
    home = python.startswith("~/")
    quoted = f'"$HOME"/{shlex.quote(python[2:])}' if home else shlex.quote(python)
    script = (
        f"cd {shlex.quote(folder)} 2>/dev/null; "
        f"exec {quoted} -m {fork_servers.MODULE} describe"
    )
    interval = max(1, round(lost_after / _ALIVE))
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": _CONNECT,
        "ServerAliveInterval": interval,
        "ServerAliveCountMax": max(1, round(lost_after / interval)),
        # A shared connection would outlive the ranks; the notebook needs no forwarding.
        "ControlMaster": "no",
        "ClearAllForwardings": "yes",
        "RemoteCommand": "none",
    }
    chosen = [f"-o{key}={value}" for key, value in options.items()]
    # Within single quotes fish heeds the backslash, and tcsh the exclamation mark.
    argument = re.sub(r"[\\!]", r"'\\\g<0>'", shlex.quote(script))
    return ["ssh", "-T", *chosen, "--", name, f"exec sh -c {argument}"]


class SshHosts(Hosts):
    """Hosts with an ssh each; this host needs none."""

    def leash(self, name: str) -> str:
        return f"the {'fork server of' if is_here(name) else 'ssh to'} {name}"

    async def connect(self, name: str) -> dict[str, Any]:
        # A resolver that does not answer is waited for here, and for all hosts at once.
        await asyncio.to_thread(is_here, name)
        return await super().connect(name)

    def command(self, name: str) -> list[str]:
        if is_here(name):
            return [sys.executable, "-m", fork_servers.MODULE, "describe"]
        if shutil.which("ssh") is None:
            raise ClusterStartError(
                f"{name}: there is no ssh on this host: install openssh-client"
            )
        return ssh_command(name, self.python, os.getcwd(), self.lost_after)

    def probe(self, name: str) -> list[str]:
        return ["true"] if is_here(name) else [*self.command(name)[:-1], "true"]

    def silent_hosts(self, names: Sequence[str]) -> str:
        return (
            f"does `ssh -o BatchMode=yes {names[0]} true` end in a terminal? "
            "--start-timeout gives a host longer"
        )

    def why_refused(self, name: str, server: LeashedProcess) -> str:
        if server.exit_code != 255:
            how = f"what ssh ran there ended with {server.exit_code} and did not answer"
            return f"{how}: {self.try_there(name)}{server.last_lines()}"
        for words, advice in _ADVICE.items():
            if words in server.last_output:
                return f"{advice.format(host=name)}{server.last_lines()}"
        # ssh says nothing more of a program that a signal has ended.
        how = "ssh cannot log in, or a signal has ended what it ran there"
        return f"{how}: {self.try_there(name)}{server.last_lines()}"

    def try_there(self, name: str) -> str:
        to_it = "" if is_here(name) else f"ssh -o BatchMode=yes {name} "
        return f"`{to_it}{self.python} -m rankscope doctor` has to work in a terminal"

    def route_to(self, name: str) -> str:
        """Return this host's address on the route to a host, as ssh knows it."""
        # Its configuration may run programs, or ask for names.
        known = printed("ssh", "-G", "--", name, timeout=_CONNECT)
        words = (line.split(" ", 1) for line in known.splitlines())
        host = dict(one for one in words if len(one) == 2).get("hostname", name)
        try:
            return address_towards(host)
        except OSError as error:
            raise ClusterStartError(
                f"{name}: no route of IPv4 leads there from this host but ssh's own "
                f"({error.strerror or error}), and ipyparallel's controller, which all "
                "ranks connect to, has no IPv6: give the hosts IPv4 addresses, and "
                "name the one at which it reaches this host with --interface"
            ) from None
