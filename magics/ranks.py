"""Rank sets as a person types them: ``-r 0,2-3``."""

from __future__ import annotations

import re
from collections.abc import Collection

from rankscope.widgets.ranks import name_ranks

__all__ = ["parse_ranks"]

_PART = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def parse_ranks(text: str, present: Collection[int], of: str = "cluster") -> list[int]:
    """Return the ranks that `text` names, sorted, each once.

    `text` is ``"all"`` or a comma-separated list of ranks and inclusive runs,
    such as ``"0,2-3"``. `present` are the ranks there are, `of` what they
    belong to.

    Raises `ValueError`, naming the offending part and what is there.
    """
    if text.strip() == "all":
        return sorted(present)
    chosen: set[int] = set()
    for raw in text.split(","):
        part = raw.strip()
        match = _PART.fullmatch(part)
        if match is None:
            what = repr(part) if part else "an empty part"
            raise ValueError(
                f"{what} is not a rank; write ranks like 0 or 0,2-3, or all"
            )
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        if last < first:
            raise ValueError(f"the run {part} is empty; write {last}-{first}")
        # The bounds alone are compared first: 0-999999999 must not be spelled out.
        missing = [rank for rank in (first, last) if rank not in present]
        if not missing:
            missing = [rank for rank in range(first, last + 1) if rank not in present]
        if missing:
            raise ValueError(
                f"there is no {name_ranks(missing[:1])}; "
                f"the {of} has {name_ranks(present)}"
            )
        chosen.update(range(first, last + 1))
    return sorted(chosen)
