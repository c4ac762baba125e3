"""The groups of ``torch.distributed`` in scripts and notebooks.

After ``import rankscope.torch; rankscope.torch.watch()``, before or after the groups
are made, they are in the summaries, flight records and verdicts of Rankscope and on
the board.
"""

from __future__ import annotations

from rankscope.backends.torch_watch.rewrapping import rewrap
from rankscope.backends.torch_watch.watch import TorchWatch, watch

__all__ = ["TorchWatch", "rewrap", "watch"]
