"""The c10d layer: groups, backends, collectives; it imports nothing of Jupyter.

The names of ``torch.distributed``, usable from a plain script under any
launcher that sets ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

from .groups import unattended

#: Each name is imported at its first use from its module, which the stub has: what
#: looks on from outside, such as `rankscope top`, starts without numpy.
_AT_FIRST_USE = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}

__all__ = sorted(_AT_FIRST_USE)


def __getattr__(name: str) -> Any:
    if name not in _AT_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_AT_FIRST_USE[name]}")
    found = globals()[name] = getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _explain(*answered: Any) -> Any:
    from .observe.diagnosis import explain

    return explain(*answered)


unattended.explainers.append(_explain)
