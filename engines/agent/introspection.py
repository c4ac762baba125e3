"""What a front end asks while a person types a cell: completions and help.

Both may run code of the objects that they are about: the notebook asks for them on the
main thread, as for a cell, and only while no cell runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from .agent import installed

__all__ = ["complete", "inspect"]


def complete(code: str, cursor: int) -> str:
    """Return the reply of IPython's completer as JSON; on the main thread."""
    kernel = installed().kernel
    completer = kernel.shell.Completer
    before = completer.use_jedi
    # Jedi takes up to seconds, and the next cell would wait for it. Without it, what
    # follows a name comes from the object itself.
    completer.use_jedi = False
    try:
        return json.dumps(kernel.do_complete(code, cursor))
    finally:
        completer.use_jedi = before


def inspect(code: str, cursor: int, detail: int, omitted: Sequence[str]) -> str:
    """Return the reply of IPython's help as JSON; on the main thread."""
    return json.dumps(installed().kernel.do_inspect(code, cursor, detail, omitted))
