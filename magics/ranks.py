"""Rank sets as a person types them: ``-r 0,2-3``."""

from __future__ import annotations

from collections.abc import Collection

from rankscope.engines.runs import parse_runs
from rankscope.widgets.ranks import name_ranks

__all__ = ["parse_ranks"]


def parse_ranks(text: str, present: Collection[int], of: str = "cluster") -> list[int]:
    """Return the ranks that `text` names, sorted, each once.

    `text` is ``"all"`` or a comma-separated list of ranks and inclusive runs,
    such as ``"0,2-3"``. `present` are the ranks there are, `of` what they
    belong to.

    Raises `ValueError`, naming the offending part and what is there.
    """
    if text.strip() == "all":
        return sorted(present)
    runs = parse_runs(text, "rank", ", or all")
    for run in runs:
        # The bounds alone are compared first: 0-999999999 must not be spelled out.
        missing = [rank for rank in (run[0], run[-1]) if rank not in present]
        if not missing:
            missing = [rank for rank in run if rank not in present]
        if missing:
            raise ValueError(
                f"there is no {name_ranks(missing[:1])}; "
                f"the {of} has {name_ranks(present)}"
            )
    return sorted({rank for run in runs for rank in run})
