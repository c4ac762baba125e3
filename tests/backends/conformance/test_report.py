"""The report of the conformance suite: differences, places, ranks and reasons."""

from __future__ import annotations

import io
import threading

import numpy as np
import pytest

from rankscope.backends.conformance.expect import same
from rankscope.backends.conformance.frames import where_stuck
from rankscope.backends.conformance.ranks import Rank, Ranks
from rankscope.backends.conformance.suite import RULES, select
from rankscope.backends.conformance.trial import Outcome, Rule, describe
from rankscope.conformance import Options, Printer, Report, Result


@pytest.mark.parametrize(
    ("found", "wanted", "message"),
    [
        ([1, 2, 3], [1, 5, 4], "2 of 3 elements differ: element 1 is 2; expected 5"),
        ([[1, 2], [3, 4]], 1, "3 of 4 elements differ: element 1 is 2; expected 1"),
        ([1, 2], [1, 2, 3], r"the shape is \(2,\); expected \(3,\)"),
    ],
)
def test_arrays_that_differ_are_told_in_a_line(
    found: list[int], wanted: object, message: str
) -> None:
    with pytest.raises(AssertionError, match=f"^{message}$"):
        same(np.array(found), np.array(wanted))


def test_arrays_that_are_equal_pass() -> None:
    same(np.arange(6).reshape(2, 3), np.arange(6).reshape(2, 3))
    same(np.ones(4), 1)
    same(np.zeros(0), 7)


def _hang(me: Rank) -> None:
    me.report("")
    threading.Event().wait()


@pytest.mark.processes
def test_where_a_rank_hangs_is_a_line_of_its_own_code() -> None:
    with Ranks(1, _hang) as ranks:
        ranks.next_report(0)
        assert ranks.any_report([0], 0.1) is None
        where = where_stuck(ranks.stacks(0))
    assert where.startswith(f"  in _hang ({__file__}:")
    assert len(where.splitlines()) == 1


def test_a_rank_that_runs_no_code_of_a_backend_shows_its_main_thread() -> None:
    dump = (
        "Thread 0x01 (most recent call first):\n"
        f'  File "{threading.__file__}", line 9 in wait\n\n'
        "Current thread 0x02 (most recent call first):\n"
        f'  File "{threading.__file__}", line 7 in join\n'
    )
    assert where_stuck(dump) == f"  in join ({threading.__file__}:7)"
    assert where_stuck("") == ""


def test_an_error_is_shown_with_the_line_of_the_backend_that_caused_it() -> None:
    def library() -> None:
        raise OSError("no route")

    try:
        try:
            library()
        except OSError as cause:
            raise AssertionError("all_reduce failed") from cause
    except AssertionError as error:
        lines = describe(error).splitlines()
    assert lines[0] == "AssertionError: all_reduce failed"
    assert lines[1] == "  caused by OSError: no route"
    assert lines[2].endswith("in library")


def find(name: str) -> Rule:
    (found,) = select(["exact"], [name])
    return found


def _outcomes(*texts: str) -> list[Outcome]:
    return [Outcome("failed", text) for text in texts]


def _result(rule: Rule, *texts: str) -> Result:
    return Result.of(rule, "cpu", len(texts), _outcomes(*texts), 1.0)


def test_errors_that_differ_in_the_rank_alone_are_one() -> None:
    rule = find("all_reduce")
    one = _result(rule, "on rank 0: no route", "on rank 1: no route")
    assert one.text == "ranks 0–1: on rank 0: no route"
    two = _result(rule, "on rank 0: no route", "on rank 0: it left")
    assert two.text.splitlines() == [
        "rank 0: on rank 0: no route",
        "rank 1: on rank 0: it left",
    ]


def test_what_is_skipped_for_one_reason_is_one_line_at_the_end_of_its_level() -> None:
    stream = io.StringIO()
    printer, report = Printer(stream), Report("mine")
    for name in ("all_reduce", "gather", "scatter"):
        rule = find(name)
        printer.begin(rule, "cpu", 2)
        status = "held" if name == "scatter" else "skipped"
        result = Result.of(rule, "cpu", 2, [Outcome(status, "no routes")], 0.5)
        report.results.append(result)
        printer.end(result)
    report.interrupted = True
    printer.close(report)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "exact, 2 ranks, arrays on 'cpu'"
    assert lines[1].split() == ["held", "scatter", "0.5", "s"]
    assert lines[2] == "  skipped  all_reduce, gather: no routes"
    assert lines[-1].startswith("backend 'mine' was not tried to the end")


@pytest.mark.parametrize("op", ["send", "recv"])
def test_rules_about_other_ops_are_not_tried(op: str) -> None:
    chosen = select(options=Options(ops=(op,)))
    assert [rule.name for rule in chosen if rule.level == "exact"] == ["send_and_recv"]
    assert [rule.name for rule in chosen if rule.level == "recover"] == ["recv"]
    contract = [rule for rule in RULES if rule.level == "contract"]
    assert [rule for rule in chosen if rule.level == "contract"] == contract
    assert select(options=Options()) == list(RULES)
