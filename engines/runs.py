"""Parse runs of numbers as users type them: ``0,2-3``, ranks or GPUs."""

from __future__ import annotations

import re

__all__ = ["parse_runs"]

_PART = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def parse_runs(text: str, what: str, besides: str = "") -> list[range]:
    """Return the runs that `text` names, in its order.

    The runs are ranges, so that 0-999999999 takes no memory. `what` is the word for
    a number, such as ``"rank"``; `besides` is appended to the error message and names
    the other permitted texts. Raises `ValueError` naming the offending part.
    """
    runs = []
    for raw in text.split(","):
        part = raw.strip()
        match = _PART.fullmatch(part)
        if match is None:
            wrong = repr(part) if part else "an empty part"
            raise ValueError(
                f"{wrong} is not a {what}; write {what}s like 0 or 0,2-3{besides}"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the run {part} is empty; write {last}-{first}")
        runs.append(range(first, last + 1))
    return runs
