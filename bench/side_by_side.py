"""The table of docs/which_backend.md: one column a backend, from the rows of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .all_reduce import BLOCKS
from .table import Row, size_name

__all__ = ["side_by_side"]

HEAD = (
    "| all_reduce | torch's gloo | tcp | UCX | MPI | gloo |",
    "|---|---|---|---|---|---|",
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
            tcp, ucx, gloo = (
                known.get(f"all_reduce {place}, {over}, against torch.distributed gloo")
                for over in ("over tcp", "over UCX", "over gloo")
            )
            mpi = known.get(f"MPI all_reduce {place}, against bare mpi4py")
            if tcp and ucx and mpi and gloo:
                times = (tcp.reference, tcp.ours, ucx.ours, mpi.ours, gloo.ours)
                medians = (time.partition(" (")[0] for time in times)
                yield f"| {place} | {' | '.join(medians)} |"
