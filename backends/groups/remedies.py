"""What to do next, as the errors of a group that ended say it at their end."""

from __future__ import annotations

import os
from collections.abc import Callable

from . import launched

__all__ = [
    "ANEW_HINT",
    "ANOTHER_JOB",
    "after_abort",
    "after_death",
    "after_departure",
    "after_store_loss",
    "in_torch",
    "note_notebook",
]

ANEW_HINT = "make another one with new_group() or init_process_group()"
#: Where a job of Slurm has ended.
ANOTHER_JOB = "%dist_init --replace --slurm …"
_SHRINK = "shrink_group() makes a group of the ranks that are left"

_in_notebook = False


def _restarts_together() -> bool:
    return False


def note_notebook(restarts_together: Callable[[], bool] = _restarts_together) -> None:
    """Have errors offer magics from now on: this process is a rank of a notebook."""
    global _in_notebook, _restarts_together
    _in_notebook, _restarts_together = True, restarts_together


def _restart() -> str:
    if _restarts_together():
        return "start all ranks again with %dist_restart all"
    restart = "start it again with %dist_restart, then %dist_rebuild"
    if "SLURM_STEP_ID" in os.environ:
        # Which of both has happened is not known on a rank: its job ends later.
        return f"{restart}; where Slurm's job has ended, {ANOTHER_JOB} starts another"
    return restart


def after_abort() -> str:
    """Return what to do where all ranks of the group are there."""
    how = "make it usable again with rebuild_process_group()"
    return f"{how} or %dist_rebuild" if _in_notebook else how


def after_death() -> str:
    """Return what to do where a rank of the group has died."""
    if _in_notebook:
        return f"{_restart()}; or {_SHRINK}"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if launched.is_launched() and restarts != "0":
        return (
            "destroy_process_group() and init_process_group(), or with torch "
            "rankscope.torch.rebuild(), go on with the process that is started in its "
            "place"
        )
    return _SHRINK


def in_torch(*, dead: bool) -> str:
    """Return what to do where a group of torch's own was aborted."""
    if not _in_notebook:
        return "start the script again"
    return _restart() if dead else "make it usable again with %dist_rebuild"


def after_departure() -> str:
    """Return what to do where a rank has left the group for good."""
    if _in_notebook:
        return f"%dist_rebuild makes this one anew on all ranks; or {_SHRINK}"
    return _SHRINK


def after_store_loss() -> str:
    """Return what to do where the store of the groups is gone."""
    return "start all ranks again"
