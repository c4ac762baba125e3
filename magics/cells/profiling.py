"""``%dist_profile``: where the ranks are, now or in the next seconds."""

from __future__ import annotations

from collections.abc import Sequence

from IPython.core.interactiveshell import InteractiveShell

from rankscope.backends.rank_sets import name_ranks
from rankscope.engines import Cluster, Job
from rankscope.widgets import ProfileReport, ProgressLine

__all__ = ["take_profile"]


def take_profile(
    shell: InteractiveShell,
    cluster: Cluster | Job,
    ranks: Sequence[int],
    seconds: float,
    every: bool,
) -> ProfileReport:
    """Sample `ranks` for `seconds`, or until an interrupt; return the report."""
    with ProgressLine(shell) as progress:
        profile = cluster.sample(
            seconds,
            ranks,
            every=every,
            on_progress=lambda so_far: progress.update(
                f"sampling {name_ranks(ranks)}: {so_far:.0f} of {seconds:g} s"
            ),
        )
    return ProfileReport(profile, every)
