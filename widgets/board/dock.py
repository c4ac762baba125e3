"""Dock: the board beside the notebook, in a panel of JupyterLab.

JupyterLab opens a panel for an extension alone. The package sidecar has one; where it
is not installed, or another front end shows the notebook, the page keeps its bar.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

__all__ = ["Dock"]

#: The mode of JupyterLab's shell → where sidecar puts the panel. In the mode for one
#: document a panel beside the notebook would take the notebook's place: the sidebar of
#: the right side has one, and comes first, for pages in different modes.
_ANCHORS = {"single-document": "right", "multiple-document": "split-right"}
_TITLE = "Rankscope"


class Dock:
    """The panel of a board; every method may be called from any thread."""

    def __init__(self, bundle: Callable[[], dict[str, Any]]) -> None:
        self._bundle = bundle
        self._lock = threading.Lock()
        # Page → the mode of its shell.
        self._shells: dict[str, str] = {}
        self._panel: Any = None

    def note_page(self, page: str, shell: object) -> None:
        """Note the mode of the shell that `page` reports; ``None``: it has none."""
        with self._lock:
            if isinstance(shell, str) and shell in _ANCHORS:
                self._shells[page] = shell
            else:
                self._shells.pop(page, None)

    def open(self) -> None:
        """Open the panel, unless it is open, or there can be none."""
        with self._lock:
            shells = self._shells.values()
            anchor = next((_ANCHORS[one] for one in _ANCHORS if one in shells), None)
            if self._panel is not None or anchor is None:
                return
            if find_spec("sidecar") is None:
                return
            from sidecar import Sidecar

            shown = {
                "output_type": "display_data",
                "data": self._bundle(),
                "metadata": {},
            }
            self._panel = Sidecar(title=_TITLE, anchor=anchor, outputs=[shown])

    def close(self) -> None:
        """Close the panel if it is open, also one that the user has closed."""
        with self._lock:
            panel, self._panel = self._panel, None
        if panel is not None:
            panel.close()
