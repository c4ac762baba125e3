"""The c10d layer: groups, backends, collectives; it imports nothing of Jupyter.

The names of ``torch.distributed``, usable from a plain script under any
launcher that sets ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``.
"""

from __future__ import annotations

from typing import Any

from .first_use import at_first_use, stubbed
from .groups import unattended

# What looks on from outside, such as `rankscope top`, starts without numpy.
__getattr__, __dir__, __all__ = at_first_use(__name__, stubbed(__file__))


def _explain(*answered: Any) -> Any:
    from .observe.diagnosis import explain

    return explain(*answered)


unattended.explainers.append(_explain)
