"""The place of a process in a step of Slurm, as the variables that torchrun sets.

``srun python train.py`` starts a rank for each task and sets neither ``RANK`` nor an
address. Only a step counts: what a batch script or a shell starts has the task of that.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from .errors import DistNetworkError
from .launch_variables import ENV, OPEN_MPI, PMI, SLURM, ranks, sizes

__all__ = [
    "exchange_step",
    "fill_environment",
    "meeting_step",
    "require_same_step",
    "why_port_is_taken",
]

#: Steps from here on are a job's batch script, its shell, and what Slurm itself runs.
_NO_STEP = 0xFFFF_FFF0
#: The key of the step whose ranks meet in a store.
_KEY = "rankscope/step"
#: The ports that jobs meet at: below those that a system gives to connections.
_FIRST_PORT, _PORTS = 20_000, 12_000

_OTHERS = (*ranks(ENV, OPEN_MPI, PMI), *sizes(OPEN_MPI, PMI))


def fill_environment(env: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables of torchrun that a task of a step lacks, if it has no rank.

    Rank 0 is on the first node of the step, where the ranks meet, at a port that
    follows from the numbers of the job and the step. A batch script may have set
    another address, as for torch; of another ``WORLD_SIZE`` nothing can be said.
    """
    step = env.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= _NO_STEP:
        return
    if any(env.get(name) for name in _OTHERS):
        return
    try:
        rank, node = int(env[SLURM.rank]), int(env["SLURM_NODEID"])
        size, local = int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_LOCALID"])
        tasks = _tasks(env["SLURM_STEP_TASKS_PER_NODE"])
        first = _first_node(_nodes(env))
        port = _port(env)
        here = tasks[node]
    except (KeyError, ValueError, IndexError, OSError):
        # Another Slurm than is known: the error of the rendezvous says what to set.
        return
    found = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(here),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": "127.0.0.1" if len(tasks) == 1 else first,
        "MASTER_PORT": port,
    }
    if (env.get("WORLD_SIZE") or str(size)) == str(size):
        env.update({name: env.get(name) or value for name, value in found.items()})


def meeting_step(env: Mapping[str, str] = os.environ) -> str:
    """Return the step, as ``21.3``, where its ranks alone are to meet; else nothing."""
    try:
        port = _port(env)
    except (KeyError, ValueError):
        return ""
    meets = env.get("MASTER_PORT") == port
    return f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}" if meets else ""


def exchange_step(store: Any, step: str, rank: int) -> str:
    """Return the step whose ranks meet in `store`, ours or torch's: that of rank 0."""
    if rank == 0:
        store.set(_KEY, step)
    return str(store.get(_KEY).decode())


def require_same_step(found: str, step: str, rank: int, place: str) -> None:
    """Raise `DistNetworkError` where the store at `place` is of another step."""
    if found != step:
        raise DistNetworkError(
            f"init_process_group on rank {rank}: at {place} are ranks of Slurm's step "
            f"{found}, and this one is of step {step}: start it again, as the next "
            "step has another port; or set MASTER_PORT"
        )


def why_port_is_taken(env: Mapping[str, str] = os.environ) -> str:
    """Return why rank 0 cannot listen where the ranks of its step meet; else nothing.

    The numbers of two steps may give the same port. Torch says of that only that it is
    in use.
    """
    step = meeting_step(env)
    if not step or env.get(ENV.rank) != "0":
        return ""
    with socket.socket() as probe:
        # What has ended a moment ago does not hold it.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(env["MASTER_PORT"])))
        except OSError as error:
            return (
                f"port {env['MASTER_PORT']} of {socket.gethostname()}, at which the "
                f"ranks of Slurm's step {step} are to meet, is taken "
                f"({error.strerror}), as by a step whose numbers give the same port: "
                "end this one, in which other ranks may wait, and start it again, as "
                "the next step has another port; or set MASTER_PORT"
            )
    return ""


def _port(env: Mapping[str, str]) -> str:
    number = 31 * int(env["SLURM_JOB_ID"]) + int(env["SLURM_STEP_ID"])
    return str(_FIRST_PORT + number % _PORTS)


def _nodes(env: Mapping[str, str]) -> str:
    """Return the nodes of the step; that of rank 0 is the first one."""
    if env.get("SLURM_DISTRIBUTION") == "arbitrary":
        return Path(env["SLURM_HOSTFILE"]).read_text(encoding="utf-8").split()[0]
    return env["SLURM_STEP_NODELIST"]


def _first_node(nodes: str) -> str:
    """Return the first node of a list such as ``rack[1-2]node[03,07-09],login``."""
    name = re.split(r",(?![^\[]*\])", nodes)[0]
    if not name:
        raise ValueError("an empty list of nodes")
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", name)


def _tasks(counts: str) -> list[int]:
    """Return the number of tasks of each node, of ``2(x3),1`` for 2, 2, 2 and 1."""
    found: list[int] = []
    for part in counts.split(","):
        number, _, times = part.partition("(x")
        found += [int(number)] * int(times.rstrip(")") or 1)
    return found
