"""The handle of a cell that runs in the background."""

from __future__ import annotations

from rankscope.engines import RankError
from rankscope.magics.cells.background import _Tail
from rankscope.magics.output.deduplicate import Item


def test_an_error_is_told_in_lines_and_each_thing_once() -> None:
    op = "all_reduce #2 of group 'default'"
    why = "rank 2 has not entered all_reduce #2: it left cell 15 at its end"
    errors = tuple(
        RankError(
            rank,
            "DistAbortedError",
            f"{op} on rank {rank} (cell 15 line 6): the group was aborted: {why}; "
            "make it usable again with rebuild_process_group() or %dist_rebuild",
            (),
            15,
            line=6,
            sequence_number=2,
        )
        for rank in (0, 1)
    )
    tail = _Tail(0, lambda: None)
    tail.show([Item("error", (0, 1), errors)])
    assert tail.lines == [
        f"ranks 0–1: DistAbortedError: {op} (cell 15 line 6)",
        f"Why: {why}",
    ]
