"""Where a report goes, when one is written, and of which job: from the environment."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..launch_variables import (
    ENV,
    OPEN_MPI,
    PMI,
    PMIX,
    SLURM,
    TORCHELASTIC,
    ranks,
    sizes,
)

__all__ = ["ERROR_FILE", "Settings", "facts_of", "job_key", "job_name", "this_host"]

#: Values of a variable that mean no.
_NO = ("0", "false", "no", "off")
#: Seconds that an op is in flight before nobody is expected to end it. Other ranks may
#: wait that long for one that saves or evaluates; torch gives up after 10 minutes.
AFTER = 120.0
#: A younger op is judged by no rule.
LEAST = 2.0
#: The folder in the working directory.
FOLDER = "rankscope-report"

_LAUNCHERS = (ENV, OPEN_MPI, PMI, PMIX, SLURM)
#: Variables with the rank, and with the number of ranks.
RANK, WORLD_SIZE = ranks(*_LAUNCHERS), sizes(*_LAUNCHERS)
#: What distinguishes two jobs of one user on one host. torchrun makes the folder of the
#: error files anew for each attempt.
_OF_JOB = (
    *TORCHELASTIC,
    *(*ENV.job, *SLURM.job, *PMIX.job),
    *("OMPI_MCA_ess_base_jobid", "PMI_KVSNAME"),
)
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

#: Variables that are written down; no others, which may be secrets.
_SHOWN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_IB_DISABLE"),
    *("NCCL_IB_HCA", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_ALGO"),
    *("NCCL_PROTO", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"),
    *("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"),
    *("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_BUFFER_SIZE"),
)
#: Characters of a value that are kept.
_LONGEST = 200


@dataclass(frozen=True)
class Settings:
    """Whether, where and when a report is written."""

    #: The folder in which each report has its own; None: no report is written.
    folder: Path | None
    #: Seconds that an op may be in flight.
    after: float = AFTER

    @classmethod
    def of(cls, env: Mapping[str, str] = os.environ) -> Settings:
        """Return what the variables say; raises `ValueError` below `LEAST` seconds."""
        where = env.get("RANKSCOPE_REPORT", "")
        text = env.get("RANKSCOPE_REPORT_AFTER") or str(AFTER)
        try:
            after = float(text)
        except ValueError:
            after = math.nan
        if not LEAST <= after < math.inf:
            raise ValueError(
                f"RANKSCOPE_REPORT_AFTER={text}: expected seconds, {LEAST:g} or more"
            )
        if where.lower() in _NO:
            return cls(None, after)
        # The program may go to another folder.
        return cls(Path(where or FOLDER).absolute(), after)


def job_key(parent: int, env: Mapping[str, str] = os.environ, *, job: str = "") -> str:
    """Return what the ranks of a job have in common on a host, and no others have.

    `parent` is the process that has started this one, `job` what the program tells of
    it, if it does.
    """
    error_file = env.get(ERROR_FILE)
    known = [env.get(name, "") for name in _OF_JOB]
    # A shell may be between a launcher and each of its ranks.
    own = "" if any(known) else str(parent)
    if error_file:
        own = os.path.dirname(os.path.dirname(error_file))
    parts = [this_host(), *([job] if job else [own, *known])]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def this_host() -> str:
    """Return where pids are unique: hosts may share the temporary folder."""
    try:
        return f"{os.uname().nodename} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return os.uname().nodename


def job_name(env: Mapping[str, str] = os.environ, *, job: str = "") -> str:
    """Return the name of the job as a part of a path; `job`: see `job_key`."""
    # torchrun --standalone makes up a UUID.
    name = re.sub("-[-0-9a-f]{27}$", "", env.get("TORCHELASTIC_RUN_ID", ""))
    if name in ("", "none"):
        name = "slurm-" + env["SLURM_JOB_ID"] if env.get("SLURM_JOB_ID") else ""
    name = name or job
    if not name and env.get("MASTER_PORT"):
        name = f"{env.get('MASTER_ADDR', '')}-{env['MASTER_PORT']}"
    return re.sub(r"[^\w.-]+", "-", name)[:60].strip(".-") or "job"


def facts_of(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    return {name: env[name][:_LONGEST] for name in _SHOWN if name in env}
