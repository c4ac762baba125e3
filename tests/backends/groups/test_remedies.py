"""What an error says to do next, after what started the ranks."""

from __future__ import annotations

import pytest

import rankscope as dist
from rankscope.backends.groups import launched, remedies
from rankscope.backends.groups.world import world


def in_a_notebook(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(remedies, "_in_notebook", True)


def with_mpi_in_a_notebook(patch: pytest.MonkeyPatch) -> None:
    in_a_notebook(patch)
    patch.setattr(remedies, "_restarts_together", lambda: True)


def in_a_step_of_slurm(patch: pytest.MonkeyPatch) -> None:
    in_a_notebook(patch)
    patch.setenv("SLURM_STEP_ID", "0")


def under_run(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(launched, "is_launched", lambda: True)
    patch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")


def under_run_without_restarts(patch: pytest.MonkeyPatch) -> None:
    under_run(patch)
    patch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")


SHRINK = "shrink_group() makes a group of the ranks that are left"


@pytest.mark.parametrize(
    ("situation", "after_abort", "after_death"),
    [
        (lambda _: None, "rebuild_process_group()", SHRINK),
        (under_run_without_restarts, "rebuild_process_group()", SHRINK),
        (
            under_run,
            "rebuild_process_group()",
            "destroy_process_group() and init_process_group(), or with torch "
            "rankscope.torch.rebuild(), go on with the process that is started in its "
            "place",
        ),
        (
            in_a_notebook,
            "rebuild_process_group() or %dist_rebuild",
            "start it again with %dist_restart, then %dist_rebuild; or " + SHRINK,
        ),
        (
            in_a_step_of_slurm,
            "rebuild_process_group() or %dist_rebuild",
            "start it again with %dist_restart, then %dist_rebuild; where Slurm's job "
            "has ended, %dist_init --replace --slurm … starts another; or " + SHRINK,
        ),
        (
            with_mpi_in_a_notebook,
            "rebuild_process_group() or %dist_rebuild",
            "start all ranks again with %dist_restart all; or " + SHRINK,
        ),
    ],
)
def test_the_next_step_depends_on_what_started_the_ranks(
    situation: object,
    after_abort: str,
    after_death: str,
    group: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert callable(situation)
    situation(monkeypatch)
    dist.abort_process_group(reason="the loss is NaN")
    with pytest.raises(dist.DistAbortedError) as aborted:
        dist.barrier()
    assert str(aborted.value).endswith(f"; make it usable again with {after_abort}")
    group.rebuild()
    world.abort(None, "rank 2 is dead", by="the notebook", culprits=[2], dead=[2])
    with pytest.raises(dist.DistAbortedError) as died:
        dist.barrier()
    assert str(died.value).endswith(f"by the notebook); {after_death}")
