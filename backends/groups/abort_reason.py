"""AbortReason: who ended a group, when and why; and why its ops hang meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

__all__ = ["REBUILD_HINT", "AbortReason", "FoundCause"]

REBUILD_HINT = "make it usable again with rebuild_process_group() or %dist_rebuild"


@dataclass(frozen=True)
class AbortReason:
    """Why a generation of a group ended; the first reason on any rank holds.

    `by` names who ended it, `at` is the time (``time.time()``), `culprits` are the
    global ranks that are the cause, as far as they are known. `diagnosis` is the part
    of `text` that explains why an op timed out, for ranks on which it did so too.
    `remedy` is what can be done, as the end of an error's message.
    """

    text: str
    by: str
    at: float = field(default_factory=time.time)
    culprits: Sequence[int] = ()
    diagnosis: str = ""
    remedy: str = REBUILD_HINT

    def __str__(self) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(self.at))
        return f"{self.text} (at {when}, by {self.by})"

    def to_json(self) -> str:
        """Return the reason as the other ranks read it from the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> AbortReason:
        """Return the reason that `to_json` wrote; without a time, it is now."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class FoundCause:
    """Why ops of a group hang, as a diagnosis over all ranks found it.

    `at` is when this rank was told (``time.monotonic()``), `culprits` are the global
    ranks at fault.
    """

    text: str
    culprits: Sequence[int] = ()
    at: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        told = time.time() - (time.monotonic() - self.at)
        when = time.strftime("%H:%M:%S", time.localtime(told))
        return f"diagnosis at {when}: {self.text}"
