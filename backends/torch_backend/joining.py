"""The fresh process of a rank that died: what it may do before it joins the others.

They wait for it in `rankscope.torch.rejoin`, and so its first op has to be there. It
makes its model before: the collectives in the constructor of DistributedDataParallel
are left out, since `rejoin` gives the model the values of the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ..errors import DistBackendError
from ..work.flight_recorder import Record
from ..work.hooks import add_op_hook
from . import private

__all__ = ["Joining", "begin", "joining"]


class Joining:
    """Refuses the ops of this process, fresh rank `rank`, until `end`.

    `in_cells`: it refuses none, as a person runs cells on the ranks that they choose.
    """

    def __init__(self, rank: int, *, in_cells: bool) -> None:
        self._rank = rank
        self._rejoins = False
        self._undo: list[Callable[[], None]] = []
        if not in_cells:
            self._undo += [
                add_op_hook(pre=self._refuse).remove,
                private.skip_init_sync(),
            ]

    def _refuse(self, record: Record) -> None:
        if not self._rejoins:
            raise DistBackendError(
                f"{record.op_type.value}: rank {self._rank} was started again, and the "
                "others wait for it in rankscope.torch.rejoin(model, optimizer): call "
                "that before any op, once model and optimizer are made; or call "
                "rankscope.torch.rebuild(), to load a checkpoint on all ranks instead",
                culprits=[self._rank],
            )

    @contextlib.contextmanager
    def rejoining(self) -> Iterator[None]:
        """Let the ops of the block pass; the block ends without an error: `end`."""
        self._rejoins = True
        try:
            yield
        except BaseException:
            self._rejoins = False
            raise
        self.end()

    def end(self) -> None:
        """Let all ops pass from now on: this rank is as the others."""
        global _joining
        for undo in self._undo:
            undo()
        _joining = None


def begin(rank: int, *, in_cells: bool = False) -> None:
    """Begin: this process is the fresh one of global rank `rank`."""
    global _joining
    _joining = Joining(rank, in_cells=in_cells)


def joining() -> Joining | None:
    """Return what refuses ops here; ``None``: this rank is as the others."""
    return _joining


_joining: Joining | None = None
