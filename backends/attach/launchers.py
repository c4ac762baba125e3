"""What starts the ranks of a job, by command lines and environment variables alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..launch_variables import (
    ENV,
    OPEN_MPI,
    PMI,
    SLURM,
    TORCHELASTIC,
    Variables,
    first_number,
)
from ..nccl.ras import ADDRESS

__all__ = [
    "DUMP_FILES",
    "DUMP_PIPE",
    "VARIABLES",
    "Stated",
    "is_python",
    "launcher_of",
    "module_of",
    "stated_rank",
]

#: Programs, scripts and modules of Python, and the name of their launcher.
_LAUNCHERS = {
    name: launcher
    for launcher, names in {
        "torchrun": "torchrun torch.distributed.run torch.distributed.launch",
        "accelerate": "accelerate accelerate.commands.launch",
        "deepspeed": "deepspeed deepspeed.launcher.launch",
        "mpiexec": "mpiexec mpirun mpiexec.hydra mpirun_rsh hydra_pmi_proxy "
        "orterun orted prterun prte prted",
        "srun": "srun slurmstepd",
        "rankscope.run": "rankscope.run",
    }.items()
    for name in names.split()
}
#: Programs written in Python that run another one, which is the rank.
_WRAPPERS = frozenset(("conda", "mamba", "uv", "poetry", "pipenv"))
#: Options of Python whose value is the next argument.
_WITH_VALUE = frozenset(("-W", "-X", "--check-hash-based-pycs"))

_PYTHON = re.compile(r"(?:python|pypy)[\d.]*t?$")


class _Scheme(NamedTuple):
    """How one kind of launcher tells a process its rank."""

    launcher: str
    names: Variables
    #: Another variable that has to be set.
    needs: str = ""


#: A rank inherits the variables of what started its launcher: the innermost first.
_RUN = TORCHELASTIC[0]
_SCHEMES = (
    _Scheme("torchrun", ENV._replace(job=(_RUN, *ENV.job)), _RUN),
    _Scheme("mpiexec", OPEN_MPI),
    _Scheme("mpiexec", PMI),
    _Scheme("", ENV, ENV.size[0]),
    _Scheme("srun", SLURM, SLURM.job[1]),
)
#: Where torch's ranks over NCCL have a named pipe, and where they write their dumps.
DUMP_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
DUMP_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
#: All that is read of the environment of a process.
VARIABLES = frozenset((ADDRESS, DUMP_PIPE, *DUMP_FILES)).union(
    name
    for kind, names, needs in _SCHEMES
    for name in (names.rank, *names.size, *names.job, needs)
)


class Stated(NamedTuple):
    """What the environment of a process says of its place in a job."""

    launcher: str
    rank: int
    world_size: int | None
    #: What the ranks of its job have in common; empty: its launcher tells.
    job: tuple[str, ...]


def stated_rank(variables: Mapping[str, str]) -> Stated | None:
    """Return what those of `VARIABLES` say of a rank; None: it is none."""
    for scheme in _SCHEMES:
        names = scheme.names
        rank = first_number((names.rank,), variables)
        if rank is None or (scheme.needs and not variables.get(scheme.needs)):
            continue
        size = first_number(names.size, variables)
        if scheme.launcher == "srun" and size == 1:
            # What runs in an allocation, a shell for example, is no job of ranks.
            continue
        values = tuple(variables.get(name, "") for name in names.job)
        return Stated(scheme.launcher, rank, size, values if any(values) else ())
    return None


def is_python(program: str) -> bool:
    return _PYTHON.match(program.rpartition("/")[2]) is not None


def module_of(command: Sequence[str]) -> str:
    """Return the script or module that a Python runs: ``train.py``; else a program."""
    if not command:
        return ""
    if not is_python(command[0]):
        return command[0].rpartition("/")[2]
    arguments = iter(command[1:])
    for one in arguments:
        if one in _WITH_VALUE:
            next(arguments, None)
        elif one == "-m":
            return next(arguments, "")
        elif one == "-c":
            return ""
        elif not one.startswith("-"):
            return one.rpartition("/")[2]
    return ""


def launcher_of(command: Sequence[str]) -> str:
    """Return the launcher that a process is, ``wrapper`` (no rank), or ``""``."""
    name = module_of(command).removesuffix(":")
    if name in _WRAPPERS:
        return "wrapper"
    return _LAUNCHERS.get(name, "")
