"""The table of docs/which_backend.md: one column a backend, from the rows of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .all_reduce import BLOCKS
from .table import Row, size_name

__all__ = ["side_by_side"]

HEAD = (
    "| all_reduce | torch's gloo | gloo | UCX | MPI |",
    "|---|---|---|---|---|",
)


def side_by_side(rows: Sequence[Row]) -> str:
    """Return the medians of ordinary arrays, a line for each size and number of ranks.

    Lines that lack a backend are left out.
    """
    known = {row.what: row for row in rows}
    return "\n".join([*HEAD, *_lines(known)])


def _lines(known: dict[str, Row]) -> Iterator[str]:
    for ranks in (2, 4):
        for size in map(size_name, BLOCKS):
            place = f"{size}, {ranks} ranks"
            gloo = known.get(
                f"all_reduce {place}, over gloo, against torch.distributed gloo"
            )
            ucx = known.get(
                f"all_reduce {place}, over UCX, against torch.distributed gloo"
            )
            mpi = known.get(f"MPI all_reduce {place}, against bare mpi4py")
            if gloo and ucx and mpi:
                times = (gloo.reference, gloo.ours, ucx.ours, mpi.ours)
                medians = (time.partition(" (")[0] for time in times)
                yield f"| {place} | {' | '.join(medians)} |"
