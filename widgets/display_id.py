"""Names of displays and elements that a notebook has once."""

from __future__ import annotations

import uuid

__all__ = ["new_display_id"]


def new_display_id() -> str:
    """Return a name that no other output has, also of an earlier kernel.

    A front end updates every output that has the name of a display.
    """
    return f"rankscope-{uuid.uuid4().hex[:12]}"
