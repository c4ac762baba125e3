"""Options of the backend ``rankscope``; this module alone needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..groups.config import BackendConfig

__all__ = ["NAME", "Options"]

#: The name of the backend.
NAME = "rankscope"


@dataclass(frozen=True)
class Options:
    """What ``pg_options`` of torch's functions takes for the backend ``rankscope``.

    Parameters
    ----------
    transport : str, optional
        What moves the bytes, as ``backend`` of ``rankscope.init_process_group``:
        ``"tcp"``, ``"ucx"`` or ``"cpu:ucx,cuda:nccl"``, the same on every rank. The
        default is the host engine, tcp, with NCCL for CUDA tensors where cupy is
        installed, and for a group of some of the ranks what the default group has.

    Examples
    --------
    >>> import rankscope.torch
    >>> rankscope.torch.Options(transport="tcp")
    Options(transport='tcp')
    """

    transport: str | None = None

    def __post_init__(self) -> None:
        if self.transport is not None:
            BackendConfig(self.transport)
