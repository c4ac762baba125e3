"""Encode and decode what a rank adds to the published error of a cell.

The ``error`` output of Jupyter has the class, the message and the traceback of an
exception. The details are the line of the cell and the attributes of a `DistError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankscope.backends.errors import DistError

__all__ = ["pack_details", "unpack_details"]

#: The attributes of a `DistError` that a `RankError` has too.
_ATTRIBUTES = ("group", "op", "sequence_number", "culprits", "reason")


def pack_details(error: BaseException, line: int | None) -> dict[str, Any]:
    """Return the details of `error`, raised at `line` of the cell, for the wire."""
    details: dict[str, Any] = {"line": line}
    if isinstance(error, DistError):
        attributes = error.attributes()
        details.update({name: attributes[name] for name in _ATTRIBUTES})
    return details


def unpack_details(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the details in `content` as attributes of a `RankError`."""
    details = {
        name: content[name] for name in ("line", *_ATTRIBUTES) if name in content
    }
    if "culprits" in details:
        # JSON has no tuples.
        details["culprits"] = tuple(details["culprits"])
    return details
