"""The variables by which launchers tell a process its place in a job.

Which of them count, and in which order, is for the caller to say: a rank inherits the
variables of what has started its launcher.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

__all__ = [
    "ENV",
    "OPEN_MPI",
    "PMI",
    "PMIX",
    "SLURM",
    "STORE",
    "TORCHELASTIC",
    "Variables",
    "first_number",
    "ranks",
    "sizes",
]


class Variables(NamedTuple):
    """The names that launchers of one kind use."""

    rank: str
    #: The number of ranks; the first one that is set counts.
    size: tuple[str, ...] = ()
    #: The number of ranks on the host.
    local_size: str = ""
    #: Equal for the ranks of one job, and different between jobs.
    job: tuple[str, ...] = ()


#: What torchrun sets, our engines, and people in a loop.
ENV = Variables(
    "RANK", ("WORLD_SIZE",), "LOCAL_WORLD_SIZE", ("MASTER_ADDR", "MASTER_PORT")
)
#: What torchrun sets beside them: the name of the run, and the number of its restarts.
TORCHELASTIC = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
#: ``HOST:PORT/RUN/MASTER_PORT``: the address of the store that the launcher of the
#: ranks serves, which outlives each of them, and two variables of its job.
STORE = "RANKSCOPE_STORE"
OPEN_MPI = Variables(
    "OMPI_COMM_WORLD_RANK",
    ("OMPI_COMM_WORLD_SIZE",),
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    ("PMIX_NAMESPACE",),
)
#: MPICH, Intel MPI and others with PMI.
PMI = Variables("PMI_RANK", ("PMI_SIZE",), "MPI_LOCALNRANKS")
#: What PMIx starts, as ``srun --mpi=pmix``; Open MPI's own variables are beside them.
PMIX = Variables("PMIX_RANK", job=OPEN_MPI.job)
#: A shell in an allocation has the rank, too. A step may be smaller than that.
SLURM = Variables(
    "SLURM_PROCID",
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
)


def ranks(*kinds: Variables) -> tuple[str, ...]:
    """Return the variables with the rank."""
    return tuple(one.rank for one in kinds)


def sizes(*kinds: Variables) -> tuple[str, ...]:
    """Return the variables with the number of ranks."""
    return tuple(name for one in kinds for name in one.size)


def first_number(
    names: tuple[str, ...], env: Mapping[str, str] = os.environ
) -> int | None:
    """Return the first of the variables that is a number, as ``RANK``."""
    for name in names:
        text = env.get(name, "")
        # Digits of other scripts are decimal, too.
        if text.isascii() and text.isdecimal() and len(text) < 10:
            return int(text)
    return None
