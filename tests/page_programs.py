"""The programs of the page *Coming from torch*, in pairs, and what they leave in x."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rankscope.backends.conformance.ranks import Rank

__all__ = ["PROGRAMS", "left_in_x"]

_PAGE = Path(__file__).resolve().parent.parent / "docs" / "coming_from_torch.md"

_PAIRS = re.findall(
    r"^:::\{container\} beside\n```python\n(.*?)^```\n\n```python\n(.*?)^```\n:::$",
    _PAGE.read_text(encoding="utf-8"),
    re.DOTALL | re.MULTILINE,
)
_IN_X: list[list[list[float]]] = [
    [[0.5, 0.5, 0.5]] * 2,
    [[1.0, 1.0], [0.0, 0.0]],
    [[0, 1]] * 2,
]

#: What each rank of two has in x in the end, the program in torch, and here.
PROGRAMS = [
    (expected, torch, ours)
    for expected, (torch, ours) in zip(_IN_X, _PAIRS, strict=True)
]


def left_in_x(me: Rank, program: str) -> Any:
    """Run `program` on one rank; return its array x as a list."""
    names: dict[str, Any] = {"__name__": "the_page"}
    exec(program, names)
    found = names["x"].tolist()
    names["dist"].destroy_process_group()
    return found
