"""Execution: what arrives, in which order, and how it ends.  No engines."""

from __future__ import annotations

import json
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rankscope.backends import DistAbortedError
from rankscope.engines import Execution, ExecutionError, RankError
from rankscope.engines.cluster import ranks
from rankscope.engines.errors import pack_details


def message(kind: str, **content: Any) -> dict[str, Any]:
    return {"header": {"msg_type": kind}, "content": content}


def printed(text: str) -> dict[str, Any]:
    return message("stream", name="stdout", text=text)


def failed(name: str = "ValueError") -> dict[str, Any]:
    return message("error", ename=name, evalue="x", traceback=["\x1b[31mred\x1b[0m"])


@pytest.fixture
def cell() -> Execution:
    return Execution("code", [0, 2], 7, None)


def test_outputs_are_kept_per_rank_in_order(cell: Execution) -> None:
    cell.receive(0, printed("a"))
    cell.receive(2, printed("b"))
    cell.receive(0, printed("c"))
    assert [one["text"] for one in cell.outputs(0)] == ["a", "c"]
    assert [one["text"] for one in cell.outputs(2)] == ["b"]


def test_what_is_no_output_is_passed_over(cell: Execution) -> None:
    cell.receive(0, message("status", execution_state="busy"))
    cell.receive(0, message("execute_input", code="code", execution_count=1))
    assert cell.outputs(0) == []


def test_a_late_listener_hears_what_came_before(cell: Execution) -> None:
    cell.receive(0, printed("a"))
    received: list[tuple[int, str]] = []
    cell.on_output(lambda rank, output: received.append((rank, output["text"])))
    cell.receive(2, printed("b"))
    assert received == [(0, "a"), (2, "b")]
    fresh: list[int] = []
    cell.on_output(lambda rank, output: fresh.append(rank), replay=False)
    assert fresh == []


def test_it_ends_when_every_rank_has(cell: Execution) -> None:
    ended: list[Execution] = []
    cell.on_done(ended.append)
    cell.finish(0)
    assert (cell.done, cell.ranks_running, ended) == (False, [2], [])
    assert not cell.wait(0)
    cell.finish(2)
    assert (cell.done, cell.ranks_running, ended) == (True, [], [cell])
    cell.on_done(ended.append)
    assert ended == [cell, cell]
    assert cell.result(0) is cell


def test_an_error_gets_its_line_at_the_end(cell: Execution) -> None:
    cell.receive(0, failed())
    cell.receive(0, message("rankscope_error", line=3, cell=7))
    cell.finish(0)
    error = cell.errors[0]
    assert (error.rank, error.ename, error.line, error.cell) == (0, "ValueError", 3, 7)
    assert error.plain_traceback == "red"
    cell.finish(2)
    with pytest.raises(ExecutionError, match="rank 0, line 3: ValueError: x") as raised:
        cell.result()
    assert list(raised.value.errors) == [0]


def test_an_error_gets_the_attributes_of_the_exception(cell: Execution) -> None:
    abort = DistAbortedError(
        "all_reduce #5: the group was aborted",
        rank=2,
        group="tp",
        op="all_reduce",
        sequence_number=5,
        culprits=[1],
        reason="rank 1 is dead",
    )
    for rank, error in ((0, ValueError("x")), (2, abort)):
        cell.receive(rank, failed(type(error).__name__))
        details = json.loads(json.dumps(pack_details(error, 3)))
        cell.receive(rank, message("rankscope_error", **details))
        cell.finish(rank)
    with pytest.raises(RankError) as raised:
        cell.result()
    aborted = cell.errors[2]
    assert (aborted.rank, aborted.group, aborted.op) == (2, "tp", "all_reduce")
    assert (aborted.sequence_number, aborted.culprits) == (5, (1,))
    assert (aborted.reason, aborted.line) == ("rank 1 is dead", 3)
    plain = cell.errors[0]
    assert (plain.group, plain.op, plain.sequence_number) == (None, None, None)
    assert (plain.culprits, plain.reason, plain.line) == ((), None, 3)
    # The error of the cell is the one that explains the abort, with all culprits.
    caught = raised.value
    assert isinstance(caught, ExecutionError)
    assert (caught.rank, caught.ename, caught.culprits) == (0, "ValueError", (1,))
    copied = pickle.loads(pickle.dumps(caught))
    assert str(copied) == str(caught)
    assert vars(copied.errors[2]) == vars(aborted)


def test_a_published_error_is_not_replaced_by_the_reply(cell: Execution) -> None:
    cell.receive(0, failed("FirstError"))
    cell.finish(0, RankError(0, "SecondError", "y"))
    assert cell.errors[0].ename == "FirstError"


def test_a_dead_rank_says_no_more(cell: Execution) -> None:
    cell.finish(0, RankError(0, "EngineDied", "killed"))
    cell.receive(0, printed("from the grave"))
    cell.finish(0)
    assert cell.outputs(0) == []
    assert cell.errors[0].ename == "EngineDied"
    assert cell.ranks_running == [2]


def test_a_waiting_thread_is_woken(cell: Execution) -> None:
    seen: list[bool] = []
    waiter = threading.Thread(target=lambda: seen.append(cell.wait(30)))
    waiter.start()
    cell.finish(0)
    cell.finish(2)
    waiter.join(30)
    assert seen == [True]


def test_what_a_rank_has_named_reaches_no_terminal() -> None:
    name, text = "E\x1b[2J", "\x1b]0;title\x07\u202e"
    error = RankError(1, name, text, ["\x1b[31mE\x1b[0m", text], 7, 3)
    shown = r"E\x1b[2J: \x1b]0;title\x07\u202e"
    assert str(error) == f"rank 1, line 3: {shown}"
    assert str(ExecutionError({1: error})) == str(error)
    assert error.plain_traceback == "E\n" + r"\x1b]0;title\x07\u202e"
    # The attributes are data.
    assert (error.ename, error.evalue) == (name, text)


def test_a_cell_may_begin_while_those_before_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads that watch ask for the status while a person sends cells."""
    sent = {1}

    class Taken:
        def __contains__(self, number: int) -> bool:
            sent.add(2)
            return False

    monkeypatch.setattr(ranks, "parse_runs", lambda *_: [Taken()])
    slot = SimpleNamespace(summary=SimpleNamespace(senders={"another": "7"}))
    registry = SimpleNamespace(this_client={"session": "own"}, slots=[slot])
    own: Any = SimpleNamespace(_registry=registry, _numbers=sent)
    assert ranks.Ranks._sent_cells(own) == "1"
