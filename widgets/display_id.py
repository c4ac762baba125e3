"""Names of displays and elements that a notebook has once."""

from __future__ import annotations

import uuid

__all__ = ["new_display_id"]


def new_display_id() -> str:
    """Return a name that no display has, also of an earlier kernel."""
    return f"rankscope-{uuid.uuid4().hex[:12]}"
